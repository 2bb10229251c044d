# SPDX-License-Identifier: Apache-2.0
"""Draws the lengths of a learner's inner steps: gap and jitter."""

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

  length = mean · max(0.1, 1 + jitter · n), n normal.

  Args:
    step_s: mean length of a step.
    jitter: standard deviation of a step's length, as a share of it.
    rng: generator of this learner alone.
  """

  def __init__(self, step_s: float, jitter: float, rng: random.Random):
    self._step_s = step_s
    self._jitter = jitter
    self._rng = rng

  def next_s(self, now_s: float) -> float:
    """Returns the length of the next step."""
    del now_s  # Other laws may depend on it.
    if not self._jitter:
      return self._step_s
    return self._step_s * max(SHORTEST, self._rng.gauss(1, self._jitter))
