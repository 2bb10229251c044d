# SPDX-License-Identifier: Apache-2.0
"""Reads the folder of a run: whole, still going, killed, or with holes.

All that looks at a run while it goes on or after the fact reads it here, in one
pass: pages, `diloco report`, sweeps, the replay by simulation. `FollowedRun`
reads each line once, and what it keeps is bounded: curves are thinned (see
`ThinnedCurve`), and of rounds and events the last ones are kept. The folder is
only read, so that the run does not notice. `read` keeps every step and round.
Figures of the run are those of its status, see `diloco.metrics.figures`.

What is missing or broken is left out and listed among the gaps: a reader that
needs a whole run refuses one that has any.
"""

import bisect
import collections
import dataclasses
import itertools
import json
import math
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from diloco.metrics import ages as metrics_ages
from diloco.metrics import figures, names, token_ledger
from diloco.metrics import status as metrics_status
from diloco.metrics.ages import ContributionAges
from diloco.metrics.files import MalformedFile
from diloco.metrics.goodput import StepRecord, Work, uptime, work_of_tape
from diloco.metrics.jsonl import CorruptLine, Tail, parts
from diloco.metrics.status import (
  GONE,
  LIVE,
  REFUSALS,
  Evaluation,
  LearnerStatus,
  RunStatus,
)
from diloco.metrics.token_ledger import DIED
from diloco.metrics.workdir import EVALUATOR, SYNCER, Workdir, learner_name
from diloco.protocol.config import with_current_blend

# What a line must say to be taken.
LINE = (names.TIME, 'kind')
EVENT = (names.TIME, 'process', 'event', 'detail')
MERGE = ('round', 'quorum_s', 'grace_s', 'reason')
PUBLISH = ('round', 'step', 'version', 'shares', 'sync_s')
SHARE = ('learner', 'weight', 'age_s', 'base_version')
STEP = (names.TIME, 'step', names.STEP_TIME, names.STALL_TIME)
POINTS_MAX = 400  # Of a curve.
ROUNDS_MAX = 1000  # That the timeline shows.
HAPPENINGS_MAX = 60
GAPS_MAX = 8  # That are told one by one.
SILENT_S = 15.0  # The syncer writes its status about once a second.
LEDGER_BYTES_MAX = 30e6  # Longer event logs are not read for what deaths lost.
AFTERWARDS = ('evaluate', EVALUATOR)  # No processes of the training.
OF_ROUNDS = ('Merge', 'Publish', 'Worked')  # Kinds that every round has.
# The run's state.
STARTING = 'starting'
COMPILING = 'compiling'  # The syncer waits for the first learner.
RUNNING = 'running'
SILENT = 'silent'
STOPPED = 'stopped'
FINISHED = 'finished'


class NoReport(ValueError):
  """A folder of which no page can be made; says why."""


@dataclasses.dataclass(frozen=True)
class Setup:
  """The configured values."""

  name: str
  learners: int  # M.
  fragments: int  # P.
  total_steps: int


def read_setup(path: pathlib.Path) -> tuple[Setup, Mapping]:
  """Reads an existing config.json; returns it whole as well.

  Other keys may be those of another version of this package.

  Raises:
    NoReport: it is not one of a run.
  """
  try:
    config = json.loads(path.read_text())
  except ValueError as error:
    raise NoReport(f'{path}: is not JSON: {error}') from None
  values = {}
  for field in dataclasses.fields(Setup):
    key, kind = field.name, field.type
    value = config if isinstance(config, dict) else {}
    if kind is int:
      key = f'protocol.{key}'
      value = value.get('protocol')
    value = value.get(field.name) if isinstance(value, dict) else None
    if type(value) is not kind or (kind is int and value < 1):
      raise NoReport(f'{path}: {key}={value!r}, no configuration of a run')
    values[field.name] = value
  return Setup(**values), config


