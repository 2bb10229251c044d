# SPDX-License-Identifier: Apache-2.0
"""The slices of a learner that take part, and when one comes back.

No process and no clock here: `supervisor`, or across machines `rendezvous`,
tells what has ended, and asks.
"""

import dataclasses
from collections.abc import Collection, Mapping

FLAPS_S = 300.0  # One that is lost so soon after its return flaps:
DELAY_MAX_S = 600.0  # it is kept out for twice as long, at most for this.


@dataclasses.dataclass
class Away:
  """A slice that does not take part."""

  returns_at_s: float
  delay_s: float


class LiveSlices:
  """The slices of one learner.

  Args:
    count: N.
    delay_s: how long one is away at first.

  Attributes:
    live: those of the next world, ascending.
    away: the others.
  """

  def __init__(self, count: int, delay_s: float):
    self.count = count
    self.live = list(range(count))
    self.away: dict[int, Away] = {}
    self._delay_s = delay_s
    self._asked: set[int] = set()  # To take part in the next world.
    self._kept_away = False
    self._last: dict[int, Away] = {}  # Of those that are back: when, how long.

  def ended(self, kept: Mapping[int, bool], now_s: float) -> list[int]:
    """Notes the end of a world; returns the slices that it has lost.

    Args:
      kept: slice of that world -> whether its boundary is in memory.
    """
    lost = [i for i, is_kept in kept.items() if not is_kept]
    if len(lost) == len(kept):  # As after any death: all start again.
      self.live, self.away = list(range(self.count)), {}
      self._asked.clear()
      return lost
    for i in lost:
      delay_s, last = self._delay_s, self._last.pop(i, None)
      if last and now_s - last.returns_at_s < FLAPS_S:
        delay_s = min(2 * last.delay_s, DELAY_MAX_S)
      self.away[i] = Away(now_s + delay_s, delay_s)
    for i in self._asked:
      away = self.away.pop(i)
      self._last[i] = Away(now_s, away.delay_s)
    self._asked.clear()
    self.live = [i for i in range(self.count) if i not in self.away]
    return lost

  def re_forms(
    self, kept: Mapping[int, bool], asked: bool, now_s: float
  ) -> bool:
    """Notes the end of a world; returns whether a part of it goes on from
    memory.

    Args:
      kept: see `ended`.
      asked: whether the world was asked to end.
    """
    lost = self.ended(kept, now_s)
    return len(lost) < len(kept) and bool(lost or asked)

  def keep_away(self) -> None:
    """Lets none come back until `take_back`."""
    self._kept_away = True

  def take_back(self) -> None:
    """Makes all that are away due."""
    self._kept_away = False
    for away in self.away.values():
      away.returns_at_s = float('-inf')

  def due(
    self, now_s: float, here: Collection[int] | None = None
  ) -> Collection[int]:
    """Returns slices that are to come back; each is returned once.

    Args:
      here: slices whose machines are there; None: all.
    """
    found = {
      i
      for i, away in self.away.items()
      if not self._kept_away
      and away.returns_at_s <= now_s
      and i not in self._asked
      and (here is None or i in here)
    }
    self._asked |= found
    return sorted(found)
