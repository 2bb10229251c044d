# SPDX-License-Identifier: Apache-2.0
"""The conditions that a run under faults must satisfy, read from its folder.

Each gives its findings, each a sentence with the values; none is good. Next to
the run stands the twin of `diloco.prediction`: the same plan under the
simulated clock, at the speeds that were measured in the run.
"""

import bisect
import collections
import dataclasses
import functools
import itertools
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import rich.console
import rich.table

from diloco import faults
from diloco.config import run_config
from diloco.config.run_config import RunConfig
from diloco.faults import KINDS, Fault
from diloco.metrics import files, names, recorded_run, token_ledger
from diloco.metrics.goodput import work_of_tape
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.token_ledger import TokenCounts
from diloco.metrics.workdir import Workdir, learner_name
from diloco.pages import text_tables
from diloco.prediction import recorded, twin
from launch.chaos.stage import (
  COURSE,
  FAULTS,
  PLAN,
  RunPhases,
  WrittenStep,
  participants,
)
from launch.program import SYNCER
from launch.supervisor import EXIT_SLICES, ProcessEvent

VERDICT = 'verdict.json'
GOODPUT_POINTS_MAX = 5.0  # Between the run and its simulation.
# A step of a learner that no fault has hit may be so much too long. One that
# waited for the dead would be so for as long as they are away, 5 s and more.
STALL_S_MAX = 3.0
# On a busy machine: also so many times the latest turn of the command itself.
LATE_TURNS = 10.0
SHOWN_MAX = 5  # Findings of one check; all of them are in the JSON file.
LEFT = ('exited with code 0', 'exited with code 143', 'died of SIGTERM')
# So JAX ends a host that was told to leave, and whose other host was as well,
# but had not started far enough to do more than die of it.
ABORTED = 'died of SIGABRT'
SLICES_LEFT = f'exited with code {EXIT_SLICES}'


# What is read of a run's folder.


@dataclasses.dataclass(frozen=True)
class Record:
  """A run under faults, and the goodput of the same plan when simulated."""

  config: RunConfig
  plan: tuple[Fault, ...]
  performed: Mapping[int, dict]  # Lines of `faults.jsonl`, by number.
  course: RunPhases
  tape: Sequence[dict]
  tapes: Mapping[int, Sequence[dict]]  # Of the learners.
  steps: Mapping[int, Sequence[WrittenStep]]
  events: tuple[ProcessEvent, ...]
  ledger: token_ledger.Rows
  simulated_goodput: float

  @functools.cached_property
  def goodput(self) -> float:
    """Goodput of the configuration's M learners to the end of the plan."""
    ended_s, planned = self.course.ended_s, self.config.protocol.learners
    tape = [x for x in self.tape if x[names.TIME] <= ended_s]
    work = work_of_tape(reversed(tape), planned)
    if work is None:
      return 0.0
    # A newcomer that has left would count as dead to the end.
    work.learners = {m: x for m, x in work.learners.items() if m < planned}
    return work.goodput(ended_s)

  @functools.cached_property
  def outcomes(self) -> tuple['Outcome', ...]:
    return _Effects(self).outcomes()


def read(workdir: Workdir) -> Record:
  """Reads the folder of a chaos run, and simulates its plan.

  Raises:
    OSError: a file is missing.
    ValueError: a file is not what a chaos run writes.
    NotPredictable: it was too short to be simulated.
  """
  config = run_config.restore(json.loads(workdir.config.read_text()))
  planned = json.loads((workdir.chaos / PLAN).read_text())
  plan = tuple(Fault(**fault) for fault in planned['faults'])
  course = RunPhases(**json.loads((workdir.chaos / COURSE).read_text()))
  performed = workdir.chaos / FAULTS
  metrics = lambda m: workdir.metrics(learner_name(m))  # noqa: E731
  ids = [
    faults.number_of(path.stem)
    for path in sorted(workdir.tapes.glob('learner-*.jsonl'))
  ]
  return Record(
    config=config,
    plan=plan,
    performed={
      line['number']: line
      for line in (read_jsonl(performed) if performed.exists() else ())
    },
    course=course,
    tape=read_jsonl(workdir.tape),
    tapes={m: read_jsonl(workdir.learner_tape(m)) for m in ids},
    steps={
      m: [WrittenStep.read(x) for x in read_jsonl(metrics(m))] for m in ids
    },
    events=tuple(ProcessEvent(**x) for x in read_jsonl(workdir.events)),
    ledger=token_ledger.rows_of(
      workdir, config.protocol.fragments, config.protocol.blend
    ),
    simulated_goodput=simulate(workdir, config, plan, course, planned['seed']),
  )