@dataclasses.dataclass(frozen=True)
class Life:
  """One process, from its start to its death; times by one clock."""

  process: str  # 'syncer', 'learner-0', …
  started_s: float  # By the launcher.
  start: str = ''  # The launcher's number of it, such as 'start 1'.
  # When it first appears in the syncer's event log: a learner's hello, a
  # syncer's first line; None: never.
  spoke_s: float | None = None
  # Start of a learner's first inner step; None: it made none.
  stepped_s: float | None = None
  # When it was killed, or when the launcher noticed its end; inf: it was
  # still running.
  ended_s: float = float('inf')
  death: str = ''  # How it died; '' if it left in good order or runs on.

  @property
  def used_s(self) -> float | None:
    """Returns when it was first of use; None: never."""
    return self.spoke_s if self.process == SYNCER else self.stepped_s


def absences(lives: Sequence[Life]) -> Iterator[tuple[float, float, str]]:
  """Yields (begin, end, 'bootstrap' or 'dead') of one process; inf: no end."""
  for life in lives:
    used_s = life.ended_s if life.used_s is None else life.used_s
    yield life.started_s, used_s, 'bootstrap'
  for dead, back in itertools.pairwise(lives):
    yield dead.ended_s, back.started_s, 'dead'
  if lives and lives[-1].death:
    yield lives[-1].ended_s, float('inf'), 'dead'


@dataclasses.dataclass(frozen=True)
class RoundShare:
  """The part of one learner in a round."""

  learner: int
  weight: float
  age_s: float  # Of its offer, when the window ended.
  behind: int  # Versions between its base and the newest one; 0: none.
  age_steps: float | None = None  # In its own; None on older tapes.


@dataclasses.dataclass(frozen=True)
class RecordedRound:
  """A round that closed; times by one clock."""

  number: int
  at_s: float  # When its update was published.
  step: int  # t.
  shares: tuple[RoundShare, ...]
  # From due to quorum; None where no line tells, as of `grace_s`.
  quorum_s: float | None
  grace_s: float | None  # From quorum to the end of the window.
  sync_s: float  # From the first pull to the end of the merge.
  reason: str  # Why the window ended.

  @property
  def times_s(self) -> tuple[float, float, float]:
    """Returns when it was due, had its quorum, and when its window ended."""
    window_s = max(0.0, self.at_s - self.sync_s)
    quorum_s = max(0.0, window_s - (self.grace_s or 0.0))
    return max(0.0, quorum_s - (self.quorum_s or 0.0)), quorum_s, window_s


def deaths_of(lives: Mapping[str, tuple[Life, ...]]) -> list[Life]:
  """Returns the lives that ended in a death, in the order of time."""
  dead = [life for lived in lives.values() for life in lived if life.death]
  return sorted(dead, key=lambda life: life.ended_s)


def rounds(
  tape: Sequence[Mapping],
) -> tuple[tuple[RecordedRound, ...], list[str]]:
  """Rounds that closed, and what is wrong with lines that tell of others.

  Args:
    event log: lines of the syncer's.
  """
  closed, broken = [], []
  merges: dict[int, Mapping] = {}
  for line in tape:
    match line['kind']:
      case 'Merge' if all(key in line for key in MERGE):
        merges[line['round']] = line
      case 'Publish' if _is_whole(line):
        closed.append(_round(line, merges.get(line['round'])))
      case 'Merge' | 'Publish' as kind:
        broken.append(f'a {kind} line lacks what such lines say')
  return tuple(closed), broken


def _is_whole(line: Mapping) -> bool:
  return all(key in line for key in PUBLISH) and all(
    key in share for share in line['shares'] for key in SHARE
  )


def _round(line: Mapping, merge: Mapping | None) -> RecordedRound:
  """A merge that no line tells of died with a syncer."""
  return RecordedRound(
    number=line['round'],
    at_s=line[names.TIME],
    step=line['step'],
    shares=tuple(
      RoundShare(
        share['learner'],
        share['weight'],
        share['age_s'],
        line['version'] - 1 - share['base_version'],
        share.get('age_steps'),
      )
      for share in line['shares']
    ),
    quorum_s=merge['quorum_s'] if merge else None,
    grace_s=merge['grace_s'] if merge else None,
    sync_s=line['sync_s'],
    reason=merge['reason'] if merge else 'no Merge line',
  )


