# SPDX-License-Identifier: Apache-2.0
"""The pace clock: how far the run is, in inner steps of its K-th fastest."""

import bisect
from collections.abc import Mapping, Sequence


def after_steps(clock: int, steps: int, step: int, ahead_max: int) -> int:
  """Returns a clock after more inner steps, at most `ahead_max` beyond t.

  With K = M the slowest learner sets t. If the clock of a learner twice as fast
  went on without a bound, it would be ahead by as much as the run is long, and
  t would leap there when the slow learner leaves. What is trained beyond the
  bound is offered and merged all the same; it only does not count for the pace.
  """
  return max(clock, min(clock + steps, step + ahead_max))


def step_after(
  ranked: Sequence[int], quorum: int, step: int, rise_max: int | None
) -> int:
  """t = the K-th largest clock, K at most the number of clocks; never falls.

  Args:
    ranked: clocks of the live learners, ascending; at least one.
    step: t before.
    rise_max: the most that t may rise; None: no limit but what was trained.
  """
  kth = ranked[-min(quorum, len(ranked))]
  most = kth if rise_max is None else step + rise_max
  return max(step, min(kth, most))


class PaceClock:
  """One clock per live learner, and the global step t derived from them.

  Why offers are not counted instead: with K = 1 and M learners in jittered
  lock-step, "K offers close a round" would close M rounds per inner step.
  Clocks count steps, not wall time, so simulation and reality agree.

  When the set of live learners changes, another clock may be the K-th. Such a
  change raises t by at most one spacing, and clocks beyond that continue from
  there: the first round after it may be due at once, but no burst of rounds
  follows.

  Args:
    spacing_steps: s, inner steps between two rounds.
    ahead_max: how far a clock may be beyond t, in inner steps; at least s.
    step: t.
    clocks: clocks by learner id.
    first: t stays 0 until this many learners are live at once.
    moved: a set to which every learner is added whose clock changes.
  """

  def __init__(
    self,
    spacing_steps: int,
    ahead_max: int,
    step: int = 0,
    clocks: Mapping[int, int] | None = None,
    first: int = 1,
    moved: set[int] | None = None,
  ):
    assert ahead_max >= spacing_steps, f'{ahead_max=} {spacing_steps=}'
    self._spacing_steps = spacing_steps
    self._ahead_max = ahead_max
    self._step = step
    self._first = first
    self._clocks = dict(clocks or {})
    self._ranked = sorted(self._clocks.values())
    self._moved = set() if moved is None else moved

  @property
  def step(self) -> int:
    """The global step t, which never falls."""
    return self._step

  @property
  def clocks(self) -> dict[int, int]:
    """A copy of the clocks, by learner id, in ascending order."""
    return dict(sorted(self._clocks.items()))

  def __getitem__(self, learner: int) -> int:
    return self._clocks[learner]

  def join(self, learner: int, clock: int, quorum: int):
    """Adds a learner at t, so that it neither drives nor delays the others.

    It starts at `clock` if that is larger: it trained on while there was no
    syncer. Like any clock it is at most `ahead_max` beyond t.
    """
    ahead = min(clock, self._step + self._ahead_max)
    self._set(learner, max(ahead, self._step))
    self._on_change(quorum)

  def leave(self, learner: int, quorum: int) -> dict[int, int]:
    """Removes a learner's clock and returns it, by id, if there was one."""
    clock = self._clocks.get(learner)
    self._set(learner, None)
    self._on_change(quorum)
    return {} if clock is None else {learner: clock}

  def at_least(self, step: int):
    """Raises t to a step that the run is known to have reached."""
    self._step = max(self._step, step)

  def all_reach(self, step: int):
    """Raises all clocks and t to a step that every learner waits for."""
    if self._gathering():
      return
    self._raise_to(step)
    self.at_least(step)

  def advance(self, learner: int, steps: int, quorum: int):
    """Adds `steps` newly reported inner steps to the learner's clock."""
    assert steps >= 0, f'{learner=} went back by {-steps} steps'
    clock = self._clocks[learner]
    clock = after_steps(clock, steps, self._step, self._ahead_max)
    self._set(learner, clock)
    if not self._gathering():
      self._step = step_after(self._ranked, quorum, self._step, None)

  def close(self):
    """After a round closed, raises every clock to at least t minus one spacing.

    Otherwise a slow learner would stay behind for ever, and a leading learner's
    death would stop the run until the next one had caught up.
    """
    self._raise_to(self._step - self._spacing_steps)

  def _on_change(self, quorum: int):
    """Recomputes t after the set of live learners has changed."""
    if not self._clocks or self._gathering():
      return
    clocks = self._ranked
    kth = step_after(clocks, quorum, self._step, None)
    self._step = step_after(clocks, quorum, self._step, self._spacing_steps)
    if kth > self._step:  # Otherwise the next report would do it.
      for learner, clock in list(self._clocks.items()):
        self._set(learner, min(clock, self._step))

  def _raise_to(self, step: int):
    """Raises every clock to at least `step`."""
    if self._ranked and self._ranked[0] < step:
      for learner, clock in list(self._clocks.items()):
        self._set(learner, max(clock, step))

  def _set(self, learner: int, clock: int | None):
    """Sets a clock, or removes it, and keeps the ranking sorted."""
    before = self._clocks.get(learner)
    if clock == before:
      return
    self._moved.add(learner)
    if before is not None:
      del self._ranked[bisect.bisect_left(self._ranked, before)]
    if clock is None:
      del self._clocks[learner]
    else:
      self._clocks[learner] = clock
      bisect.insort(self._ranked, clock)

  def _gathering(self) -> bool:
    return self._step == 0 and len(self._clocks) < self._first
