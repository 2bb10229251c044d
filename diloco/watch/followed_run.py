# SPDX-License-Identifier: Apache-2.0
"""Follows a run's folder while it is written: each line is read once.

What is kept is bounded: curves are thinned (see `ThinnedCurve`), and of rounds
and events the last ones are kept. The folder is only read, so that the run does
not notice; a run that is over is read in the same way.
"""

import collections
import dataclasses
import math
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence

from diloco.metrics import figures, files, names, recorded_run, run_reader
from diloco.metrics import status as metrics_status
from diloco.metrics.files import MalformedFile
from diloco.metrics.goodput import Work, work_of_tape
from diloco.metrics.jsonl import Tail
from diloco.metrics.recorded_run import SYNCER, NoReport, RecordedRound
from diloco.metrics.status import LearnerStatus, RunStatus
from diloco.metrics.tape_counts import StepCounts, TapeCounts, goodput_of
from diloco.metrics.workdir import EVALUATOR, Workdir, learner_name

POINTS_MAX = 400  # Of a curve.
ROUNDS_MAX = 1000  # That the timeline shows.
HAPPENINGS_MAX = 60
SILENT_S = 15.0  # The syncer writes its status about once a second.
AFTERWARDS = ('evaluate', EVALUATOR)  # No processes of the training.
OF_ROUNDS = ('Merge', 'Publish', 'Worked')  # Kinds that every round has.
# The run's state.
STARTING = 'starting'
RUNNING = 'running'
SILENT = 'silent'
STOPPED = 'stopped'
FINISHED = 'finished'


class ThinnedCurve:
  """Points of a curve, thinned as it grows.

  Each point is the mean of equally many values. When there are too many points,
  pairs of them are merged.

  Args:
    each: values of a point at first.
    points_max: more than so many are merged to half as many; even.
  """

  def __init__(self, each: int = 1, points_max: int = POINTS_MAX):
    self._each = each
    self._points_max = points_max
    self._points: list[tuple[float, ...]] = []
    self._open: list[tuple[float, ...]] = []  # Fewer than `each`.

  def add(self, *point: float) -> None:
    """Adds a value: its time, and what was measured then."""
    self._open.append(point)
    if len(self._open) < self._each:
      return
    self._points.append(_mean(self._open))
    self._open = []
    if len(self._points) >= self._points_max:
      pairs = zip(self._points[::2], self._points[1::2])
      self._points = [_mean(pair) for pair in pairs]
      self._each *= 2

  def points(self) -> list[tuple[float, ...]]:
    """Returns all points; the last may be the mean of fewer values."""
    return [*self._points, _mean(self._open)] if self._open else self._points


def _mean(points) -> tuple[float, ...]:
  return tuple(sum(values) / len(points) for values in zip(*points))


@dataclasses.dataclass
class _Learner:
  """Sums and curves of a learner's metrics."""

  loss: ThinnedCurve = dataclasses.field(default_factory=ThinnedCurve)
  merged: ThinnedCurve = dataclasses.field(
    default_factory=lambda: ThinnedCurve(each=8)
  )
  made: StepCounts = dataclasses.field(default_factory=StepCounts)
  # From the first to the last known step of each process.
  spans: list[list[float]] = dataclasses.field(default_factory=list)