def lives(
  events: Sequence[Mapping],
) -> tuple[dict[str, tuple[Life, ...]], tuple[tuple[str, float, float], ...]]:
  """Each process's lives, and (process, begin, end) of pauses."""
  known: dict[str, list[Life]] = {}
  paused: dict[str, float] = {}
  pauses = []

  def go_on(process: str, at_s: float):
    if process in paused:
      pauses.append((process, paused.pop(process), at_s))

  for event in events:
    process, at_s = event['process'], event[names.TIME]
    of_process = known.setdefault(process, [])
    match event['event']:
      case 'started':
        of_process.append(Life(process, at_s, event['detail']))
      case 'killed' | 'exited' | 'stopped':
        go_on(process, at_s)
        if of_process:
          of_process[-1] = _ended(of_process[-1], event, at_s)
      case 'paused':
        paused.setdefault(process, at_s)
      case 'went on':
        go_on(process, at_s)
  for process in list(paused):
    go_on(process, float('inf'))
  return {name: tuple(each) for name, each in known.items()}, tuple(pauses)


def _ended(life: Life, event: Mapping, at_s: float) -> Life:
  """The first event of an end has its time; only 'exited' tells how it was."""
  ended_s = min(life.ended_s, at_s)
  match event['event'], event['detail']:
    case 'killed', reason:
      death = f'killed: {reason}'
    case 'exited', how if not life.death and life.ended_s == float('inf'):
      in_good_order = how.startswith('exited with code 0')
      death = '' if in_good_order else how
    case _:
      death = life.death  # Killed, or stopped by the launcher, before.
  return dataclasses.replace(life, ended_s=ended_s, death=death)


class ThinnedCurve:
  """Points of a curve, thinned as it grows.

  Each point is the mean of equally many values. When there are too many points,
  pairs of them are merged.

  Args:
    values_per_point: at first.
    points_max: more than so many are merged to half as many; even.
  """

  def __init__(self, values_per_point: int = 1, points_max: int = POINTS_MAX):
    self._values_per_point = values_per_point
    self._points_max = points_max
    self._points: list[tuple[float, ...]] = []
    self._open: list[tuple[float, ...]] = []  # Not a point yet.

  def add(self, *point: float) -> None:
    """Adds a value: its time, and what was measured then."""
    self._open.append(point)
    if len(self._open) < self._values_per_point:
      return
    self._points.append(_mean(self._open))
    self._open = []
    if len(self._points) >= self._points_max:
      pairs = zip(self._points[::2], self._points[1::2])
      self._points = [_mean(pair) for pair in pairs]
      self._values_per_point *= 2

  def points(self) -> list[tuple[float, ...]]:
    """Returns all points; the last may be the mean of fewer values."""
    return [*self._points, _mean(self._open)] if self._open else self._points


def _mean(points) -> tuple[float, ...]:
  return tuple(sum(values) / len(points) for values in zip(*points))


@dataclasses.dataclass
class FollowedLearner:
  """Sums and curves of a learner's metrics; times since the epoch.

  A record of its metrics stands for all steps since the one before of the same
  process; what a process did after its last record is not known.
  """

  loss: ThinnedCurve = dataclasses.field(default_factory=ThinnedCurve)
  trained: ThinnedCurve = dataclasses.field(default_factory=ThinnedCurve)
  merged: ThinnedCurve = dataclasses.field(
    default_factory=lambda: ThinnedCurve(values_per_point=8)
  )
  # From the first to the last known step of each process.
  spans: list[list[float]] = dataclasses.field(default_factory=list)
  last: Mapping = dataclasses.field(default_factory=dict)  # Its last record.
  steps: int = 0
  tokens: float = 0.0  # As it reported them.
  step_s: float = 0.0
  stall_s: float = 0.0
  stall_max_s: float = 0.0
  rounds: int = 0  # That merged it.
  ages: ContributionAges = dataclasses.field(default_factory=ContributionAges)

  def add(self, record: Mapping) -> tuple[int, float]:
    """Counts a record; returns the steps it stands for, and their mean."""
    was, many, at_s = self.last, 1, record[names.TIME]
    mean_s = record[names.STEP_TIME]
    if (
      not was
      or record['step'] <= was['step']
      or was.get(names.INCARNATION) != record.get(names.INCARNATION)
    ):
      self.spans.append([at_s - mean_s, at_s])
    elif (many := record['step'] - was['step']) > 1:
      mean_s = (at_s - was[names.TIME]) / many
    self.spans[-1][1] = at_s
    reported = record[names.STEP_TIME] * record.get(names.TOKENS_PER_S, 0.0)
    self.steps += many
    self.tokens += many * reported
    self.step_s += record[names.STEP_TIME]
    self.stall_s += record[names.STALL_TIME]
    self.stall_max_s = max(self.stall_max_s, record[names.STALL_TIME])
    self.last = record
    self.trained.add(at_s, self.tokens)
    if names.TRAIN_LOSS in record:
      self.loss.add(at_s, record[names.TRAIN_LOSS])
    return many, mean_s


