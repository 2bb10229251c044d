# SPDX-License-Identifier: Apache-2.0
"""Computes what each fault of a run did, and the figures of the whole run."""

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

from diloco.metrics import goodput as metrics_goodput
from diloco.metrics import names
from diloco.metrics.goodput import StepRecord
from launch.chaos import faults, simulated
from launch.chaos.fault_plan import RECOVERY_S, PlannedFault
from launch.chaos.faults import KINDS
from launch.chaos.live_run import WrittenStep, participants
from launch.chaos.record import Record, begin_of, fault_of
from launch.chaos.simulated import SimulatedRun

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The effect of one fault.

  Attributes:
    begun_s: since the begin of the plan; None: it was not performed.
    counted: what the counters of its kind moved by; None: it has none.
    back_s: from its begin until its target was merged again, or, of the
      syncer, until a round closed; None: never.
    lost_s: time of its target without a step, meanwhile.
    stall_s: longest time between two steps of any other learner meanwhile, less
      its usual step.
    failed: why it was not performed; '' else.
  """

  number: int
  kind: str
  target: str
  begun_s: float | None
  counted: int | None
  back_s: float | None
  lost_s: float
  stall_s: float
  failed: str


def outcomes(record: Record) -> tuple[Outcome, ...]:
  """Returns what each fault of the plan did."""
  by_number = {x['number']: x for x in record.performed}
  return tuple(
    _outcome(record, fault, by_number.get(fault.number))
    for fault in record.plan
  )


def _outcome(
  record: Record, fault: PlannedFault, line: Mapping | None
) -> Outcome:
  if line is None or line['failed']:
    why = line['failed'] if line else 'it was not reached'
    return Outcome(
      fault.number, fault.kind, fault.target, None, None, None, 0.0, 0.0, why
    )
  begun_s, kind = line['began_s'], KINDS[fault.kind]
  back_at_s = _back(record, fault, line['ended_s'])
  until_s = record.course.ended_s if back_at_s is None else back_at_s
  others = [m for m in record.steps if m != fault.learner]
  own = [s for s in record.steps.get(fault.learner, ()) if s.time_s > begun_s]
  in_steps_s = sum(
    max(0.0, min(s.time_s, until_s) - max(s.time_s - s.step_s, begun_s))
    for s in own
  )
  return Outcome(
    number=fault.number,
    kind=fault.kind,
    target=fault.target,
    begun_s=begun_s - record.course.began_s,
    counted=_counted(line, kind.counters) if kind.counters else None,
    back_s=None if back_at_s is None else back_at_s - begun_s,
    lost_s=(
      0.0 if fault.learner is None else max(0.0, until_s - begun_s - in_steps_s)
    ),
    stall_s=longest_stall_s(
      {m: record.steps[m] for m in others},
      hits(record, but=fault.number),
      (begun_s, until_s),
    ),
    failed='',
  )


def _counted(line: Mapping, counters: Iterable[str]) -> int:
  counted = line['counted']
  ways = [line['way']] if line['way'] else list(counted)
  return sum(counted[way][name] for way in ways for name in counters)


def _back(record: Record, fault: PlannedFault, ended_s: float) -> float | None:
  """Returns when the target did its part again; None: never."""
  if fault.kind == 'leave':
    return None
  for line in record.tape:
    if line['kind'] != 'Publish' or line[names.TIME] < ended_s:
      continue
    if fault.learner is None or fault.learner in participants(line):
      if fault.learner is None or not faults.outage(fault.kind):
        return line[names.TIME]
      started_s = _started_s(record, fault.target, ended_s)
      if started_s is not None and line[names.TIME] > started_s:
        return line[names.TIME]
  return None


def _started_s(record: Record, target: str, since_s: float) -> float | None:
  return next(
    (
      event.time_s
      for event in record.events
      if event.process == target.partition('.')[0]
      and event.event == 'started'
      and event.time_s >= since_s
    ),
    None,
  )


def hits(record: Record, but: int = 0) -> dict[int, list[Span]]:
  """Returns the times in which a fault explains each learner's silence."""
  found = collections.defaultdict(list)
  for line in record.performed:
    fault = fault_of(line)
    if line['failed'] or fault.learner is None or fault.number == but:
      continue
    back_s = _back(record, fault, line['ended_s'])
    end_s = float('inf') if back_s is None else back_s
    found[fault.learner].append((line['began_s'], end_s))
  return found