def simulate(
  workdir: Workdir,
  config: RunConfig,
  plan: Sequence[Fault],
  course: RunPhases,
  seed: int,
) -> float:
  """Returns the goodput of the plan under the simulated clock."""
  run = recorded_run.read(workdir.root)
  ready_s = run.begin_s  # What its times are counted from.
  calm_s, began_s, ended_s = (
    at_s - ready_s for at_s in (course.calm_s, course.began_s, course.ended_s)
  )
  speeds = recorded.measure(run, config.run.restart_delay_s, (calm_s, began_s))
  arrivals = recorded.arrivals(run)
  times_s = began_s, ended_s
  return twin.simulate(config, speeds, arrivals, plan, times_s, seed).goodput


# What each fault did.


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
    allowed_s: bound of `stall_s`.
    was_in_use: False where its target or the syncer was away or starting.
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
  allowed_s: float = STALL_S_MAX
  was_in_use: bool = True
  failed: str = ''

  def __str__(self) -> str:
    return f'fault {self.number}, {self.kind} {self.target}'

  @property
  def line(self) -> str:
    """Says when it came, and when its target was back."""
    what = f'{self.number}: {self.kind} {self.target}'
    if self.begun_s is None:
      return f'   — s  {what}: {self.failed}'
    back = 'gone for good'
    if self.back_s is not None:
      back = f'back after {self.back_s:.1f} s'
    return f'{self.begun_s:6.1f} s  {what}: {back}'


class _Effects:
  """The effects of the faults of a run."""

  def __init__(self, record: Record):
    self._record = record
    self._closes = [x for x in record.tape if x['kind'] == 'Publish']
    self._done = {
      fault.number: record.performed[fault.number]
      for fault in record.plan
      if not record.performed.get(fault.number, {'failed': '.'})['failed']
    }
    self._gaps = {m: _gaps(many) for m, many in record.steps.items()}
    self._back_at_s = {
      fault.number: self._back_at(fault)
      for fault in record.plan
      if fault.number in self._done
    }

  def outcomes(self) -> tuple[Outcome, ...]:
    """Returns the effect of each fault of the plan."""
    return tuple(map(self._outcome, self._record.plan))

  def _outcome(self, fault: Fault) -> Outcome:
    outcome = Outcome(fault.number, fault.kind, fault.target)
    line = self._done.get(fault.number)
    if line is None:
      line = self._record.performed.get(fault.number)
      why = line['failed'] if line else 'it was not reached'
      return dataclasses.replace(outcome, failed=why)
    course, begun_s = self._record.course, line['began_s']
    back_at_s = self._back_at_s[fault.number]
    until_s = course.ended_s if back_at_s is None else back_at_s
    in_steps_s = sum(
      max(0.0, min(s.time_s, until_s) - max(s.time_s - s.step_s, begun_s))
      for s in self._record.steps.get(fault.learner, ())
    )
    lost_s = max(0.0, until_s - begun_s - in_steps_s)
    late_s = [
      late_s
      for at_s, late_s in course.late_turns
      if at_s >= begun_s and at_s - late_s <= until_s
    ]
    return dataclasses.replace(
      outcome,
      begun_s=begun_s - course.began_s,
      counted=_counted(line, KINDS[fault.kind].counters),
      back_s=None if back_at_s is None else back_at_s - begun_s,
      lost_s=0.0 if fault.learner is None else lost_s,
      stall_s=self._longest_s(fault, begun_s, until_s),
      allowed_s=STALL_S_MAX + LATE_TURNS * max(late_s, default=0.0),
      was_in_use=all(
        self._works(name, begun_s, line['ended_s'])
        for name in (SYNCER, fault.target)
      ),
    )

  def _works(self, name: str, begun_s: float, ended_s: float) -> bool:
    """Returns True if a process had merged since its start when a fault came,
    and lived to its end.
    """
    own = [x.time_s for x in self._record.events if x.process == name]
    if any(begun_s <= at_s <= ended_s for at_s in own):
      return False
    since_s = max((at_s for at_s in own if at_s < begun_s), default=0.0)
    return any(
      since_s < line[names.TIME] < begun_s
      for line in self._closes
      if name == SYNCER or name in map(learner_name, participants(line))
    )

  def _back_at(self, fault: Fault) -> float | None:
    """Returns when a fault's target did its part again; None: never."""
    if faults.removes(fault.kind):
      return None
    since_s = self._done[fault.number]['ended_s']
    if fault.learner is not None and KINDS[fault.kind].is_outage:
      since_s = max(
        self._next_start(name, since_s) for name in self._killed(fault)
      )
    first = bisect.bisect_left(
      self._closes, since_s, key=lambda line: line[names.TIME]
    )
    return next(
      (
        line[names.TIME]
        for line in itertools.islice(self._closes, first, None)
        if fault.learner is None or fault.learner in participants(line)
      ),
      None,
    )

  def _killed(self, fault: Fault) -> set[str]:
    """Returns the processes that an outage took from its learner.

    One slice of several, if that is all: its learner goes on without it, and is
    whole once it is back.
    """
    line = self._done[fault.number]
    return {
      event.process
      for event in self._record.events
      if event.event == 'killed'
      and line['began_s'] <= event.time_s <= line['ended_s']
      and event.process.partition('.')[0] == fault.process
    } or {fault.process}

  def _next_start(self, process: str, since_s: float) -> float:
    starts_s = (
      event.time_s
      for event in self._record.events
      if event.process == process and event.event == 'started'
    )
    return next((x for x in starts_s if x >= since_s), float('inf'))

  def _longest_s(self, fault: Fault, begun_s: float, until_s: float) -> float:
    """Returns by how much the longest step of another learner was too long
    that no other fault explains.
    """
    hit = collections.defaultdict(list)
    for other in self._record.plan:
      if other.number in self._done and other.number != fault.number:
        back_s = self._back_at_s[other.number]
        end_s = float('inf') if back_s is None else back_s
        hit[other.learner].append((self._done[other.number]['began_s'], end_s))
    longest_s = 0.0
    for m, gaps in self._gaps.items():
      # They do not overlap: their ends ascend, too.
      first = bisect.bisect_right(gaps, begun_s, key=lambda gap: gap[1])
      for begin_s, end_s, more_s in itertools.islice(gaps, first, None):
        if m == fault.learner or begin_s >= until_s:
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


