# SPDX-License-Identifier: Apache-2.0
"""Computes when a group of slices stands still, from its interruptions.

The functions are pure, and the same for every system.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterable, Sequence

from diloco.sim.failures import Interruption


@dataclasses.dataclass(frozen=True)
class Stop:
  """A learner stands still in [begin_s, end_s).

  Attributes:
    begin_s: from here on nothing is computed.
    end_s: it goes on; may lie after the end of the run.
    reason: 'down' and 'up', a reconfiguration with fewer or more slices;
      'repair', waiting for a slice and the reconfiguration with it.
  """

  begin_s: float
  end_s: float
  reason: str


def elastic(
  interruptions: Iterable[Interruption], pause_s: float, until_s: float
) -> tuple[Stop, ...]:
  """Returns the stops of a learner that goes on with fewer slices (Fig. 1).

  An interruption while it runs is a pause; the slice's return is another one if
  the learner runs then. A slice that breaks or returns during a pause is
  handled by the reconfiguration in progress and costs nothing, neither then
  nor, if it broke, on its return. Hence 1 − g = t·λ·g·(1 + g) (`closed_forms`).

  Args:
    interruptions: of this learner, in order of time.
    pause_s: t, the duration of one reconfiguration.
    until_s: no stop begins at or after this.

  Returns:
    Disjoint stops in order of time.
  """
  stops: list[Stop] = []
  returns: list[float] = []
  runs_from_s = 0.0

  def pause(at_s: float, reason: str) -> bool:
    nonlocal runs_from_s
    if at_s < runs_from_s or at_s >= until_s:
      return False
    runs_from_s = at_s + pause_s
    stops.append(Stop(at_s, runs_from_s, reason))
    return True

  def bring_back(before_s: float):
    while returns and returns[0] <= before_s:
      pause(heapq.heappop(returns), 'up')

  for interruption in interruptions:
    bring_back(interruption.at_s)
    if pause(interruption.at_s, 'down'):
      heapq.heappush(returns, interruption.at_s + interruption.repair_s)
  bring_back(math.inf)
  return tuple(stops)


def waiting(
  interruptions: Iterable[Interruption], pause_s: float, until_s: float
) -> tuple[Stop, ...]:
  """Returns the stops of a learner that waits for the broken slice.

  It stands for the repair and one reconfiguration, R = repair_s + pause_s; what
  breaks meanwhile is repaired meanwhile. Hence g = 1/(1 + λR) (`closed_forms`).

  Args:
    interruptions: of this learner, in order of time.
    pause_s: duration of the reconfiguration once the slice is back.
    until_s: no stop begins at or after this.

  Returns:
    Disjoint stops in order of time.
  """
  stops: list[Stop] = []
  runs_from_s = 0.0
  for interruption in interruptions:
    if runs_from_s <= interruption.at_s < until_s:
      runs_from_s = interruption.at_s + interruption.repair_s + pause_s
      stops.append(Stop(interruption.at_s, runs_from_s, 'repair'))
  return tuple(stops)


def capacities(
  interruptions: Iterable[Interruption],
  stops: Sequence[Stop],
  slice_share: float,
) -> tuple[tuple[float, float], ...]:
  """Returns an elastic learner's capacity while slices are away.

  A slice that broke during a pause has been replaced, and does not count.

  Args:
    interruptions: of this learner, in order of time.
    stops: the result of `elastic` for these.
    slice_share: share of one slice in the learner, in (0, 1].

  Returns:
    (time, share of its slices that are there from then on), in order of time;
    all are there at the start.
  """
  downs = {stop.begin_s for stop in stops if stop.reason == 'down'}
  changes = sorted(
    change
    for interruption in interruptions
    if interruption.at_s in downs
    for change in (
      (interruption.at_s, 1),
      (interruption.at_s + interruption.repair_s, -1),
    )
  )
  away, shares = 0, []
  for at_s, change in changes:
    away += change
    shares.append((at_s, max(0.0, 1 - away * slice_share)))
  return tuple(shares)


def stops_from(stops: Iterable[Stop], from_s: float) -> tuple[Stop, ...]:
  """Returns the stops on a clock that starts at `from_s`."""
  return tuple(
    Stop(max(0.0, s.begin_s - from_s), s.end_s - from_s, s.reason)
    for s in stops
    if s.end_s > from_s
  )


def capacities_from(
  shares: Sequence[tuple[float, float]], from_s: float
) -> tuple[tuple[float, float], ...]:
  """Returns the capacities on a clock that starts at `from_s`."""
  before = [share for at_s, share in shares if at_s <= from_s][-1:]
  later = [(at_s - from_s, share) for at_s, share in shares if at_s > from_s]
  return (*((0.0, share) for share in before), *later)
