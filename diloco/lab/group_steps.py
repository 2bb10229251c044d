# SPDX-License-Identifier: Apache-2.0
"""Schedules data-parallel's steps and their members while learners die.

All learners are one group: a step ends with the slowest of its members. A death
undoes the step in progress. Then

* a group that waits stands until the dead learner is back, plus one pause;
* an elastic group pauses, continues with the remaining learners, and pauses
  once more at the end of a step when a learner is back.

A learner that dies while the group stands is replaced meanwhile and costs
nothing, as in the simulator (`diloco.sim.stops`).
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
    begin_s: start of the step.
    end_s: end of the slowest member.
    lengths_s: duration of each member.
  """

  members: tuple[int, ...]
  begin_s: float
  end_s: float
  lengths_s: tuple[float, ...]


class GroupSteps:
  """Makes the steps, one after another.

  Attributes:
    now_s: end of the last step.
    deaths: those that cost something: (learner, death, return).

  Args:
    lives: draws deaths and step lengths.
    learners: number of learners.
    pause_s: duration of one reconfiguration.
    elastic: True if the group goes on with fewer.
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
    self._away: dict[int, float] = {}  # By learner, the time of its return.
    # (time, order of the draw, learner): deaths. Later ones are drawn at the
    # time of the return, which is the order in which `Lives` wants them.
    self._coming: list[tuple[float, int, int, float | None]] = []
    self._order = itertools.count()
    if lives.mortal:
      for learner in range(learners):
        self._draw(learner, 0.0)

  def step(self) -> GroupStep:
    """Returns the next finished step."""
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
    """Kills a learner between two steps; it is away as long as any."""
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
    """Stands until a time and for one pause; then all present learners take
    part.
    """
    self.now_s = max(self.now_s, until_s) + self._pause_s
    self._next_death(self.now_s, ())
    self._away = {m: x for m, x in self._away.items() if x > self.now_s}

  def _next_death(
    self, until_s: float, members
  ) -> tuple[int, float, float] | None:
    """Returns the next death of a member; those of others are skipped."""
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