def _gaps(steps: Sequence[WrittenStep]) -> list[tuple[float, float, float]]:
  """Returns begin and end of each step, and by how much it was too long."""
  spans = [
    (before.time_s, after.time_s)
    for before, after in itertools.pairwise(steps)
    if before.step < after.step  # Of one process.
  ]
  usual_s = statistics.median([e - b for b, e in spans] or [0.0])
  return [(b, e, e - b - usual_s) for b, e in spans]


# What must hold of any run.


def closed(tape: Iterable[Mapping]) -> Iterator[Mapping]:
  """Yields the lines of the rounds that closed."""
  return (line for line in tape if line['kind'] == 'Publish')


def versions(tape: Iterable[Mapping]) -> list[str]:
  """The version of each fragment rises by one per close, and never falls."""
  findings, last = [], {}
  for line in closed(tape):
    p, version = line['fragment'], line['version']
    before = last.get(p, 0)
    if version != before + 1:
      findings.append(
        f'fragment {p}: version {version} after {before}, in round '
        f'{line["round"]}'
      )
    last[p] = version
  return findings


def bits(
  tape: Iterable[Mapping], tapes: Mapping[int, Iterable[Mapping]]
) -> list[str]:
  """A learner that takes in a version of a fragment has the syncer's bits.

  If all who had a version have died, its number goes on with older bits.
  """
  known = collections.defaultdict(list)
  for line in tape:
    if line['kind'] == 'Publish':
      known[line['fragment'], line['version']].append(line['crc'])
    elif line['kind'] == 'Started':
      for p, (version, crc) in enumerate(zip(line['versions'], line['crcs'])):
        known[p, version].append(crc)
  return [
    f'learner {m}, fragment {line["fragment"]}, version {line["version"]}: '
    f'CRC {line["crc"]}, the syncer has {theirs[-1]}'
    for m, own in sorted(tapes.items())
    for line in own
    if line['kind'] == 'Apply'
    for theirs in [known.get((line['fragment'], line['version']))]
    if theirs and line['crc'] not in theirs
  ]


def tokens_explained(rows: Mapping[tuple[int, int], TokenCounts]) -> list[str]:
  """Trained = merged + overwritten + lost + pending, per learner and fragment.

  A contribution that is merged twice, or is of no whole steps, is unexplained.

  Args:
    rows: of the token ledger, by learner and fragment.
  """
  return [
    f'learner {m}, fragment {p}: {row.unexplained:+} of {row.trained} tokens '
    f'unexplained; {row}'
    for (m, p), row in sorted(rows.items())
    if row.unexplained
  ]


def exits(events: Iterable[ProcessEvent], is_over: bool) -> list[str]:
  """Every process was killed, stopped, or ended with 0 as the run was over, or
  as its learner went on with other slices.

  Args:
    events: in the order in which they happened.
    is_over: the run came to its end.
  """
  findings, killed, stopped = [], set(), set()
  left = collections.defaultdict(set)  # Processes of a learner that have left.
  for event in events:
    learner = event.process.partition('.')[0]
    match event.event:
      case 'started':  # The pid may be one that was in use before.
        killed.discard(event.pid)
        stopped.discard(event.pid)
        left.pop(learner, None)
      case 'killed':
        killed.add(event.pid)
      case 'stopped' if event.detail.startswith('SIGKILL'):
        killed.add(event.pid)  # As another process of its role is dead.
      case 'stopped':
        stopped.add(event.pid)
      case 'exited':
        # Of several hosts, a later exit tells of the first to die, whose own
        # exit is judged.
        reason = event.detail.partition(';')[0]
        of_another = re.match(rf'{re.escape(learner)}(\.\d+)? ', reason)
        how = reason[of_another.end() :] if of_another else reason
        another = of_another and of_another[0].strip() != event.process
        ours = event.pid in killed and how == 'died of SIGKILL'
        leaves = event.pid in stopped and (
          how in LEFT or (left[learner] and how == ABORTED)
        )
        goes_on = how == SLICES_LEFT and 'restart' not in event.detail
        if event.pid in stopped and how in LEFT:
          left[learner].add(event.pid)
        over = is_over and how == LEFT[0]
        if not (ours or leaves or goes_on or over or another):
          findings.append(f'{event.process} ({event.pid}) {reason}')
  return findings


