# SPDX-License-Identifier: Apache-2.0
"""Follows a run's folder while it is written: each line is read once.

What is kept is bounded: curves are thinned (see `ThinnedCurve`), and of rounds
and events the last ones are kept. The folder is only read, so that the run does
not notice; a run that is over is read in the same way. Figures of the run are
those of its status, see `diloco.metrics.figures`.
"""

import bisect
import collections
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Mapping, Sequence

from diloco.metrics import (
  names,
  recorded_faults,
  recorded_run,
  run_reader,
  token_tapes,
)
from diloco.metrics import status as metrics_status
from diloco.metrics.files import MalformedFile
from diloco.metrics.goodput import Work, work_of_tape
from diloco.metrics.jsonl import CorruptLine, Tail, parts
from diloco.metrics.recorded_faults import RecordedFault
from diloco.metrics.recorded_run import SYNCER, Life, NoReport, RecordedRound
from diloco.metrics.status import Evaluation, RunStatus
from diloco.metrics.tape_counts import StepCounts, TapeCounts, goodput_of
from diloco.metrics.token_ledger import DIED
from diloco.metrics.workdir import EVALUATOR, Workdir, learner_name

POINTS_MAX = 400  # Of a curve.
ROUNDS_MAX = 1000  # That the timeline shows.
HAPPENINGS_MAX = 60
SILENT_S = 15.0  # The syncer writes its status about once a second.
LEDGER_BYTES_MAX = 30e6  # Longer tapes are not read for what deaths lost.
AFTERWARDS = ('evaluate', EVALUATOR)  # No processes of the training.
OF_ROUNDS = ('Merge', 'Publish', 'Worked')  # Kinds that every round has.
# The run's state.
STARTING = 'starting'
COMPILING = 'compiling'  # The syncer waits for the first learner.
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
class FollowedLearner:
  """Sums and curves of a learner's metrics; times since the epoch."""

  loss: ThinnedCurve = dataclasses.field(default_factory=ThinnedCurve)
  tokens: ThinnedCurve = dataclasses.field(default_factory=ThinnedCurve)
  merged: ThinnedCurve = dataclasses.field(
    default_factory=lambda: ThinnedCurve(each=8)
  )
  counts: StepCounts = dataclasses.field(default_factory=StepCounts)
  # From the first to the last known step of each process.
  spans: list[list[float]] = dataclasses.field(default_factory=list)


