# SPDX-License-Identifier: Apache-2.0
"""What is read of a chaos run's folder, and what each fault did."""

import bisect
import collections
import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence

from diloco import faults
from diloco.config import run_config
from diloco.config.run_config import RunConfig
from diloco.faults import KINDS, Fault
from diloco.metrics import goodput as metrics_goodput
from diloco.metrics import names, token_ledger
from diloco.metrics.figures import participation
from diloco.metrics.goodput import StepRecord
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir, learner_name
from diloco.prediction.twin import reason_of
from launch.chaos.conductor import Course, Folder
from launch.chaos.live_run import WrittenStep, participants, written_step
from launch.program import SYNCER
from launch.supervisor import ProcessEvent

Span = tuple[float, float]
# Of each learner: begin and end of a step, and by how much it was too long.
Gaps = Mapping[int, Sequence[tuple[float, float, float]]]


@dataclasses.dataclass(frozen=True)
class Record:
  """All that is read of a run's folder."""

  config: RunConfig
  plan: tuple[Fault, ...]
  performed: tuple[dict, ...]
  course: Course
  tape: list[dict]
  steps: dict[int, list[WrittenStep]]
  events: tuple[ProcessEvent, ...]
  ledger: token_ledger.Rows

  @property
  def tokens_per_step(self) -> int:
    return self.config.data.batch * self.config.data.seq_len

  @property
  def begin_s(self) -> float:
    """When the first learner was ready."""
    return min(x[names.TIME] for x in self.tape if x['kind'] == 'ready')

  @property
  def closes(self) -> list[dict]:
    return [x for x in self.tape if x['kind'] == 'Publish']


def read(workdir: Workdir) -> Record:
  """Reads the folder of a chaos run.

  Raises:
    OSError: a file is missing.
    ValueError: a file is not what a chaos run writes.
  """
  folder = Folder(workdir)
  config = run_config.restore(json.loads(workdir.config.read_text()))
  plan = json.loads(folder.plan.read_text())
  performed = read_jsonl(folder.faults) if folder.faults.exists() else []
  ids = (
    int(path.stem.rpartition('-')[2])
    for path in sorted(workdir.tapes.glob('learner-*.jsonl'))
  )
  return Record(
    config=config,
    plan=tuple(Fault(**fault) for fault in plan['faults']),
    performed=tuple(sorted(performed, key=lambda x: x['number'])),
    course=Course(**json.loads(folder.course.read_text())),
    tape=read_jsonl(workdir.tape),
    steps={
      m: list(map(written_step, read_jsonl(workdir.metrics(learner_name(m)))))
      for m in ids
    },
    events=tuple(ProcessEvent(**x) for x in read_jsonl(workdir.events)),
    ledger=token_ledger.rows_of(
      workdir, config.protocol.fragments, config.protocol.blend
    ),
  )


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
  begun_s: float | None = None
  counted: int | None = None
  back_s: float | None = None
  lost_s: float = 0.0
  stall_s: float = 0.0
  failed: str = ''

  def __str__(self) -> str:
    return f'fault {self.number}, {self.kind} {self.target}'


