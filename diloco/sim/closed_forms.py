# SPDX-License-Identifier: Apache-2.0
"""What theory says of goodput, uptime and times; simulations stand beside it.

λ is the rate of interruptions of one learner: N / (M · MTBI).
"""

import math
from collections.abc import Sequence

NORMAL_RANGE = 8.0  # Standard deviations, beyond which nothing is integrated.
NODES = 4000


def elastic_goodput(rate_per_s: float, pause_s: float) -> float:
  """g of an elastic learner: 1 − g = t·λ·g·(1 + g) (paper §5.3).

  An interruption costs a pause t if the learner runs, with probability g, and
  the slice's return another one if it runs then, g again. Exact where the
  repair takes so long against t that the two are independent.

  Args:
    rate_per_s: λ.
    pause_s: t.
  """
  x = pause_s * rate_per_s
  return 2 / (1 + x + math.sqrt((1 + x) ** 2 + 4 * x))


def waiting_goodput(rate_per_s: float, stands_s: float) -> float:
  """g = 1 / (1 + λR) of a learner without elasticity (paper §5.3).

  Exact: it runs 1/λ on average, and then stands for R.

  Args:
    rate_per_s: λ.
    stands_s: R, mean of a repair and the reconfiguration after it.
  """
  return 1 / (1 + rate_per_s * stands_s)


def uptime(goodput: float, learners: int) -> float:
  """1 − (1 − g)^M: not all of M independent learners stand (paper §5.3)."""
  return 1 - (1 - goodput) ** learners


def lockstep_least(goodput: float, learners: int) -> float:
  """g^M: the least goodput of M groups in lock-step; the most is g.

  Their stops are independent of who waits for whom. If nobody may be ahead,
  they step only while none of them stands. How much steps between exchanges
  and overlap win back has no closed form that is sound: a stop costs the
  program nothing where its group was ahead.

  Args:
    goodput: g of a group that waits for nobody.
    learners: M.
  """
  return goodput**learners


def same_goodput_chips(chips: float, learners: int) -> float:
  """N / M: a single learner of so many chips has the goodput of M of N chips.

  Both have the same λ (paper §5.1).
  """
  return chips / learners


def scavenging_time(extra: float, begin: float, end: float) -> float:
  """Time of a fixed work, relative to no extra learners.

  begin + (1 − end) + (end − begin) / (1 + x); with half of the work that is
  0.5 + 0.5 / (1 + x) (paper §7, Table 4). No cost of coming and going.

  Args:
    extra: x, learners that come, as a share of those that are always there.
    begin: share of the work after which they come.
    end: share of the work after which they go.
  """
  return begin + (1 - end) + (end - begin) / (1 + extra)


def slowest_pace(
  mean_steps_s: Sequence[float], jitter: float, window_steps: int
) -> float:
  """Pace of a run that waits for its slowest, in steps of its fastest.

  min(mean) / E[max over learners of the mean of W steps]. An approximation: it
  lets all begin every window of W steps together, so it neglects that who was
  slow in one window is behind in the next; and it takes lengths as normal,
  without the cut of very short ones. It neglects drift, stops and the network.

  Args:
    mean_steps_s: of each learner.
    jitter: standard deviation of a step's length, as a share of it.
    window_steps: W ≥ 1, steps over which a learner's jitter evens out before
      others wait: τ + s for rounds every s steps with an overlap of τ.
  """
  assert window_steps >= 1, f'{window_steps=}'
  deviations_s = [s * jitter / math.sqrt(window_steps) for s in mean_steps_s]
  return min(mean_steps_s) / _mean_of_largest(mean_steps_s, deviations_s)


def _mean_of_largest(
  means: Sequence[float], deviations: Sequence[float]
) -> float:
  """E[max] of independent normals: high − ∫ Π Φ((x − μ)/σ) dx up to high."""
  if not any(deviations):
    return max(means)
  low = min(m - NORMAL_RANGE * d for m, d in zip(means, deviations))
  high = max(m + NORMAL_RANGE * d for m, d in zip(means, deviations))
  width = (high - low) / NODES
  below = 0.0
  for node in range(NODES):
    x = low + (node + 0.5) * width
    below += math.prod(
      0.5 * math.erfc((m - x) / (d * math.sqrt(2)))
      for m, d in zip(means, deviations)
    )
  return high - below * width