# The verdict.


@dataclasses.dataclass(frozen=True)
class Check:
  """One condition that must hold."""

  name: str
  findings: Sequence[str]  # None where it holds.
  note: str = ''  # What was measured, good or bad.


def common(
  tape: Sequence[Mapping],
  tapes: Mapping[int, Sequence[Mapping]],
  ledger: token_ledger.Rows,
  events: Sequence[ProcessEvent],
  is_over: bool,
) -> Iterator[Check]:
  """Yields what must hold of a run whatever befell it."""
  yield Check('no process dies by itself', exits(events, is_over))
  yield Check('versions rise by one', versions(tape))
  yield Check('the bits agree', bits(tape, tapes))
  yield Check(
    'every token is accounted for',
    tokens_explained(ledger),
    token_ledger.text(token_ledger.total(ledger.values())),
  )


def checks(record: Record) -> Iterator[Check]:
  """Yields all that must hold of a run under faults, with what was found."""
  outcomes = record.outcomes
  hit = [x for x in outcomes if not x.failed]
  idle = [x for x in hit if x.counted == 0]
  away = [str(x.number) for x in idle if not x.was_in_use]
  yield Check(
    'the plan was performed',
    [f'{x}: {x.failed}' for x in outcomes if x.failed],
    f'{len(hit)} of {len(outcomes)} faults',
  )
  yield Check(
    'link faults moved their counters',
    [
      f'{x}: it changed nothing, {" and ".join(KINDS[x.kind].counters)} stayed '
      '0'
      for x in idle
      if x.was_in_use
    ],
    f'not in use then, its end being away: {", ".join(away)}' if away else '',
  )
  unready = record.course.unready
  yield Check('all are back at the end', [unready] if unready else [])
  yield from common(
    record.tape, record.tapes, record.ledger, record.events, is_over=False
  )
  yield Check(
    'the others step on',
    [
      f'{x}: another learner stood for {x.stall_s:.2f} s, at most '
      f'{x.allowed_s:.2f}'
      for x in hit
      if x.stall_s > x.allowed_s
    ],
    f'at most {max((x.stall_s for x in hit), default=0.0):.2f} s',
  )
  points = 100 * (record.goodput - record.simulated_goodput)
  far = f'{points:+.1f} points, at most {GOODPUT_POINTS_MAX:g}'
  yield Check(
    'goodput is as simulated',
    [far] if abs(points) > GOODPUT_POINTS_MAX else [],
    f'{record.goodput:.1%}, simulated {record.simulated_goodput:.1%}',
  )


def table(title: str, results: Iterable[Check]) -> rich.table.Table:
  """Returns a row for each check."""
  rows = []
  for check in results:
    lines = [check.note] if check.note else []
    lines += check.findings[:SHOWN_MAX]
    if (more := len(check.findings) - SHOWN_MAX) > 0:
      lines.append(f'and {more} more')
    holds = 'NO' if check.findings else 'yes'
    rows.append((check.name, holds, '\n'.join(lines)))
  return text_tables.table(title, ('check', 'holds', 'found'), rows, left=3)


def judge(workdir: Workdir, console: rich.console.Console) -> int:
  """Judges the run in a folder, writes and shows the verdict.

  Returns:
    The exit code: 0 if it holds, 1 if not.
  """
  record = read(workdir)
  results = [*checks(record)]
  holds = not any(x.findings for x in results)
  path = workdir.chaos / VERDICT
  files.write_json(
    path,
    {
      'holds': holds,
      'outcomes': [dataclasses.asdict(x) for x in record.outcomes],
      'goodput': record.goodput,
      'simulated_goodput': record.simulated_goodput,
      'checks': [dataclasses.asdict(x) for x in results],
    },
  )
  console.print(table('verdict', results))
  word = 'holds' if holds else 'DOES NOT HOLD'
  for line in (*(x.line for x in record.outcomes), f'it {word}: {path}'):
    console.print(line, markup=False, highlight=False)
  return 0 if holds else 1
