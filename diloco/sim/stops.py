# SPDX-License-Identifier: Apache-2.0
"""When a group of slices stands still, given what of it breaks and is repaired.

Pure functions from interruptions to stops, the same for every system.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterable

from diloco.sim.failures import Interruption


@dataclasses.dataclass(frozen=True)
class Stop:
  """A learner stands still in [begin_s, end_s).

  Attributes:
    begin_s: from here on nothing is computed.
    end_s: it goes on; may lie behind the end of the run.
    reason: 'down' and 'up', a reconfiguration with fewer or more slices;
      'repair', waiting for a slice and the reconfiguration with it.
  """

  begin_s: float
  end_s: float
  reason: str


def elastic(
  interruptions: Iterable[Interruption], pause_s: float, until_s: float
) -> tuple[Stop, ...]:
  """Stops of a learner that goes on with fewer slices (paper §5.1).

  An interruption while it runs is a pause, the slice's return another one if
  the learner runs then. What breaks or comes back during a pause is taken into
  account by the reconfiguration under way and costs nothing: neither then nor,
  of what broke, when it is back. Hence 1 − g = t·λ·g·(1 + g) (§5.3).

  Args:
    interruptions: of this learner, in order of time.
    pause_s: t, of one reconfiguration.
    until_s: none begins at or after this.

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
  """Stops of a learner without elasticity: it waits for the broken slice.

  It stands for the repair and one reconfiguration, R = repair_s + pause_s;
  what breaks meanwhile is repaired meanwhile. Hence g = 1/(1 + λR) (§5.3).

  Args:
    interruptions: of this learner, in order of time.
    pause_s: of the reconfiguration once the slice is back.
    until_s: none begins at or after this.

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
