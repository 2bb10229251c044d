# SPDX-License-Identifier: Apache-2.0
"""When data-parallel makes its steps, and with whom, while learners die.

All learners are one group: a step ends with the slowest of those that take
part. A death undoes the step under way. Then

* whoever waits stands until the dead one is back, plus one pause;
* an elastic group pauses, goes on with those that are left, and pauses once
  more at the end of a step when somebody is back.

What dies while the group stands is replaced meanwhile and costs nothing, as in
the simulator (`diloco.sim.stops`).
"""

import dataclasses
import heapq
import itertools

from diloco.lab.lives import Lives


@dataclasses.dataclass(frozen=True)
class GroupStep:
  """One step that was finished; times in simulated seconds.

  Attributes:
    members: learners whose batches it takes, ascending.
    begin_s: of the step.
    end_s: of the slowest member.
    lengths_s: of each member.
  """

  members: tuple[int, ...]
  begin_s: float
  end_s: float
  lengths_s: tuple[float, ...]


class GroupSteps:
  """Makes them, one after another.

  Attributes:
    now_s: end of the last step.
    deaths: those that cost something: learner, dies, is back.

  Args:
    lives: of the run.
    learners: how many there are.
    pause_s: of one reconfiguration.
    elastic: whether the group goes on with fewer.
  """

  def __init__(
    self, lives: Lives, learners: int, pause_s: float, elastic: bool
  ):
    self.now_s = 0.0
    self.deaths: list[tuple[int, float, float]] = []
    self._lives = lives
    self._learners = learners
    self._pause_s = pause_s
    self._elastic = elastic
    self._away: dict[int, float] = {}  # When it is back, by learner.
    # (time, order of the draw, learner): deaths; what follows is drawn when
    # the dead would be back, which is the order in which `Lives` wants it.
    self._coming: list[tuple[float, int, int, float | None]] = []
    self._order = itertools.count()
    if lives.mortal:
      for learner in range(learners):
        self._draw(learner, 0.0)

  def step(self) -> GroupStep:
    """The next step that is finished."""
    self._take_back()
    while True:
      members = [m for m in range(self._learners) if m not in self._away]
      if not members:
        self._stand(min(self._away.values()))
        continue
      begin_s = self.now_s
      lengths_s = tuple(self._lives.speeds[m].next_s(begin_s) for m in members)
      end_s = begin_s + max(lengths_s)
      died = self._next_death(end_s, members)
      if died is None:
        self.now_s = end_s
        return GroupStep(tuple(members), begin_s, end_s, lengths_s)
      self._die(*died)

  def kill(self, learner: int):
    """It dies between two steps, and is away as long as any."""
    if learner not in self._away:
      self._die(learner, self.now_s, self.now_s + self._lives.away_s)

  def _die(self, learner: int, dies_s: float, back_s: float):
    self.now_s = dies_s
    self.deaths.append((learner, dies_s, back_s))
    if self._elastic:
      self._away[learner] = back_s
      self._stand(dies_s)
    else:
      self._stand(back_s)

  def _take_back(self):
    if any(back_s <= self.now_s for back_s in self._away.values()):
      self._stand(self.now_s)

  def _stand(self, until_s: float):
    """Until a time and for one pause; all who are back then take part."""
    self.now_s = max(self.now_s, until_s) + self._pause_s
    self._next_death(self.now_s, ())
    self._away = {m: x for m, x in self._away.items() if x > self.now_s}

  def _next_death(
    self, until_s: float, members
  ) -> tuple[int, float, float] | None:
    """The first one of a member; those of others pass."""
    while self._coming and self._coming[0][0] < until_s:
      at_s, _, learner, back_s = heapq.heappop(self._coming)
      if back_s is None:
        self._draw(learner, at_s)
        continue
      heapq.heappush(self._coming, (back_s, next(self._order), learner, None))
      if learner in members:
        return learner, at_s, back_s
    return None

  def _draw(self, learner: int, from_s: float):
    dies_s, back_s = self._lives.death(from_s)
    heapq.heappush(self._coming, (dies_s, next(self._order), learner, back_s))