class FollowedRun:
  """A run as its folder tells it so far; `update` reads on.

  Args:
    folder: of a run, which may have just begun.
    label: tells it from other runs of a page; its name unless given.
    whole: keeps every round and every step.

  Attributes:
    clock_s: the present, since the epoch.
    status: what the syncer last counted; of a run of the lab, what its event
      log tells; None: nothing yet.
    readied: (time, learner, where its state came from), for each bootstrap.
    reformed: (time, learner) of those that went on with other slices.
    gaps: what is wrong with lines, in sentences that begin with the file.
    problem: the same, and what is wrong with the other files now.

  Raises:
    NoReport: there is no config.json of a run in it.
  """

  def __init__(
    self, folder: pathlib.Path, label: str = '', whole: bool = False
  ):
    self.workdir = workdir = Workdir(folder)
    if not workdir.config.exists():
      what = 'holds no run: no config.json' if folder.is_dir() else 'no folder'
      raise NoReport(f'{folder}: {what}')
    self.setup, self.config = read_setup(workdir.config)
    self.clock_s = time.time
    self.label = label or self.setup.name
    self.learners = {
      learner_name(m): FollowedLearner() for m in range(self.setup.learners)
    }
    self.rounds: collections.deque[RecordedRound] = collections.deque(
      maxlen=None if whole else ROUNDS_MAX
    )
    self.happenings: collections.deque = collections.deque(
      maxlen=HAPPENINGS_MAX
    )
    self.kinds: collections.Counter[str] = collections.Counter()
    self.goodput, self.age = ThinnedCurve(), ThinnedCurve(values_per_point=8)
    self.waits = ThinnedCurve(values_per_point=8)  # Quorum, grace window, sync.
    self.readied: list[tuple[float, int, str]] = []
    self.reformed: list[tuple[float, int]] = []
    self.steps: list[StepRecord] | None = [] if whole else None
    # When learners said hello to the syncer and, if all is kept, it spoke.
    self.heard: dict[str, list[float]] = collections.defaultdict(list)
    self.evaluated: list[tuple[float, float, float]] = []  # Time, step, loss.
    self.status: RunStatus | None = None
    self.evaluation: Evaluation | None = None
    self.gaps: collections.Counter[str] = collections.Counter()
    self.problem = ''
    self.last_s = 0.0  # Of the last thing that is known of the run.
    self._told_s = 0.0  # Of the last line of the event log.
    self.events: list[dict] = []  # Of the launcher.
    self._closed = 0  # Rounds that were read.
    self._work: Work | None = None  # As the event log has it.
    self._is_counted = False  # The status is that of the event log.
    self._merges: list[dict] = []  # Of rounds that are not published.
    self._begin_s: float | None = None
    self._lost: tuple[tuple, Mapping[int, float]] = ((), {})
    self._tape, self._launcher = Tail(workdir.tape), Tail(workdir.events)
    self._files = {
      name: Tail(workdir.metrics(name)) for name in (*self.learners, EVALUATOR)
    }

  def update(self) -> None:
    """Reads what was written since the last call."""
    for event in self._new(self._launcher, EVENT):
      self._hear_launcher(event)
    lines = self._new(self._tape, LINE)
    for line in lines:
      self._hear_syncer(line)
    self._close_rounds(lines)
    for name, file in self._files.items():
      keys = STEP if name in self.learners else (names.TIME, names.EVAL_LOSS)
      for record in self._new(file, keys):
        self._hear_metrics(name, record)
    gaps = self._told_gaps()
    try:
      self.evaluation = metrics_status.read_evaluation(self.workdir.evaluation)
      self._read_status()
    except (MalformedFile, ValueError) as error:  # The next one may be whole.
      gaps.append(str(error))
    self.problem = ' '.join(gaps)

  def _new(self, file: Tail, keys: Sequence[str]) -> list[dict]:
    """Returns the new lines that have all the keys."""
    records = []
    for record in file.new_records(self._note_corrupt):
      lack = [key for key in keys if key not in record]
      if lack:
        self.gaps[f'{file.path}: a line has no {", ".join(lack)}'] += 1
      else:
        records.append(record)
    return records

  def _note_corrupt(self, error: CorruptLine) -> None:
    self.gaps[str(error)] += 1

  def _told_gaps(self) -> list[str]:
    lines = [
      f'{gap} ({many} times).' if many > 1 else f'{gap}.'
      for gap, many in self.gaps.items()
    ]
    more = len(lines) - GAPS_MAX
    return [*lines[:GAPS_MAX], *([f'{more} more such.'] if more > 0 else [])]

  def _read_status(self) -> None:
    status = metrics_status.of_run(self.workdir)
    self._is_counted = status is None
    self.status = self._counted() if status is None else status

  def _hear_launcher(self, event: dict) -> None:
    self.events.append(event)
    if event['process'] not in AFTERWARDS:
      self.last_s = max(self.last_s, event[names.TIME])
    self.happenings.append(
      (event[names.TIME], event['process'], event['event'], event['detail'])
    )

  def _hear_syncer(self, line: dict) -> None:
    at_s, kind = line[names.TIME], line['kind']
    self.last_s = max(self.last_s, at_s)
    self._told_s = at_s
    if self.steps is not None:
      self.heard[SYNCER].append(at_s)
    if kind == 'joined' and 'learner' in line:
      self.heard[learner_name(line['learner'])].append(at_s)
    if kind == 'ready':
      self.readied.append((at_s, line.get('learner'), line.get('reason', '')))
      if self._begin_s is None:
        self._begin_s = at_s
    if kind == 'Reform':
      self.reformed.append((at_s, line['learner']))
    if kind == 'Worked':
      try:
        self._work = work_of_tape([line], self.setup.learners)
      except ValueError as error:
        self.gaps[f'{self.workdir.tape}: {error}'] += 1
      else:
        self.goodput.add(at_s, self._work.goodput(at_s))
    elif kind not in OF_ROUNDS:
      self.kinds[kind] += 1
      if 'reason' in line:
        learner = line.get('learner', -1)
        whom = SYNCER if learner < 0 else learner_name(learner)
        self.happenings.append((at_s, whom, kind, line['reason']))

  def _close_rounds(self, lines: Sequence[dict]) -> None:
    """Takes in published rounds; a merge may have been read earlier."""
    of_rounds = [line for line in lines if line['kind'] in ('Merge', 'Publish')]
    closed, broken = rounds([*self._merges, *of_rounds])
    for each in broken:
      self.gaps[f'{self.workdir.tape}: {each}'] += 1
    done = max((each.number for each in closed), default=0)
    self._merges = [
      line
      for line in (*self._merges, *of_rounds)
      if line['kind'] == 'Merge' and line.get('round', 0) > done
    ]
    for each in closed:
      self.rounds.append(each)
      self._closed += 1
      merged = {share.learner: share for share in each.shares}
      for m, learner in enumerate(self.learners.values()):
        learner.merged.add(each.at_s, m in merged)
        learner.rounds += m in merged
        if m in merged and merged[m].age_steps is not None:
          learner.ages.add(merged[m].age_steps)
          self.age.add(each.at_s, merged[m].age_steps)
      if each.grace_s is not None:
        self.waits.add(each.at_s, each.quorum_s, each.grace_s, each.sync_s)

  def _hear_metrics(self, name: str, record: dict) -> None:
    at_s = record[names.TIME]
    if names.EVAL_LOSS in record:
      step = record.get(names.GLOBAL_STEP, record.get('step', 0))
      self.evaluated.append((at_s, step, record[names.EVAL_LOSS]))
    if name == EVALUATOR:
      return
    self.last_s = max(self.last_s, at_s)
    many, mean_s = self.learners[name].add(record)
    if self.steps is not None:
      stall_s = min(record[names.STALL_TIME], mean_s)
      m = list(self.learners).index(name)
      self.steps += (
        StepRecord(m, at_s - later * mean_s, mean_s, stall_s)
        for later in reversed(range(many))
      )

  # What is known -------------------------------------------------------------

  def _counted(self) -> RunStatus | None:
    """Returns the status of a run that has none, such as one of the lab.

    The lab writes the event log of a syncer, but has no process of one that
    would replace a status once a second. None before the first round.
    """
    if not self.rounds:
      return None
    last, over = self.rounds[-1], bool(self.kinds['End'])
    ages = metrics_ages.total(each.ages for each in self.learners.values())
    heldout = {}
    if self.evaluated:
      _, step, loss = max(self.evaluated)
      heldout = {'heldout_step': int(step), 'heldout_loss': loss}
    return RunStatus(
      run=self.setup.name,
      step=last.step,
      total_steps=self.setup.total_steps,
      rounds=last.number,
      planned=self.setup.learners,
      fragments=self.setup.fragments,
      live=tuple(range(self.setup.learners)),
      participants=tuple(share.learner for share in last.shares),
      grace_s=last.grace_s,
      sync_s=last.sync_s,
      refused=sum(self.kinds[kind] for kind in REFUSALS),
      finished=over,
      age_steps=ages.mean_steps,
      old_share=ages.old_share,
      elapsed_s=self.until_s - self.begin_s,
      goodput=self.counted_goodput(),
      learners=tuple(
        LearnerStatus(
          learner=m,
          state=GONE if over else LIVE,
          steps=sums.steps,
          tokens=round(sums.tokens) if sums.tokens else None,
          loss=sums.last.get(names.TRAIN_LOSS),
          tokens_per_s=sums.last.get(names.TOKENS_PER_S),
          rounds=sums.rounds,
          participation=figures.participation(sums.rounds, self._closed),
          age_steps=sums.ages.mean_steps,
          stall_share=sums.stall_s / sums.step_s if sums.step_s else None,
          stall_max_s=sums.stall_max_s if sums.steps else None,
        )
        for m, sums in enumerate(self.learners.values())
      ),
      **heldout,
    )

  def counted_goodput(self) -> float | None:
    """Returns the goodput that the lab leaves at its end, or of the event log.

    Raises:
      ValueError: the file is no result.
    """
    result = self.workdir.result
    if not result.exists():
      return self._work and self._work.goodput(self._told_s)
    try:
      return json.loads(result.read_text())['goodput']
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(f'{result}: is no result of a run: {error}') from None

  @property
  def begin_s(self) -> float:
    """The time when the first learner was ready, else the first known one."""
    if self._begin_s is not None:
      return self._begin_s
    begun = [x.spans[0][0] for x in self.learners.values() if x.spans]
    begun += [event[names.TIME] for event in self.events[:1]]
    return min(begun, default=self.last_s)

  @property
  def until_s(self) -> float:
    """The time of the last step or round, of a run that is over."""
    ends = [x.spans[-1][1] for x in self.learners.values() if x.spans]
    ends += [self.rounds[-1].at_s] if self.rounds else []
    return max(ends) if ends and self.kinds['End'] else self.last_s

  def end_s(self) -> float:
    """The end of what is shown: now while it goes on; the lab has no clock."""
    if self.state() in (STARTING, COMPILING, RUNNING):
      return self.last_s if self._is_counted else self.clock_s()
    return self.last_s

  def state(self) -> str:
    """Returns how the run is."""
    if self.kinds['End'] or (self.status and self.status.finished):
      return FINISHED
    lasts = [each[-1] for each in self.lives()[0].values() if each]
    if lasts and all(life.ended_s < math.inf for life in lasts):
      return STOPPED
    if self.status is None or (self._is_counted and not self.rounds):
      waits = self.kinds['Started'] and not self.readied
      return COMPILING if waits else STARTING
    if self._is_counted or self.status.time_s is None:
      return RUNNING
    return SILENT if self.clock_s() - self.status.time_s > SILENT_S else RUNNING

  def lives(self) -> tuple[dict[str, tuple[Life, ...]], tuple]:
    """Returns each process's lives, and (process, begin, end) of pauses.

    Times are since the epoch; a learner's use begins with its first step.
    """
    events = [e for e in self.events if e['process'] not in AFTERWARDS]
    known, pauses = lives(events)
    return {
      name: tuple(self._used(name, life) for life in each)
      for name, each in known.items()
    }, pauses

  def _used(self, name: str, life: Life) -> Life:
    learner, spoke_s = self.learners.get(name), self.heard.get(name, ())
    if learner is None and not spoke_s:  # It is not known when it spoke.
      return dataclasses.replace(life, spoke_s=life.started_s)
    return dataclasses.replace(
      life,
      spoke_s=_first_within(spoke_s, life),
      stepped_s=_first_within(
        (begin_s for begin_s, _ in learner.spans) if learner else (), life
      ),
    )

  def deaths(self) -> list[Life]:
    """Returns lives that ended in a death, in the order of time."""
    return deaths_of(self.lives()[0])

  def states(self) -> dict[str, str]:
    """Returns the state of each process, as the page says it.

    The launcher knows what is dead, the syncer what the others do.
    """
    of_each, _ = self.lives()
    known = self.status.learners if self.status else ()
    seen = {learner_name(row.learner): row.state for row in known}
    states = {}
    for name in dict.fromkeys((SYNCER, *self.learners, *seen, *of_each)):
      last = of_each[name][-1] if of_each.get(name) else None
      if last and last.ended_s < math.inf:
        states[name] = 'dead' if last.death else 'ended'
      elif self._is_counted and self.kinds['End']:
        states[name] = 'ended'  # No launcher tells of the lab.
      else:
        states[name] = seen.get(name) or ('running' if last else 'unknown')
    return states

  def heldout(self) -> list[tuple[float, float, float]]:
    """Returns (time, step, loss of Θ), with the evaluation after the end."""
    losses = sorted(self.evaluated)
    if self.evaluation is not None:
      end_s = max((x.at_s for x in self.rounds), default=self.last_s)
      step = max((x.step for x in self.rounds), default=0)
      losses = [(self.begin_s, 0, self.evaluation.initial_loss), *losses]
      losses.append((end_s, step, self.evaluation.final_loss))
    return losses

  def tokens_at(self, at_s: float) -> float:
    """Returns the tokens that all learners had trained on by a time."""
    return sum(_until(x.trained.points(), at_s) for x in self.learners.values())

  def lost_tokens(self) -> Mapping[int, float]:
    """Returns the tokens that deaths took, by learner, mean over fragments.

    They are those of the token ledger; empty where no event logs of learners
    are, or where these are too long to be read while a page waits.
    """
    tapes = [self.workdir.tape, *self.workdir.tapes.glob('*.jsonl')]
    files = [part for path in tapes for part in parts(path)]
    seen = len(self.deaths()), len(self.readied), self.kinds['End']
    if self._lost[0] == seen:
      return self._lost[1]
    lost: collections.Counter[int] = collections.Counter()
    small = sum(path.stat().st_size for path in files) <= LEDGER_BYTES_MAX
    if small and self.workdir.tapes.exists():
      fragments = self.setup.fragments
      protocol = with_current_blend(self.config['protocol'])
      blend = protocol.get('blend', 'rebase')
      try:
        rows = token_ledger.rows_of(self.workdir, fragments, blend)
      except (CorruptLine, KeyError) as error:
        self.gaps[str(error)] += 1
        rows = {}
      for (m, _), counts in rows.items():
        lost[m] += dict(counts.lost).get(DIED, 0) / fragments
    self._lost = seen, lost
    return lost

  def machine(self) -> Mapping:
    """Returns what a learner said of its machine; empty for one of the lab."""
    for m in range(self.setup.learners):
      for part in parts(self.workdir.learner_tape(m)):
        with part.open() as file:
          for line in file:  # It takes fragments in before it begins.
            if '"kind": "Begin"' in line and line.endswith('\n'):
              return json.loads(line).get('machine', {})
    return {}


