# SPDX-License-Identifier: Apache-2.0
"""The pace clock: how far the run is, in inner steps of its K-th fastest."""

from collections.abc import Mapping


class PaceClock:
  """A clock per live learner, and the global step t read off them.

  Why not count offers: with K = 1 and M learners in jittered lock-step, "K
  offers close a round" would close M rounds per inner step. Clocks count
  steps, not wall time, so simulation and reality agree (design: §3).

  Args:
    step: t.
    clocks: by learner id.
    first: t stays 0 until so many learners are there at once.
  """

  def __init__(
    self,
    step: int = 0,
    clocks: Mapping[int, int] | None = None,
    first: int = 1,
  ):
    self._step = step
    self._first = first
    self._clocks = dict(clocks or {})

  @property
  def step(self) -> int:
    """t, the global step. Never falls."""
    return self._step

  @property
  def clocks(self) -> dict[int, int]:
    """A copy of the clocks, by learner id, in ascending order."""
    return dict(sorted(self._clocks.items()))

  def __getitem__(self, learner: int) -> int:
    return self._clocks[learner]

  def join(self, learner: int, clock: int, quorum: int):
    """A learner starts at t: it neither drives nor delays the others.

    At `clock`, if that is more: it trained on while there was no syncer.
    """
    self._clocks[learner] = max(clock, self._step)
    self._raise_step(quorum)

  def leave(self, learner: int, quorum: int) -> dict[int, int]:
    """It does not count any more; its clock, if it had one."""
    left = {m: c for m, c in self._clocks.items() if m == learner}
    self._clocks.pop(learner, None)
    self._raise_step(quorum)
    return left

  def at_least(self, step: int):
    """The run is known to have come this far."""
    self._step = max(self._step, step)

  def all_reach(self, step: int):
    """Everybody waits for this step: it has come."""
    if self._gathering():
      return
    for learner, clock in self._clocks.items():
      self._clocks[learner] = max(clock, step)
    self.at_least(step)

  def advance(self, learner: int, steps: int, quorum: int):
    """`learner` reported `steps` more inner steps."""
    assert steps >= 0, f'{learner=} went back by {-steps} steps'
    self._clocks[learner] += steps
    self._raise_step(quorum)

  def close(self, spacing_steps: int):
    """A round closed: nobody is further behind than one spacing.

    A slow learner would else stay behind for ever, and a leader's death would
    stop the run until the next one had caught up with all its lead.
    """
    floor = self._step - spacing_steps
    for learner, clock in self._clocks.items():
      self._clocks[learner] = max(clock, floor)

  def _raise_step(self, quorum: int):
    """t = the K-th largest clock, K at most the number of clocks."""
    if not self._clocks or self._gathering():
      return
    ranked = sorted(self._clocks.values(), reverse=True)
    kth = ranked[min(quorum, len(ranked)) - 1]
    self._step = max(self._step, kth)

  def _gathering(self) -> bool:
    return self._step == 0 and len(self._clocks) < self._first
