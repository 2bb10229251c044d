# SPDX-License-Identifier: Apache-2.0
"""The inner steps of a simulated learner, which can be suspended."""

from collections.abc import Callable

from diloco.simulator.engine import Simulation


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