@dataclasses.dataclass(frozen=True)
class RecordedRun:
  """A run as far as it is known; seconds since its first learner was ready."""

  folder: pathlib.Path
  setup: Setup
  # Inner steps of all learners in the order of time; of those that were not
  # written, the mean.
  steps: tuple[StepRecord, ...]
  rounds: tuple[RecordedRound, ...]  # That closed, in order.
  records: Mapping[str, int]  # Of the syncer's log, how many of each kind.
  # Of each process that the launcher started.
  lives: Mapping[str, tuple[Life, ...]]
  # (process, begin, end) of those that were stopped for a while; the end of
  # one that did not go on is inf.
  pauses: tuple[tuple[str, float, float], ...]
  joined: frozenset[str]  # Learners' processes that said hello to the syncer.
  # When the launcher first stopped a process; None: it stopped none.
  stopped_s: float | None
  begin_s: float  # When that learner was ready, since the epoch.
  until_s: float  # Of the last thing that is known of it.
  ended: bool  # The syncer's event log says that the run is over.
  heldout: tuple[tuple[float, float, float], ...]  # Time, step, loss of Θ.
  # What the syncer counted; of a run without one, what its event log tells.
  status: RunStatus | None
  evaluation: Evaluation | None
  problem: str  # What is broken, in sentences that begin with the file.
  # (time, learner) of those that went on with other slices.
  reformed: tuple[tuple[float, int], ...] = ()

  @property
  def learners(self) -> range:
    return range(self.setup.learners)

  @property
  def goodput(self) -> float | None:
    return self.status.goodput if self.status else None

  @property
  def uptime(self) -> float | None:
    """As the syncer counted it; of a run without one, that of its steps."""
    if self.status and self.status.uptime is not None:
      return self.status.uptime
    return uptime(self.steps, 0.0, self.until_s) if self.until_s > 0 else None

  def deaths(self) -> tuple[Life, ...]:
    """Lives that ended in a death within the run, in the order of time."""
    return tuple(x for x in deaths_of(self.lives) if x.ended_s <= self.until_s)


