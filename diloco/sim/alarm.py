# SPDX-License-Identifier: Apache-2.0
"""Wakes a simulated process at its machine's deadline."""

from collections.abc import Callable

from diloco.sim.engine import Simulation


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