class FollowedRun:
  """What a run's folder tells so far; `update` reads on.

  Args:
    folder: of a run, which may have just begun.
    label: tells it from other runs of a page; its name unless given.

  Attributes:
    status: what the syncer last counted; of a run of the lab, what its tape
      tells; None: nothing yet.
    readied: (time, learner, where its state came from), for each bootstrap.
    faults: of a chaos run that has been judged.
    problem: what is wrong with the files, in sentences.

  Raises:
    NoReport: there is no config.json of a run in it.
  """

  def __init__(self, folder: pathlib.Path, label: str = ''):
    self.workdir = workdir = Workdir(folder)
    if not workdir.config.exists():
      what = 'holds no run: no config.json' if folder.is_dir() else 'no folder'
      raise NoReport(f'{folder}: {what}')
    self.setup = recorded_run.read(workdir.config)
    self.config: Mapping = json.loads(workdir.config.read_text())
    self.label = label or self.setup.name
    self.learners = {
      learner_name(m): FollowedLearner() for m in range(self.setup.learners)
    }
    self.rounds: collections.deque[RecordedRound] = collections.deque(
      maxlen=ROUNDS_MAX
    )
    self.happenings: collections.deque = collections.deque(
      maxlen=HAPPENINGS_MAX
    )
    self.kinds: collections.Counter[str] = collections.Counter()
    self.goodput, self.age = ThinnedCurve(), ThinnedCurve(each=8)
    self.waits = ThinnedCurve(each=8)  # Quorum, grace window, sync.
    self.readied: list[tuple[float, int, str]] = []
    self.status: RunStatus | None = None
    self.evaluation: Evaluation | None = None
    self.faults: tuple[RecordedFault, ...] = ()
    self.problem = ''
    self.last_s = 0.0  # Of the last thing that is known of the run.
    self._work: Work | None = None  # As the tape has it.
    self._is_counted = False  # The status is that of the tape.
    self._tape = Tail(workdir.tape, strict=False)
    self._launcher = Tail(workdir.events, strict=False)
    self._files = {
      name: Tail(workdir.metrics(name), strict=False)
      for name in (*self.learners, EVALUATOR)
    }
    self._events: list[dict] = []
    self._merges: list[dict] = []  # Of rounds that are not published.
    self._counts = TapeCounts()
    self._followed: list[tuple[float, float, float]] = []
    self._begin_s: float | None = None
    self._lost: tuple[tuple, Mapping[int, float]] = ((), {})

  def update(self) -> None:
    """Reads what was written since the last call."""
    self.problem = ''
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
    try:
      self.evaluation = metrics_status.read_evaluation(self.workdir.evaluation)
      self._read_status()
      self.faults = recorded_faults.read(self.workdir, self.begin_s)
    except (MalformedFile, ValueError) as error:  # The next one may be whole.
      self.problem = f'{self.problem} {error}'.strip()

  def _read_status(self) -> None:
    found = metrics_status.of_run(self.workdir)
    self._is_counted = found is None
    if found is None:
      heldout = {}
      if self._followed:
        _, step, loss = max(self._followed)
        heldout = {'heldout_step': int(step), 'heldout_loss': loss}
      found = self._counts.status(
        self.setup,
        {name: each.counts for name, each in self.learners.items()},
        self.kinds,
        elapsed_s=self.last_s - self.begin_s,
        goodput=goodput_of(self.workdir.result, self._work, self.last_s),
        **heldout,
      )
    self.status = found

  def _hear_launcher(self, event: dict) -> None:
    self._events.append(event)
    if event['process'] not in AFTERWARDS:
      self.last_s = max(self.last_s, event[names.TIME])
    self.happenings.append(
      (event[names.TIME], event['process'], event['event'], event['detail'])
    )

  def _hear_syncer(self, line: dict) -> None:
    at_s, kind = line[names.TIME], line['kind']
    self.last_s = max(self.last_s, at_s)
    if kind == 'ready':
      self.readied.append((at_s, line.get('learner'), line.get('reason', '')))
      if self._begin_s is None:
        self._begin_s = at_s
    if kind == 'Worked':
      try:
        work = work_of_tape([line], self.setup.learners)
      except ValueError as error:
        self.problem = str(error)
      else:
        self._work = work
        self.goodput.add(at_s, work.goodput(at_s))
    elif kind not in OF_ROUNDS:
      self.kinds[kind] += 1
      if 'reason' in line:
        learner = line.get('learner', -1)
        whom = SYNCER if learner < 0 else learner_name(learner)
        self.happenings.append((at_s, whom, kind, line['reason']))

  def _close_rounds(self, lines: Sequence[dict]) -> None:
    """Takes in published rounds; a merge may have been read earlier."""
    of_rounds = [line for line in lines if line['kind'] in ('Merge', 'Publish')]
    closed, broken = run_reader.rounds([*self._merges, *of_rounds], 0.0)
    if broken:
      self.problem = ' '.join(broken)
    done = max((each.number for each in closed), default=0)
    self._merges = [
      line
      for line in (*self._merges, *of_rounds)
      if line['kind'] == 'Merge' and line.get('round', 0) > done
    ]
    for each in closed:
      self.rounds.append(each)
      self._counts.add(each)
      merged = {share.learner for share in each.shares}
      for m in range(self.setup.learners):
        self.learners[learner_name(m)].merged.add(each.at_s, m in merged)
      for share in each.shares:
        if share.age_steps is not None:
          self.age.add(each.at_s, share.age_steps)
      if each.grace_s is not None:
        self.waits.add(each.at_s, each.quorum_s, each.grace_s, each.sync_s)

  def _hear_metrics(self, name: str, record: dict) -> None:
    at_s = record[names.TIME]
    self.last_s = max(self.last_s, at_s)
    step = record.get(names.GLOBAL_STEP, record.get('step', 0))
    if names.EVAL_LOSS in record:
      self._followed.append((at_s, step, record[names.EVAL_LOSS]))
    learner = self.learners.get(name)
    if learner is None or not _has(record, run_reader.STEP):
      return
    was, many = learner.counts.last, 1
    if not was or record['step'] <= was['step'] or _differ(was, record):
      learner.spans.append([at_s - record[names.STEP_TIME], at_s])
    else:
      many = record['step'] - was['step']
    learner.spans[-1][1] = at_s
    learner.counts.add(record, many)
    learner.tokens.add(at_s, learner.counts.tokens)
    if names.TRAIN_LOSS in record:
      learner.loss.add(at_s, record[names.TRAIN_LOSS])

  # What is known -------------------------------------------------------------

  @property
  def begin_s(self) -> float:
    """When the first learner was ready, else the first known time."""
    if self._begin_s is not None:
      return self._begin_s
    return self._events[0][names.TIME] if self._events else self.last_s

  def end_s(self, now_s: float | None = None) -> float:
    """Until when it is shown: now, while it goes on; the lab has no clock."""
    if self.state(now_s) in (STARTING, COMPILING, RUNNING):
      return self.last_s if self._is_counted else _now(now_s)
    return self.last_s

  def state(self, now_s: float | None = None) -> str:
    """Returns how the run is.

    Args:
      now_s: since the epoch; the present unless given.
    """
    if self.kinds['End'] or (self.status and self.status.finished):
      return FINISHED
    lives, _ = self.lives()
    lasts = [of_process[-1] for of_process in lives.values() if of_process]
    if lasts and all(life.ended_s < math.inf for life in lasts):
      return STOPPED
    if self.status is None or (self._is_counted and not self.rounds):
      waits = self.kinds['Started'] and not self.readied
      return COMPILING if waits else STARTING
    if self._is_counted or self.status.time_s is None:
      return RUNNING
    return SILENT if _now(now_s) - self.status.time_s > SILENT_S else RUNNING

  def lives(self) -> tuple[dict[str, tuple[Life, ...]], tuple]:
    """Returns each process's lives, and (process, begin, end) of pauses.

    Times are since the epoch; a learner's use begins with its first step.
    """
    events = [e for e in self._events if e['process'] not in AFTERWARDS]
    found, pauses = run_reader.lives(events, 0.0)
    return {
      name: tuple(self._used(name, life) for life in each)
      for name, each in found.items()
    }, pauses

  def _used(self, name: str, life: Life) -> Life:
    if name not in self.learners:
      return dataclasses.replace(life, spoke_s=life.started_s)
    begins_s = (begin_s for begin_s, _ in self.learners[name].spans)
    stepped_s = run_reader.first_within(begins_s, life)
    return dataclasses.replace(life, stepped_s=stepped_s)

  def deaths(self) -> list[Life]:
    """Returns lives that ended in a death, in the order of time."""
    return recorded_run.deaths(self.lives()[0])

  def states(self) -> dict[str, str]:
    """Returns the state of each process, as the page says it.

    The launcher knows what is dead, the syncer what the others do.
    """
    lives, _ = self.lives()
    known = self.status.learners if self.status else ()
    told = {learner_name(each.learner): each.state for each in known}
    found = {}
    for name in dict.fromkeys((SYNCER, *self.learners, *told, *lives)):
      last = lives[name][-1] if lives.get(name) else None
      if last and last.ended_s < math.inf:
        found[name] = 'dead' if last.death else 'ended'
      elif self._is_counted and self.kinds['End']:
        found[name] = 'ended'  # No launcher tells of the lab.
      else:
        found[name] = told.get(name) or ('running' if last else 'unknown')
    return found

  def heldout(self) -> list[tuple[float, float, float]]:
    """Returns (time, step, loss of Θ), with the evaluation after the end."""
    found = sorted(self._followed)
    if self.evaluation is not None:
      end_s = max((each.at_s for each in self.rounds), default=self.last_s)
      step = max((each.step for each in self.rounds), default=0)
      found = [(self.begin_s, 0, self.evaluation.initial_loss), *found]
      found.append((end_s, step, self.evaluation.final_loss))
    return found

  def tokens_at(self, at_s: float) -> float:
    """Returns the tokens that all learners had trained on by a time."""
    return sum(
      _until(each.tokens.points(), at_s) for each in self.learners.values()
    )

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
      blend = self.config.get('protocol', {}).get('blend', 'carry')
      try:
        rows = token_tapes.rows_of(
          self.workdir, self.setup.fragments, self.setup.tokens_per_step, blend
        )
      except (CorruptLine, KeyError) as error:
        self.problem = f'{self.problem} {error}'.strip()
        rows = {}
      for (m, _), counts in rows.items():
        lost[m] += dict(counts.lost).get(DIED, 0) / self.setup.fragments
    self._lost = seen, lost
    return lost

  def machine(self) -> Mapping:
    """Returns what a learner said of its machine; empty for one of the lab."""
    for m in range(self.setup.learners):
      path = self.workdir.learner_tape(m)
      for each in parts(path):
        with each.open() as file:
          line = file.readline()
        if line.endswith('\n'):
          return json.loads(line).get('machine', {})
    return {}


def _until(points: Sequence[tuple[float, float]], at_s: float) -> float:
  """Interpolates a rising curve of (time, value) that begins at 0."""
  place = bisect.bisect_right(points, (at_s, math.inf))
  if place == len(points):
    return points[-1][1] if points else 0.0
  t1, y1 = points[place]
  t0, y0 = points[place - 1] if place else (min(at_s, t1), 0.0)
  return y0 + (y1 - y0) * (at_s - t0) / (t1 - t0) if t1 > t0 else y0


def _now(now_s: float | None) -> float:
  return time.time() if now_s is None else now_s


def _has(record: Mapping, keys: Sequence[str]) -> bool:
  return all(key in record for key in keys)


def _differ(was: Mapping, record: Mapping) -> bool:
  return was.get(names.INCARNATION) != record.get(names.INCARNATION)
