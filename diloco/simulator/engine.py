# SPDX-License-Identifier: Apache-2.0
"""The simulated clock, alarms, inner steps, and what an observer is told."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Simulation:
  """A heap of (time, insertion number, callback); time in seconds."""

  def __init__(self, now_s: float = 0.0):
    self.now = now_s
    self._heap: list[tuple[float, int, Callable[[], None]]] = []
    self._order = itertools.count()

  def at(self, when: float, callback: Callable[[], None]):
    """Schedules `callback` at `when`; equal times run in order of `at`."""
    assert when >= self.now, f'{when=} is before {self.now=}'
    heapq.heappush(self._heap, (when, next(self._order), callback))

  def after(self, delay_s: float, callback: Callable[[], None]):
    """Schedules `callback` in `delay_s` seconds."""
    self.at(self.now + delay_s, callback)

  def run(self, until: float, stop: Callable[[], bool] = lambda: False):
    """Runs what is scheduled up to `until`, or until `stop` returns True."""
    while self._heap and self._heap[0][0] <= until:
      if stop():
        return
      self.now, _, callback = heapq.heappop(self._heap)
      callback()
    self.now = max(self.now, until)


class Alarm:
  """One wake-up at a time; a stale one does nothing.

  Args:
    sim: the clock.
    deadline: returns the machine's deadline; None: none, or its process is
      gone.
    ring: called when the deadline has come.
    when_it_runs: calls back now, or once a stopped process resumes.
  """

  def __init__(
    self,
    sim: Simulation,
    deadline: Callable[[], float | None],
    ring: Callable[[], None],
    when_it_runs: Callable[[Callable[[], None]], None] = lambda call: call(),
  ):
    self._sim = sim
    self._deadline = deadline
    self._ring = ring
    self._when_it_runs = when_it_runs
    self._at_s: float | None = None

  def set(self):
    """Reschedules after an event, which may have moved the deadline forward."""
    deadline = self._deadline()
    if deadline is None:
      return
    if self._at_s is None or deadline < self._at_s:
      self._at_s = max(deadline, self._sim.now)
      self._sim.at(self._at_s, lambda: self._when_it_runs(self._come))

  def _come(self):
    if self._at_s is None or self._at_s > self._sim.now:
      return  # An earlier one has come and set another.
    self._at_s = None
    deadline = self._deadline()
    if deadline is not None and deadline <= self._sim.now:
      self._ring()
    else:
      self.set()


class InnerSteps:
  """Makes inner steps, at most one at a time; each can be suspended.

  Args:
    sim: the clock.
    when_it_runs: calls back now, or once a stopped process resumes.
    done: takes the length of a finished step, and the spans of time in which it
      was made: one, unless it was suspended.
  """

  def __init__(
    self,
    sim: Simulation,
    when_it_runs: Callable[[Callable[[], None]], None],
    done: Callable[[float, list[tuple[float, float]]], None],
  ):
    self.running = False  # Suspended or not.
    self._sim = sim
    self._when_it_runs = when_it_runs
    self._done = done
    self._suspended = False
    self._step_s = 0.0
    self._left_s = 0.0  # At `_began_s`.
    self._began_s = 0.0
    self._spans: list[tuple[float, float]] = []
    self._attempt = 0  # Voids the scheduled end of an earlier attempt.

  def start(self, step_s: float):
    """Starts the next step, once it is not suspended."""
    assert not self.running, 'two steps at once'
    self.running = True
    self._step_s = self._left_s = step_s
    self._spans = []
    if not self._suspended:
      self._make()

  def suspend(self):
    assert not self._suspended, 'suspended twice'
    self._suspended = True
    if self.running:
      now = self._sim.now
      self._attempt += 1
      self._spans.append((self._began_s, now))
      self._left_s -= now - self._began_s

  def resume(self):
    """Finishes the suspended step."""
    assert self._suspended, 'not suspended'
    self._suspended = False
    if self.running:
      self._make()

  def _make(self):
    self._began_s = self._sim.now
    attempt = self._attempt

    def end():
      if attempt == self._attempt:
        self.running = False
        self._spans.append((self._began_s, self._sim.now))
        self._done(self._step_s, self._spans)

    self._sim.after(max(self._left_s, 0.0), lambda: self._when_it_runs(end))


class Observer:
  """An observer of every event of every machine, which ignores them all.

  Arguments are those of the cluster's processes, `SimulatedSyncer` and
  `SimulatedLearner`; the methods are called before effects are performed.
  """

  def syncer_started(self, syncer):
    """Called when a new process of the syncer is up."""

  def theta(self, fragment: int, version: int, crc: int):
    """Called when the bytes of Θ_p at the syncer, or their version, change."""

  def at_syncer(self, syncer, event, effects):
    """Called when the syncer's machine has handled an event."""

  def merging(self, merge, taken: dict[int, Any]):
    """Called when the syncer merges these contents, by learner."""

  def at_learner(self, process, event, effects):
    """Called when a learner's machine has handled an event."""

  def message_lost(self, learner: int, incarnation: int):
    """Called when a cut swallows what a learner's session has sent."""

  def stepped(self, process, spans: list[tuple[float, float]], tokens: int):
    """Called when a learner has finished an inner step, with its times."""