class FollowedRun:
  """The state of a run as far as its folder tells; `update` reads on.

  Args:
    folder: of a run, which may have just begun.

  Raises:
    NoReport: there is no config.json of a run in it.
  """

  def __init__(self, folder: pathlib.Path):
    self._workdir = workdir = Workdir(folder)
    if not workdir.config.exists():
      what = 'holds no run: no config.json' if folder.is_dir() else 'no folder'
      raise NoReport(f'{folder}: {what}')
    self._setup = recorded_run.read(workdir.config)
    self._tape = Tail(workdir.tape, strict=False)
    self._launcher = Tail(workdir.events, strict=False)
    self._files = {
      name: Tail(workdir.metrics(name), strict=False)
      for name in (*map(learner_name, range(self._setup.learners)), EVALUATOR)
    }
    self._learners = {
      learner_name(m): _Learner() for m in range(self._setup.learners)
    }
    self._events: list[dict] = []
    self._merges: list[dict] = []  # Of rounds that are not published.
    self._rounds: collections.deque[RecordedRound] = collections.deque(
      maxlen=ROUNDS_MAX
    )
    self._happenings: collections.deque = collections.deque(
      maxlen=HAPPENINGS_MAX
    )
    self._kinds: collections.Counter[str] = collections.Counter()
    self._counts = TapeCounts()
    self._heldout: list[tuple[float, float, float]] = []  # s, step, loss.
    self._goodput, self._age = ThinnedCurve(), ThinnedCurve(each=8)
    self._work: Work | None = None  # As the tape has it.
    self._begin_s: float | None = None
    self._last_s = 0.0
    self._status: RunStatus | None = None
    self._has_syncer = False  # Whether it has a status of its own.
    self._problem: str | None = None

  def update(self) -> None:
    """Reads what was written since the last call."""
    for line in self._launcher.new_records():
      if _has(line, run_reader.EVENT):
        self._hear_launcher(line)
    lines = [
      line for line in self._tape.new_records() if _has(line, run_reader.LINE)
    ]
    for line in lines:
      self._hear_syncer(line)
    self._close_rounds(lines)
    for name, file in self._files.items():
      for record in file.new_records():
        if names.TIME in record:
          self._hear_metrics(name, record)
    self._problem = None
    try:
      status = metrics_status.of_run(self._workdir)
      self._has_syncer = status is not None
      self._status = status or self._count()
    except (MalformedFile, ValueError) as error:  # The next one may be whole.
      self._problem = str(error)

  def _count(self) -> RunStatus | None:
    made = {name: each.made for name, each in self._learners.items()}
    return self._counts.status(
      self._setup,
      made,
      self._kinds,
      elapsed_s=self._last_s - self._begins(),
      goodput=goodput_of(self._workdir.result, self._work, self._last_s),
      **self._heldout_fields(),
    )

  def _heldout_fields(self) -> dict[str, float]:
    if not self._heldout:
      return {}
    _, step, loss = max(self._heldout)
    return {'heldout_step': int(step), 'heldout_loss': loss}

  def _hear_launcher(self, event: dict) -> None:
    self._events.append(event)
    if event['process'] not in AFTERWARDS:
      self._last_s = max(self._last_s, event[names.TIME])
    self._happenings.append(
      (event[names.TIME], event['process'], event['event'], event['detail'])
    )

  def _hear_syncer(self, line: dict) -> None:
    at_s, kind = line[names.TIME], line['kind']
    self._last_s = max(self._last_s, at_s)
    if kind == 'ready' and self._begin_s is None:
      self._begin_s = at_s
    if kind == 'Worked':
      try:
        work = work_of_tape([line], self._setup.learners)
      except ValueError as error:
        self._problem = str(error)
      else:
        self._work = work
        self._goodput.add(at_s, work.goodput(at_s))
    elif kind not in OF_ROUNDS:
      self._kinds[kind] += 1
      if 'reason' in line:
        learner = line.get('learner', -1)
        whom = SYNCER if learner < 0 else learner_name(learner)
        self._happenings.append((at_s, whom, kind, line['reason']))

  def _close_rounds(self, lines: Sequence[dict]) -> None:
    """Takes in published rounds; a merge may have been read earlier."""
    of_rounds = [line for line in lines if line['kind'] in ('Merge', 'Publish')]
    closed, broken = run_reader.rounds([*self._merges, *of_rounds], 0.0)
    if broken:
      self._problem = ' '.join(broken)
    done = max((each.number for each in closed), default=0)
    self._merges = [
      line
      for line in (*self._merges, *of_rounds)
      if line['kind'] == 'Merge' and line.get('round', 0) > done
    ]
    for each in closed:
      self._rounds.append(each)
      self._counts.add(each)
      merged = {share.learner for share in each.shares}
      for m in range(self._setup.learners):
        self._learners[learner_name(m)].merged.add(each.at_s, m in merged)
      for share in each.shares:
        if share.age_steps is not None:
          self._age.add(each.at_s, share.age_steps)

  def _hear_metrics(self, name: str, record: dict) -> None:
    at_s = record[names.TIME]
    self._last_s = max(self._last_s, at_s)
    step = record.get(names.GLOBAL_STEP, record.get('step', 0))
    if names.EVAL_LOSS in record:
      self._heldout.append((at_s, step, record[names.EVAL_LOSS]))
    learner = self._learners.get(name)
    if learner is None or not _has(record, run_reader.STEP):
      return
    was, steps = learner.made.last, 1
    if not was or record['step'] <= was['step'] or _differ(was, record):
      learner.spans.append([at_s - record[names.STEP_TIME], at_s])
    else:
      steps = record['step'] - was['step']
    learner.spans[-1][1] = at_s
    learner.made.add(record, steps)
    if names.TRAIN_LOSS in record:
      learner.loss.add(at_s, record[names.TRAIN_LOSS], step)

  @property
  def status(self) -> RunStatus | None:
    """The last status: the syncer's, or what the tape tells in its place."""
    return self._status

  # What is known -------------------------------------------------------------

  def state(self, now_s: float | None = None) -> dict:
    """Returns everything that the page shows, as JSON; times since the epoch.

    Args:
      now_s: since the epoch; the present unless given.
    """
    now_s = time.time() if now_s is None else now_s
    lives, pauses = run_reader.lives(self._of_run(), 0.0)
    how = self._how(now_s, lives)
    is_now = how in (STARTING, RUNNING) and (
      self._has_syncer or self._status is None
    )
    found = {
      'run': self._setup.name,
      'folder': str(self._workdir.root.resolve()),
      'state': how,
      'now_s': now_s if is_now else self._last_s,
      'begin_s': self._begins(),
      'last_s': self._last_s,
      'problem': self._problem,
      'setup': dataclasses.asdict(self._setup),
      'status': self._status and metrics_status.as_json(self._status),
      'figures': (
        figures.texts(figures.RUN, self._status, figures.PAGE)
        if self._status
        else []
      ),
      'processes': list(self._processes(lives)),
      'loss': {m: each.loss.points() for m, each in self._learners.items()},
      'heldout': self._all_heldout(),
      'participation': {
        m: each.merged.points() for m, each in self._learners.items()
      },
      'goodput': self._goodput.points(),
      'age': self._age.points(),
      'rounds': [_round(each) for each in self._rounds],
      'lives': [
        (name, life.started_s, self._used_s(name, life), _end(life), life.death)
        for name, each in lives.items()
        for life in each
      ],
      'pauses': [(who, a, min(b, self._last_s)) for who, a, b in pauses],
      'spans': {m: each.spans for m, each in self._learners.items()},
      'kinds': dict(sorted(self._kinds.items())),
      'happenings': sorted(self._happenings, key=lambda each: each[0]),
    }
    return files.finite(found)

  def _begins(self) -> float:
    if self._begin_s is not None:
      return self._begin_s
    return self._events[0][names.TIME] if self._events else self._last_s

  def _of_run(self) -> list[dict]:
    return [e for e in self._events if e['process'] not in AFTERWARDS]

  def _how(self, now_s: float, lives: Mapping) -> str:
    if self._status is not None and self._status.finished:
      return FINISHED
    lasts = [of_process[-1] for of_process in lives.values() if of_process]
    if lasts and all(life.ended_s < math.inf for life in lasts):
      return STOPPED
    if not self._has_syncer:
      return RUNNING if self._rounds else STARTING
    return SILENT if now_s - self._status.time_s > SILENT_S else RUNNING

  def _used_s(self, name: str, life) -> float | None:
    """Returns when a learner's process made its first step; None: not yet."""
    if name not in self._learners:
      return life.started_s
    begins_s = (begin_s for begin_s, _ in self._learners[name].spans)
    return run_reader.first_within(begins_s, life)

  def _processes(self, lives: Mapping) -> Iterator[dict]:
    known = {
      learner_name(each.learner): each
      for each in (self._status.learners if self._status else ())
    }
    for name in dict.fromkeys((SYNCER, *self._learners, *known, *lives)):
      of_process, told = lives.get(name, ()), known.get(name)
      yield {
        'name': name,
        'state': self._process_state(of_process, told),
        'starts': len(of_process) or (told.incarnations if told else None),
        'figures': (
          figures.texts(figures.LEARNER, told, figures.PAGE) if told else []
        ),
      }

  def _process_state(self, lives: Sequence, told: LearnerStatus | None) -> str:
    """The launcher knows what is dead, the syncer what the others do."""
    if lives and lives[-1].ended_s < math.inf:
      return 'dead' if lives[-1].death else 'ended'
    if told is not None and self._has_syncer:
      return told.state
    if told is not None and self._kinds['End']:
      return 'ended'  # No launcher tells of the lab.
    return 'running' if lives else 'unknown'

  def _all_heldout(self) -> list[tuple[float, float, float]]:
    """Losses of Θ, with the first and the last one after the run's end."""
    found = sorted(self._heldout)
    try:
      final = metrics_status.read_evaluation(self._workdir.evaluation)
    except MalformedFile:
      final = None
    if final is not None:
      end_s = max((each.at_s for each in self._rounds), default=self._last_s)
      end_step = max((each.step for each in self._rounds), default=0)
      found = [(self._begins(), 0, final.initial_loss), *found]
      found.append((end_s, end_step, final.final_loss))
    return found


def _round(each: RecordedRound) -> tuple:
  """(number, step, due, quorum, window's end, published, shares)."""
  ages = [(share.learner, share.age_s) for share in each.shares]
  return each.number, each.step, *each.times_s, each.at_s, ages


def _has(record: Mapping, keys: Sequence[str]) -> bool:
  return all(key in record for key in keys)


def _differ(was: Mapping, record: Mapping) -> bool:
  return was.get(names.INCARNATION) != record.get(names.INCARNATION)


def _end(life) -> float | None:
  return life.ended_s if life.ended_s < math.inf else None