def read(folder: pathlib.Path) -> RecordedRun:
  """Returns the run in a folder that has a config.json, with all its steps.

  Raises:
    NoReport: config.json is not one of a run, or there is none.
  """
  run = FollowedRun(folder, whole=True)
  run.update()
  return record(run)


def record(run: FollowedRun) -> RecordedRun:
  """Returns what a run that is followed as a whole has told so far."""
  begin_s = run.begin_s

  def shifted(value, *fields: str):
    known = {name: getattr(value, name) for name in fields}
    return dataclasses.replace(
      value, **{name: x - begin_s for name, x in known.items() if x is not None}
    )

  of_each, pauses = run.lives()
  steps = sorted(run.steps, key=lambda step: step.end_s)
  stops = [e[names.TIME] for e in run.events if e['event'] == 'stopped']
  times = ('started_s', 'spoke_s', 'stepped_s', 'ended_s')
  return RecordedRun(
    folder=run.workdir.root,
    setup=run.setup,
    steps=tuple(shifted(step, 'end_s') for step in steps),
    rounds=tuple(shifted(each, 'at_s') for each in run.rounds),
    records=dict(sorted(run.kinds.items())),
    lives={
      name: tuple(shifted(life, *times) for life in each)
      for name, each in of_each.items()
    },
    pauses=tuple((who, a - begin_s, b - begin_s) for who, a, b in pauses),
    joined=frozenset(run.heard.keys() - {SYNCER}),
    stopped_s=min(stops) - begin_s if stops else None,
    begin_s=begin_s,
    until_s=run.until_s - begin_s,
    ended=bool(run.kinds['End']),
    heldout=tuple((at_s - begin_s, *x) for at_s, *x in run.heldout()),
    status=run.status,
    evaluation=run.evaluation,
    problem=run.problem,
    reformed=tuple((at_s - begin_s, m) for at_s, m in run.reformed),
  )


def _first_within(times_s: Iterable[float], life: Life) -> float | None:
  """Returns the first of ascending times that lies within a life."""
  inside = (t for t in times_s if life.started_s <= t < life.ended_s)
  return next(inside, None)


def _until(points: Sequence[tuple[float, float]], at_s: float) -> float:
  """Interpolates a rising curve of (time, value) that begins at 0."""
  place = bisect.bisect_right(points, (at_s, math.inf))
  if place == len(points):
    return points[-1][1] if points else 0.0
  t1, y1 = points[place]
  t0, y0 = points[place - 1] if place else (min(at_s, t1), 0.0)
  return y0 + (y1 - y0) * (at_s - t0) / (t1 - t0) if t1 > t0 else y0