class Effects:
  """What the faults of a run did."""

  def __init__(self, record: Record):
    self._record = record
    self._lines = {x['number']: x for x in record.performed}
    self._gaps = _gaps(record.steps)
    self._back_at_s = self._returns()

  def outcomes(self) -> tuple[Outcome, ...]:
    """Returns the effect of each fault of the plan."""
    return tuple(map(self._outcome, self._record.plan))

  def longest_stall_s(self) -> float:
    """Returns by how much a step that no fault explains was too long, within
    the plan.
    """
    course = self._record.course
    return self._longest_s(self._gaps, (course.began_s, course.ended_s))

  def was_in_use(self, outcome: Outcome) -> bool:
    """Returns True if a fault's target and the syncer had merged since their
    starts when it came, and lived to its end.
    """
    line = self._lines[outcome.number]
    return all(
      self._works(name, line['began_s'], line['ended_s'])
      for name in (SYNCER, outcome.target)
    )

  def _works(self, name: str, begun_s: float, ended_s: float) -> bool:
    own = [x.time_s for x in self._record.events if x.process == name]
    if any(begun_s <= at_s <= ended_s for at_s in own):
      return False
    since_s = max((at_s for at_s in own if at_s < begun_s), default=0.0)
    return any(
      since_s < line[names.TIME] < begun_s
      for line in self._record.closes
      if name == SYNCER or name in map(learner_name, participants(line))
    )

  def _outcome(self, fault: Fault) -> Outcome:
    found = Outcome(fault.number, fault.kind, fault.target)
    line = self._lines.get(fault.number)
    if line is None or line['failed']:
      why = line['failed'] if line else 'it was not reached'
      return dataclasses.replace(found, failed=why)
    record, begun_s = self._record, line['began_s']
    back_at_s = self._back_at_s[fault.number]
    until_s = record.course.ended_s if back_at_s is None else back_at_s
    in_steps_s = sum(
      max(0.0, min(s.time_s, until_s) - max(s.time_s - s.step_s, begun_s))
      for s in record.steps.get(fault.learner, ())
    )
    lost_s = max(0.0, until_s - begun_s - in_steps_s)
    others = {m: each for m, each in self._gaps.items() if m != fault.learner}
    return dataclasses.replace(
      found,
      begun_s=begun_s - record.course.began_s,
      counted=_counted(line, KINDS[fault.kind].counters),
      back_s=None if back_at_s is None else back_at_s - begun_s,
      lost_s=0.0 if fault.learner is None else lost_s,
      stall_s=self._longest_s(others, (begun_s, until_s), but=fault.number),
    )

  def _returns(self) -> dict[int, float | None]:
    """Returns when each fault's target did its part again; None: never."""
    closes = self._record.closes
    times_s = [x[names.TIME] for x in closes]
    found = {}
    for fault in self._record.plan:
      line = self._lines.get(fault.number)
      if line and not line['failed']:
        begin = bisect.bisect_left(times_s, line['ended_s'])
        later = itertools.islice(closes, begin, None)
        found[fault.number] = self._back(fault, line['ended_s'], later)
    return found

  def _back(
    self, fault: Fault, since_s: float, later: Iterable[Mapping]
  ) -> float | None:
    if faults.removes(fault.kind):
      return None
    if fault.learner is not None and KINDS[fault.kind].is_outage:
      starts_s = (
        event.time_s
        for event in self._record.events
        if event.process == fault.process and event.event == 'started'
      )
      since_s = next((x for x in starts_s if x >= since_s), float('inf'))
    return next(
      (
        line[names.TIME]
        for line in later
        if line[names.TIME] >= since_s
        and (fault.learner is None or fault.learner in participants(line))
      ),
      None,
    )

  def _longest_s(self, gaps: Gaps, span: Span, but: int = 0) -> float:
    """Returns by how much the longest step that no fault explains was too long.

    Args:
      gaps: in the order of time.
      span: of which steps count, where they touch it.
      but: a fault that explains nothing.
    """
    hit = collections.defaultdict(list)
    for fault in self._record.plan:
      if fault.number in self._back_at_s and fault.number != but:
        back_s = self._back_at_s[fault.number]
        end_s = float('inf') if back_s is None else back_s
        begun_s = self._lines[fault.number]['began_s']
        hit[fault.learner].append((begun_s, end_s))
    longest_s = 0.0
    for m, many in gaps.items():
      # They do not overlap: their ends ascend, too.
      first = bisect.bisect_right(many, span[0], key=lambda gap: gap[1])
      for begin_s, end_s, more_s in itertools.islice(many, first, None):
        if begin_s >= span[1]:
          break
        if more_s > longest_s and not any(
          begin_s < e and end_s > b for b, e in hit[m]
        ):
          longest_s = more_s
    return longest_s


def _counted(line: Mapping, counters: Sequence[str]) -> int | None:
  if not counters:
    return None
  ways = [line['way']] if line['way'] else list(line['counted'])
  return sum(line['counted'][way][name] for way in ways for name in counters)


def _gaps(steps: Mapping[int, Sequence[WrittenStep]]) -> Gaps:
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


@dataclasses.dataclass(frozen=True)
class Figures:
  """The figures of a run, real or simulated."""

  goodput: float  # Of the configuration's M learners; no newcomer counts.
  uptime: float
  rounds: int
  steps: int
  longest_stall_s: float | None  # None: not simulated.
  participation: dict[int, float | None]
  refused: dict[str, int]


def figures(record: Record, longest_stall_s: float) -> Figures:
  """Returns the figures of the real run, to the end of its plan."""
  ended_s, planned = record.course.ended_s, record.config.protocol.learners
  tape = [x for x in record.tape if x[names.TIME] <= ended_s]
  work = metrics_goodput.work_of_tape(reversed(tape), planned)
  if work:  # A newcomer that has left would count as dead to the end.
    work.learners = {m: x for m, x in work.learners.items() if m < planned}
  closes = [x for x in tape if x['kind'] == 'Publish']
  merged = collections.Counter(m for x in closes for m in participants(x))
  steps = [
    StepRecord(m, s.time_s, s.step_s, min(s.stall_s, s.step_s))
    for m, each in record.steps.items()
    for s in each
    if s.time_s <= ended_s
  ]
  refused = collections.Counter(
    reason_of(x['reason']) for x in tape if x['kind'] == 'refused'
  )
  return Figures(
    goodput=work.goodput(ended_s) if work else 0.0,
    uptime=metrics_goodput.uptime(steps, record.begin_s, ended_s),
    rounds=len(closes),
    steps=len(steps),
    longest_stall_s=longest_stall_s,
    participation={
      m: participation(merged[m], len(closes)) for m in sorted(record.steps)
    },
    refused=dict(refused),
  )
