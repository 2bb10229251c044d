# SPDX-License-Identifier: Apache-2.0
"""Goodput and uptime of a run.

Goodput is useful over allocated learner time, from the first learner's
readiness to the end of the run.

* Allocated is the time of every learner that the run is meant to have: of the
  configuration's M for the whole time, dead, restarting or alive, and whether
  the syncer is there or not; of one that joins beyond M from its first hello,
  without the time after it left in good order, until it comes back.
* Useful is the time of finished steps, without their stalls, except for those
  that a death lost: what a process made after its last boundary that a round
  merged, or that is in a complete checkpoint. A process that leaves in good
  order loses nothing. A learner that goes on with other slices loses what came
  after the boundary that these held; a step of n of N slices counts n / N.

`Work` counts it; the syncer's event log has what it counted at each `Worked`
line, and `work_of_tape` reads that back.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from diloco.metrics import files, names

# States of a learner's newest process.
HERE = 'here'
LEFT = 'left'  # It left in good order.
LOST = 'lost'  # It or its session is lost; it may return in another session.
MARKS_MAX = 1024  # Steps since the last boundary that is kept, per learner.


@dataclasses.dataclass(frozen=True)
class StepRecord:
  """One finished inner step of one learner."""

  learner: int
  end_s: float  # When it ended, on one clock for all learners.
  step_s: float
  stall_s: float  # Part of step_s spent waiting for the exchange.

  def productive_s(self, start_s: float, end_s: float) -> float:
    """Returns its part of [start_s, end_s], minus that share of the stall."""
    inside_s = min(self.end_s, end_s) - max(self.end_s - self.step_s, start_s)
    if self.step_s <= 0 or inside_s <= 0:
      return 0.0
    return inside_s * max(0.0, 1 - self.stall_s / self.step_s)


def stepping(
  steps: Iterable[StepRecord], learners: int, start_s: float, end_s: float
) -> float:
  """Returns the share of M learners' time spent in steps, lost ones included.

  Σ (step_s − stall_s) / (M · time); of a step across an end of [start_s, end_s]
  the part inside counts. It shows how a window of a run went; for a whole run
  it is the goodput if no process died.

  Args:
    end_s: end of the window; later than start_s.
  """
  assert end_s > start_s, f'an empty run: {start_s=} {end_s=}'
  productive_s = sum(step.productive_s(start_s, end_s) for step in steps)
  return productive_s / (learners * (end_s - start_s))


def uptime(steps: Iterable[StepRecord], start_s: float, end_s: float) -> float:
  """Returns the share of [start_s, end_s] with at least one learner stepping.

  The measure of the union of all [end_s − step_s, end_s] of the steps.
  """
  assert end_s > start_s, f'an empty run: {start_s=} {end_s=}'
  spans = joined((s.end_s - s.step_s, s.end_s) for s in steps)
  inside_s = (min(end, end_s) - max(begin, start_s) for begin, end in spans)
  return sum(max(0.0, each_s) for each_s in inside_s) / (end_s - start_s)


def joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
  """Returns the union of spans of time, disjoint and in order."""
  merged: list[tuple[float, float]] = []
  for begin_s, end_s in sorted(spans):
    if merged and begin_s <= merged[-1][1]:
      merged[-1] = merged[-1][0], max(merged[-1][1], end_s)
    else:
      merged.append((begin_s, end_s))
  return merged


class RunningUptime:
  """Uptime so far, in bounded memory, from times at which steps were reported.

  Reports that were held up come together, whenever their steps ended. As the
  steps of one learner do not overlap, each pushes those before it back.

  A step counts no further back than `slack_s` before the latest `at`. Call `at`
  now and then: it forgets the steps that are settled.

  Args:
    before: what an earlier process of the run `counts`; the time between, which
      none observed, does not count.
  """

  def __init__(
    self,
    start_s: float,
    slack_s: float = 60.0,
    before: tuple[float, float] = (0.0, 0.0),
  ):
    self._start_s = start_s
    self._slack_s = slack_s
    self._before = before
    self._settled_s = start_s  # Uptime is final before this time,
    self._up_s = 0.0  # and this much of it was up.
    self._open: dict[int, list[StepRecord]] = {}  # By learner.

  def add(self, step: StepRecord) -> None:
    """Counts one step; `end_s` is when it was reported, so the latest time at
    which it may have ended.
    """
    open_ = self._open.setdefault(step.learner, [])
    open_.append(step)
    for i in range(len(open_) - 1, 0, -1):
      later, earlier = open_[i], open_[i - 1]
      began_s = later.end_s - later.step_s
      if earlier.end_s <= began_s:
        break
      open_[i - 1] = dataclasses.replace(earlier, end_s=began_s)

  def at(self, now_s: float) -> float:
    """Returns the uptime from the start until `now_s`; 0 at the start."""
    observed_s, up_s = self.counts(now_s)
    return up_s / observed_s if observed_s else 0.0

  def counts(self, now_s: float) -> tuple[float, float]:
    """Returns the time observed until `now_s`, and how much of it was up."""
    now_s = max(now_s, self._settled_s)
    self._settle(now_s - self._slack_s)
    open_s = now_s - self._settled_s
    up_s = self._up_s
    if open_s > 0:
      up_s += open_s * uptime(self._all_open(), self._settled_s, now_s)
    return self._before[0] + now_s - self._start_s, self._before[1] + up_s

  def _settle(self, until_s: float) -> None:
    if until_s <= self._settled_s:
      return
    span_s = until_s - self._settled_s
    self._up_s += span_s * uptime(self._all_open(), self._settled_s, until_s)
    self._settled_s = until_s
    for learner, steps in self._open.items():
      self._open[learner] = [s for s in steps if s.end_s > until_s]

  def _all_open(self) -> Iterable[StepRecord]:
    return itertools.chain.from_iterable(self._open.values())


@dataclasses.dataclass(frozen=True)
class LearnerWork:
  """The work of one learner, over all its processes."""

  learner: int
  joined_s: float  # Time of its first hello.
  process: int  # Number of the newest process; unique.
  state: str = HERE  # State of that process: HERE, LEFT or LOST.
  done_s: float = 0.0  # Useful time of earlier processes.
  made_s: float = 0.0  # Time of its steps, without their stalls.
  kept_s: float = 0.0  # Part of made_s that its death would not lose.
  away_s: float = 0.0  # Time between leaving in good order and coming back.
  left_s: float | None = None  # When it left so; None: it is meant to be here.
  slices_share: float = 1.0  # Of its slices, those of the newest process.

  @property
  def useful_s(self) -> float:
    own_s = self.kept_s if self.state == LOST else self.made_s
    return self.done_s + self.slices_share * own_s

  def away_until(self, at_s: float) -> float:
    """Returns the time for which it had left in good order."""
    away_s = 0.0 if self.left_s is None else max(0.0, at_s - self.left_s)
    return self.away_s + away_s


def share(
  works: Iterable[LearnerWork], learners: int, begin_s: float, end_s: float
) -> float:
  """Returns goodput, useful over allocated time, in [0, 1].

  A learner's useful time cannot exceed its allocated time; differing clocks may
  say so, and the excess does not count.

  Args:
    works: of all learners that have ever joined, on one clock.
    end_s: end of the run, or now.
  """
  if end_s <= begin_s:
    return 0.0
  known = {work.learner: work for work in works}
  useful_s = allocated_s = 0.0
  for learner in known.keys() | set(range(learners)):
    work, own_s = known.get(learner), end_s - begin_s
    if learner >= learners:
      own_s -= max(begin_s, work.joined_s) - begin_s + work.away_until(end_s)
      own_s = max(0.0, own_s)
    allocated_s += own_s
    useful_s += min(own_s, work.useful_s) if work else 0.0
  return useful_s / allocated_s


class Work:
  """Counts the learners' work as events come; times on one clock.

  Attributes:
    begin_s: when the first learner was ready; None: not yet.
    end_s: end of the run; None: it goes on.
    learners: by id.
  """

  def __init__(self, planned: int):
    self.begin_s: float | None = None
    self.end_s: float | None = None
    self.learners: dict[int, LearnerWork] = {}
    self._planned = planned
    # By learner: (step, made_s) of its process, for steps that may be lost;
    self._marks: dict[int, collections.deque[tuple[int, float]]] = {}
    # those of the process before, as useful time beyond what it could not lose;
    self._left_marks: dict[int, list[tuple[int, float]]] = {}
    # and the last step that cannot be lost.
    self._kept_steps: dict[int, int] = {}

  def goodput(self, now_s: float) -> float:
    """Returns the goodput until the end, or now."""
    if self.begin_s is None:
      return 0.0
    end_s = now_s if self.end_s is None else self.end_s
    return share(self.learners.values(), self._planned, self.begin_s, end_s)

  def join(self, learner: int, process: int, at_s: float):
    """Notes the start of a session; a newer process replaces the older one."""
    was = self.learners.get(learner)
    if was is None:
      self.learners[learner] = LearnerWork(learner, at_s, process)
      return
    was = dataclasses.replace(was, away_s=was.away_until(at_s), left_s=None)
    if was.process == process:
      self.learners[learner] = dataclasses.replace(was, state=HERE)
    else:
      if was.state == HERE:
        was = dataclasses.replace(was, state=LOST)
      self.learners[learner] = LearnerWork(
        learner, was.joined_s, process, done_s=was.useful_s, away_s=was.away_s
      )
      self._left_marks[learner] = [
        (step, was.slices_share * (made_s - was.kept_s))
        for step, made_s in self._marks.pop(learner, ())
        if was.state == LOST
      ]
      self._kept_steps.pop(learner, None)

  def reform(self, learner: int, step: int, slices_share: float):
    """Notes that the newest process goes on with other slices.

    Args:
      step: own step of what they held; the process before has lost what it made
        after that alone.
      slices_share: those that take part, of all.
    """
    if learner not in self.learners:
      return
    marks = self._left_marks.pop(learner, [])
    held_s = max((s for at, s in marks if at <= step), default=0.0)
    done_s = self.learners[learner].done_s + held_s
    self._change(learner, done_s=done_s, slices_share=slices_share)

  def ready(self, at_s: float):
    """Notes a ready learner; allocation begins with the first."""
    if self.begin_s is None:
      self.begin_s = at_s

  def step(
    self,
    learner: int,
    process: int,
    step: int,
    made_s: float,
    saved_step: int = 0,
  ):
    """Notes a step of a process; ignored unless that is the newest one.

    Args:
      process: the process number given to `join`.
      step: own step of the process, as offers name it.
      made_s: time of all its steps so far, including unreported ones.
      saved_step: step of its newest complete checkpoint; 0: none.
    """
    work = self.learners.get(learner)
    if work is None or work.process != process:
      return
    made_s = max(made_s, work.made_s)
    self._change(learner, state=HERE, made_s=made_s)
    marks = self._marks.setdefault(learner, collections.deque(maxlen=MARKS_MAX))
    marks.append((step, made_s))
    self._keep(learner, min(step, saved_step))

  def merge(self, learner: int, process: int, step: int):
    """Notes that a round has merged what a process made up to `step`."""
    work = self.learners.get(learner)
    if work is not None and work.process == process:
      self._keep(learner, step)

  def leave(self, learner: int, in_order: bool, at_s: float | None = None):
    """Notes the end of a session, and of its process unless that returns.

    Args:
      at_s: when it left in good order; None: it is meant to be here still.
    """
    if learner in self.learners:
      left_s = at_s if in_order else None
      state = LEFT if in_order else LOST
      self._change(learner, state=state, left_s=left_s)

  def forget_sessions(self):
    """Forgets all sessions after a restart of the syncer; learners rejoin."""
    for learner, work in self.learners.items():
      if work.state == HERE:
        self._change(learner, state=LOST)

  def end(self, at_s: float):
    """Notes the end of the run; later deaths cost nothing."""
    self.end_s = at_s

  def _keep(self, learner: int, step: int):
    step = max(step, self._kept_steps.get(learner, 0))
    self._kept_steps[learner] = step
    marks = self._marks.get(learner, ())
    while marks and marks[0][0] <= step:
      self._change(learner, kept_s=marks.popleft()[1])

  def _change(self, learner: int, **fields):
    was = self.learners[learner]
    self.learners[learner] = dataclasses.replace(was, **fields)


def work_of_tape(newest_first: Iterable[Mapping], planned: int) -> Work | None:
  """Reads the last `Worked` line of an event log; None: nothing was counted
  yet.

  No earlier line is read.

  Raises:
    ValueError: that line has unexpected contents.
  """
  end_s = None
  for line in newest_first:
    if line.get('kind') == 'End':
      end_s = line[names.TIME]
    if line.get('kind') != 'Worked':
      continue
    work = Work(planned)
    work.begin_s = files.as_type(line.get('begin_s'), float, 'begin_s')
    work.end_s = end_s
    kind = tuple[LearnerWork, ...]
    counts = files.as_type(line.get('learners'), kind, 'learners')
    work.learners = {row.learner: row for row in counts}
    return work
  return None
