# SPDX-License-Identifier: Apache-2.0
"""Goodput and uptime of a run.

Goodput is useful over allocated learner time, from the first learner's
readiness to the end of the run.

* Allocated is the time of every learner that the run is meant to have: of the
  configuration's M for the whole time, dead, restarting or alive, and whether
  the syncer is there or not; of one that joins beyond M from its first hello.
* Useful is the time of finished steps, without their stalls, but for those
  that a death took: what a process made after the last of its boundaries of
  which a round merged something, or which is in a whole checkpoint. A process
  that leaves in good order loses nothing.

`Work` counts it; the syncer's tape has what it counted at each `Worked` line,
and `work_of_tape` reads that back.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from diloco.metrics import files, names

# What became of a learner's newest process.
HERE = 'here'
LEFT = 'left'  # In good order.
LOST = 'lost'  # Or its session is; it may be back with another.
MARKS_MAX = 1024  # Steps since the last boundary that is kept, per learner.


@dataclasses.dataclass(frozen=True)
class StepRecord:
  """One finished inner step of one learner."""

  learner: int
  end_s: float  # When it ended, on one clock for all learners.
  step_s: float
  stall_s: float  # Of step_s, waiting for the exchange.

  def productive_s(self, start_s: float, end_s: float) -> float:
    """Its share of [start_s, end_s], without the same share of its stall."""
    inside_s = min(self.end_s, end_s) - max(self.end_s - self.step_s, start_s)
    if self.step_s <= 0 or inside_s <= 0:
      return 0.0
    return inside_s * max(0.0, 1 - self.stall_s / self.step_s)


def stepping(
  steps: Iterable[StepRecord], learners: int, start_s: float, end_s: float
) -> float:
  """Share of the time of M learners that went into steps, lost ones included.

  Σ (step_s − stall_s) / (M · time); of a step across an end of
  [start_s, end_s] the share inside counts. It shows how a window of a run
  went; of a whole run it is its goodput where no process died.

  Args:
    steps: in any order.
    learners: M, dead or alive.
    start_s: where the window begins.
    end_s: where it ends; later than start_s.
  """
  assert end_s > start_s, f'an empty run: {start_s=} {end_s=}'
  productive_s = sum(step.productive_s(start_s, end_s) for step in steps)
  return productive_s / (learners * (end_s - start_s))


def uptime(steps: Iterable[StepRecord], start_s: float, end_s: float) -> float:
  """Share of [start_s, end_s] in which at least one learner was stepping.

  The measure of the union of all [end_s − step_s, end_s] of the steps.
  """
  assert end_s > start_s, f'an empty run: {start_s=} {end_s=}'
  spans = sorted((s.end_s - s.step_s, s.end_s) for s in steps)
  up_s, covered_s = 0.0, start_s
  for begin_s, finish_s in spans:
    begin_s, finish_s = max(begin_s, covered_s), min(finish_s, end_s)
    if finish_s > begin_s:
      up_s += finish_s - begin_s
      covered_s = finish_s
  return up_s / (end_s - start_s)


class RunningUptime:
  """Uptime so far, in memory that does not grow with time.

  A step counts no further back than `slack_s` before the latest `at`. Call
  `at` now and then: it forgets the steps that are settled.
  """

  def __init__(self, start_s: float, slack_s: float = 60.0):
    self._start_s = start_s
    self._slack_s = slack_s
    self._settled_s = start_s  # Uptime is final before this time,
    self._up_s = 0.0  # and this much of it was up.
    self._open: list[StepRecord] = []

  def add(self, step: StepRecord) -> None:
    """Counts one step."""
    self._open.append(step)

  def at(self, now_s: float) -> float:
    """From the start until `now_s`; 0 at the start."""
    if now_s <= self._start_s:
      return 0.0
    now_s = max(now_s, self._settled_s)
    self._settle(now_s - self._slack_s)
    open_s = now_s - self._settled_s
    up_s = self._up_s
    if open_s > 0:
      up_s += open_s * uptime(self._open, self._settled_s, now_s)
    return up_s / (now_s - self._start_s)

  def _settle(self, until_s: float) -> None:
    if until_s <= self._settled_s:
      return
    span_s = until_s - self._settled_s
    self._up_s += span_s * uptime(self._open, self._settled_s, until_s)
    self._settled_s = until_s
    self._open = [step for step in self._open if step.end_s > until_s]


@dataclasses.dataclass(frozen=True)
class LearnerWork:
  """What one learner has made, over all its processes.

  Attributes:
    joined_s: when it first said hello.
    process: the newest; a number of its own for each.
    state: of that process: HERE, LEFT or LOST.
    done_s: useful time of the processes before it.
    made_s: time of its steps, without their stalls.
    kept_s: of made_s, what its death would not take.
  """

  learner: int
  joined_s: float
  process: int
  state: str = HERE
  done_s: float = 0.0
  made_s: float = 0.0
  kept_s: float = 0.0

  @property
  def useful_s(self) -> float:
    return self.done_s + (self.kept_s if self.state == LOST else self.made_s)


def share(
  works: Iterable[LearnerWork], learners: int, begin_s: float, end_s: float
) -> float:
  """Goodput: useful over allocated time, in [0, 1].

  Useful time of a learner beyond what was allocated to it can't be; clocks of
  two machines say so now and then, and it does not count.

  Args:
    works: of all learners that have ever joined, on one clock.
    learners: M.
    begin_s: when the first learner was ready.
    end_s: of the run, or now.
  """
  if end_s <= begin_s:
    return 0.0
  found = {work.learner: work for work in works}
  useful_s = allocated_s = 0.0
  for learner in found.keys() | set(range(learners)):
    work, own_s = found.get(learner), end_s - begin_s
    if learner >= learners:
      own_s = max(0.0, end_s - max(begin_s, work.joined_s))
    allocated_s += own_s
    useful_s += min(own_s, work.useful_s) if work else 0.0
  return useful_s / allocated_s


class Work:
  """Counts the learners' work as events come; times on one clock.

  Attributes:
    begin_s: when the first learner was ready; None: not yet.
    end_s: of the run; None: it goes on.
    learners: by id.

  Args:
    planned: M.
  """

  def __init__(self, planned: int):
    self.begin_s: float | None = None
    self.end_s: float | None = None
    self.learners: dict[int, LearnerWork] = {}
    self._planned = planned
    # By learner: (step, made_s) of its process, of steps that may be lost;
    self._marks: dict[int, collections.deque[tuple[int, float]]] = {}
    self._kept_steps: dict[int, int] = {}  # and the last that will not be.

  def goodput(self, now_s: float) -> float:
    """Until the end, or now."""
    if self.begin_s is None:
      return 0.0
    end_s = now_s if self.end_s is None else self.end_s
    return share(self.learners.values(), self._planned, self.begin_s, end_s)

  def join(self, learner: int, process: int, at_s: float):
    """A session begins; a process that is another's successor replaces it."""
    was = self.learners.get(learner)
    if was is None:
      self.learners[learner] = LearnerWork(learner, at_s, process)
    elif was.process == process:
      self._change(learner, state=HERE)
    else:
      if was.state == HERE:
        was = dataclasses.replace(was, state=LOST)
      self.learners[learner] = LearnerWork(
        learner, was.joined_s, process, done_s=was.useful_s
      )
      self._marks.pop(learner, None)
      self._kept_steps.pop(learner, None)

  def ready(self, at_s: float):
    """Some learner is; allocation begins with the first."""
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
    """A process has made `step`; not counted unless it is the newest one.

    Args:
      learner: whose.
      process: as it has joined.
      step: of the process, as offers name it.
      made_s: of all its steps so far, also of those that nobody heard of.
      saved_step: of its newest whole checkpoint; 0: none.
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
    """A round has merged what a process had made up to `step`."""
    work = self.learners.get(learner)
    if work is not None and work.process == process:
      self._keep(learner, step)

  def leave(self, learner: int, in_order: bool):
    """A session is over, and so is its process unless it comes back."""
    if learner in self.learners:
      self._change(learner, state=LEFT if in_order else LOST)

  def forget_sessions(self):
    """The syncer began anew: who is here is known once it says so."""
    for learner, work in self.learners.items():
      if work.state == HERE:
        self._change(learner, state=LOST)

  def end(self, at_s: float):
    """The run is over; what becomes of processes from now on costs nothing."""
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
  """What the tape has of the run so far; None: nothing was counted yet.

  No more is read of it than the lines after the last that counts.

  Args:
    newest_first: lines of the syncer's tape.
    planned: M.

  Raises:
    ValueError: the line that counts says something else than it must.
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
    found = files.as_type(line.get('learners'), kind, 'learners')
    work.learners = {each.learner: each for each in found}
    return work
  return None
