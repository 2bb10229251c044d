# SPDX-License-Identifier: Apache-2.0
"""A discrete-event clock: callbacks in order of time, then of insertion."""

import heapq
import itertools
from collections.abc import Callable


class Simulation:
  """A heap of (time, insertion number, callback); time in seconds."""

  def __init__(self):
    self.now = 0.0
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
