# SPDX-License-Identifier: Apache-2.0
"""Draws the lengths of a learner's inner steps: gap, jitter and drift."""

import math
import random

SHORTEST = 0.1  # Share of the mean at which a normal deviate is cut.


def mean_steps_s(
  learners: int, step_s: float, slow_learners: int, slow_gap: float
) -> tuple[float, ...]:
  """Returns the mean step length of each learner; slow ones come last.

  Args:
    step_s: step length of a learner that is not slow.
    slow_learners: number of slow ones; at most M count.
    slow_gap: a slow learner makes 1 − gap steps while another makes one.
  """
  fast = learners - min(slow_learners, learners)
  slow_s = step_s / (1 - slow_gap)
  return (step_s,) * fast + (slow_s,) * (learners - fast)


class Speeds:
  """Draws the lengths of one learner's steps, one after another.

  length = mean · e^walk · max(0.1, 1 + jitter · n), n normal; the walk begins
  at 0 and is normal with a variance of drift² per hour.

  Args:
    step_s: mean length of a step.
    jitter: standard deviation of a step's length, as a share of it.
    drift: standard deviation of the speed after an hour, as a share of it.
    rng: generator of this learner alone.
  """

  def __init__(
    self, step_s: float, jitter: float, drift: float, rng: random.Random
  ):
    self._step_s = step_s
    self._jitter = jitter
    self._drift = drift
    self._rng = rng
    self._walk = 0.0
    self._walked_s = 0.0

  def next_s(self, now_s: float) -> float:
    """Returns the length of the step at `now_s`; times must not fall."""
    length_s = self._step_s
    if self._drift:
      assert now_s >= self._walked_s, f'{now_s=} is before {self._walked_s=}'
      hours = (now_s - self._walked_s) / 3600
      self._walk += self._rng.gauss(0, self._drift * math.sqrt(hours))
      self._walked_s = now_s
      length_s *= math.exp(self._walk)
    if self._jitter:
      length_s *= max(SHORTEST, self._rng.gauss(1, self._jitter))
    return length_s
