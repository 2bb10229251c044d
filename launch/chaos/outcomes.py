# SPDX-License-Identifier: Apache-2.0
"""Computes what each fault of a run did, and the figures of the whole run."""

import bisect
import collections
import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

from diloco import faults
from diloco.faults import KINDS, Fault
from diloco.metrics import goodput as metrics_goodput
from diloco.metrics import names
from diloco.metrics.goodput import StepRecord
from diloco.metrics.workdir import learner_name
from launch.chaos import simulated
from launch.chaos.fault_plan import RECOVERY_S
from launch.chaos.live_run import WrittenStep, participants
from launch.chaos.record import Record, begin_of, fault_of
from launch.chaos.simulated import SimulatedRun
from launch.program import SYNCER

Span = tuple[float, float]
Gaps = Mapping[int, Sequence[tuple[float, float, float]]]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The effect of one fault.

  Attributes:
    begun_s: since the begin of the plan; None: it was not performed.
    counted: what the counters of its kind moved by; None: it has none.
    in_use: of a fault of a link: its target and the syncer had merged since
      their starts, and lived to its end.
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
  in_use: bool
  back_s: float | None
  lost_s: float
  stall_s: float
  failed: str


def outcomes(record: Record) -> tuple[Outcome, ...]:
  """Returns what each fault of the plan did."""
  by_number = {x['number']: x for x in record.performed}
  returns, gaps = _returns(record), _gaps(record.steps)
  return tuple(
    _outcome(record, fault, by_number.get(fault.number), returns, gaps)
    for fault in record.plan
  )


def _outcome(
  record: Record,
  fault: Fault,
  line: Mapping | None,
  returns: Mapping[int, float | None],
  gaps: Gaps,
) -> Outcome:
  if line is None or line['failed']:
    why = line['failed'] if line else 'it was not reached'
    return Outcome(
      fault.number,
      fault.kind,
      fault.target,
      None,
      None,
      False,
      None,
      0.0,
      0.0,
      why,
    )
  begun_s, kind = line['began_s'], KINDS[fault.kind]
  back_at_s = returns[fault.number]
  until_s = record.course.ended_s if back_at_s is None else back_at_s
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
    in_use=bool(kind.counters)
    and all(
      _works(record, name, begun_s, line['ended_s'])
      for name in (SYNCER, fault.target)
    ),
    back_s=None if back_at_s is None else back_at_s - begun_s,
    lost_s=(
      0.0 if fault.learner is None else max(0.0, until_s - begun_s - in_steps_s)
    ),
    stall_s=_longest_s(
      {m: each for m, each in gaps.items() if m != fault.learner},
      hits(record, returns, but=fault.number),
      (begun_s, until_s),
    ),
    failed='',
  )


def _works(record: Record, name: str, begun_s: float, ended_s: float) -> bool:
  """Returns True if a process was merged, or has merged, before a span, and
  lived to its end.
  """
  own = [event for event in record.events if event.process == name]
  if any(begun_s <= event.time_s <= ended_s for event in own):
    return False
  earlier = [event.time_s for event in own if event.time_s < begun_s]
  since_s = max(earlier, default=0.0)
  return any(
    since_s < line[names.TIME] < begun_s
    for line in record.tape
    if line['kind'] == 'Publish'
    and (name == SYNCER or name in map(learner_name, participants(line)))
  )


def _counted(line: Mapping, counters: Iterable[str]) -> int:
  counted = line['counted']
  ways = [line['way']] if line['way'] else list(counted)
  return sum(counted[way][name] for way in ways for name in counters)


def _returns(record: Record) -> dict[int, float | None]:
  """Returns when each fault's target did its part again; None: never."""
  closes = [x for x in record.tape if x['kind'] == 'Publish']
  times_s = [x[names.TIME] for x in closes]
  found = {}
  for line in record.performed:
    if not line['failed']:
      begin = bisect.bisect_left(times_s, line['ended_s'])
      later = itertools.islice(closes, begin, None)
      fault = fault_of(line)
      found[fault.number] = _back(record, fault, line['ended_s'], later)
  return found


def _back(
  record: Record, fault: Fault, ended_s: float, later: Iterable[Mapping]
) -> float | None:
  """Returns when the target did its part again; None: never.

  Args:
    later: the rounds that closed since the fault's end.
  """
  if faults.removes(fault.kind):
    return None
  since_s: float | None = ended_s
  if fault.learner is not None and KINDS[fault.kind].is_outage:
    since_s = _started_s(record, fault.target, ended_s)
    if since_s is None:
      return None
  for line in later:
    does_its_part = fault.learner is None or fault.learner in participants(line)
    if line[names.TIME] >= since_s and does_its_part:
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


def hits(
  record: Record, returns: Mapping[int, float | None], but: int = 0
) -> dict[int, list[Span]]:
  """Returns the times in which a fault explains each learner's silence."""
  found = collections.defaultdict(list)
  for line in record.performed:
    fault = fault_of(line)
    if line['failed'] or fault.learner is None or fault.number == but:
      continue
    back_s = returns[fault.number]
    end_s = float('inf') if back_s is None else back_s
    found[fault.learner].append((line['began_s'], end_s))
  return found


def _gaps(steps: Mapping[int, Sequence[WrittenStep]]) -> Gaps:
  """Returns begin and end of each step, and by how much it was too long."""
  found = {}
  for m, many in steps.items():
    spans = [
      (before.time_s, after.time_s)
      for before, after in itertools.pairwise(many)
      if before.step < after.step  # Of one process.
    ]
    usual_s = statistics.median([e - b for b, e in spans] or [0.0])
    found[m] = [(b, e, e - b - usual_s) for b, e in spans]
  return found


def _longest_s(
  gaps: Gaps, hit: Mapping[int, Sequence[Span]], span: Span
) -> float:
  """Returns by how much the longest step that no fault explains was too long.

  Args:
    gaps: of each learner, in the order of time.
    hit: the times in which a fault explains a learner's silence.
    span: of which steps count, where they touch it.
  """
  longest_s = 0.0
  for m, many in gaps.items():
    # They do not overlap: their ends ascend, too.
    first = bisect.bisect_right(many, span[0], key=lambda gap: gap[1])
    for begin_s, end_s, more_s in itertools.islice(many, first, None):
      if begin_s >= span[1]:
        break
      if more_s > longest_s and not any(
        begin_s < e and end_s > b for b, e in hit.get(m, ())
      ):
        longest_s = more_s
  return longest_s


# The figures ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Figures:
  """The figures of a run, real or simulated."""

  goodput: float  # Of the configuration's M learners; no newcomer counts.
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
  if work:  # A newcomer that has left would count as dead to the end.
    work.learners = {m: x for m, x in work.learners.items() if m < planned}
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
    longest_stall_s=_longest_s(
      _gaps(record.steps),
      hits(record, _returns(record)),
      (record.course.began_s, ended_s),
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
      forever = float('inf') if faults.removes(fault.kind) else 0.0
      end_s = at_s + fault.hold_s + RECOVERY_S + forever
      hit[fault.learner].append((at_s, end_s))
  return Figures(
    goodput=run.goodput,
    uptime=run.uptime,
    rounds=run.rounds,
    steps=run.steps,
    longest_stall_s=_longest_s(_gaps(steps), hit, (begin_s, float('inf'))),
    participation=run.participation,
    refused=run.refused,
  )