def longest_stall_s(
  steps: Mapping[int, Sequence[WrittenStep]],
  hit: Mapping[int, Sequence[Span]],
  span: Span,
) -> float:
  """Returns the longest time between two steps that no fault explains.

  Of one process, less the usual length of its steps.

  Args:
    steps: by learner, in order.
    hit: when a fault befell each learner, until it was back.
    span: of which gaps count, where they touch it.
  """
  longest_s = 0.0
  for m, many in steps.items():
    usual_s = _usual_s(many)
    for before, after in itertools.pairwise(many):
      begin_s, end_s = before.time_s, after.time_s
      same = after.step > before.step
      touches = begin_s < span[1] and end_s > span[0]
      explained = any(begin_s < e and end_s > b for b, e in hit.get(m, ()))
      if same and touches and not explained:
        longest_s = max(longest_s, end_s - begin_s - usual_s)
  return longest_s


def _usual_s(steps: Sequence[WrittenStep]) -> float:
  gaps = [b.time_s - a.time_s for a, b in itertools.pairwise(steps)]
  return statistics.median(gaps) if gaps else 0.0


# The figures ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Figures:
  """The figures of a run, real or simulated."""

  goodput: float
  uptime: float
  rounds: int
  steps: int
  longest_stall_s: float
  participation: dict[int, float]
  refused: dict[str, int]


def figures(record: Record) -> Figures:
  """Returns the figures of the real run, to the end of its plan."""
  ended_s = record.course.ended_s
  planned = record.config.protocol.learners
  tape = [x for x in record.tape if x[names.TIME] <= ended_s]
  work = metrics_goodput.work_of_tape(reversed(tape), planned)
  begin_s = begin_of(record)
  closes = [x for x in tape if x['kind'] == 'Publish']
  merged = collections.Counter(m for x in closes for m in participants(x))
  many = [
    StepRecord(m, s.time_s, s.step_s, min(s.stall_s, s.step_s))
    for m, each in record.steps.items()
    for s in each
    if s.time_s <= ended_s
  ]
  refused = collections.Counter(
    simulated.reason_of(x['reason']) for x in tape if x['kind'] == 'refused'
  )
  return Figures(
    goodput=work.goodput(ended_s) if work else 0.0,
    uptime=metrics_goodput.uptime(many, begin_s, ended_s),
    rounds=len(closes),
    steps=len(many),
    longest_stall_s=longest_stall_s(
      record.steps, hits(record), (record.course.began_s, ended_s)
    ),
    participation={
      m: merged[m] / max(1, len(closes)) for m in sorted(record.steps)
    },
    refused=dict(refused),
  )


def simulated_figures(
  record: Record, run: SimulatedRun, begin_s: float
) -> Figures:
  """Returns the same figures of the simulation of a plan.

  Args:
    begin_s: when the plan began, on the simulated clock.
  """
  steps = {
    m: [WrittenStep(t, 0, i, 0.0, 0.0) for i, t in enumerate(times_s)]
    for m, times_s in run.steps_s.items()
  }
  hit = collections.defaultdict(list)
  for fault in record.plan:
    if fault.learner is not None:
      at_s = begin_s + fault.at_s
      forever = float('inf') if fault.kind == 'leave' else 0.0
      end_s = at_s + fault.hold_s + RECOVERY_S + forever
      hit[fault.learner].append((at_s, end_s))
  return Figures(
    goodput=run.goodput,
    uptime=run.uptime,
    rounds=run.rounds,
    steps=run.steps,
    longest_stall_s=longest_stall_s(steps, hit, (begin_s, float('inf'))),
    participation=run.participation,
    refused=run.refused,
  )
