# SPDX-License-Identifier: Apache-2.0
"""Closed forms of goodput, uptime and times, for comparison with simulations.

λ is the rate of interruptions of one learner: N / (M · MTBI). The forms are our
inference: the paper gives tables (1 and 4), not these equations.
"""

import math


def elastic_goodput(rate_per_s: float, pause_s: float) -> float:
  """g of an elastic learner: 1 − g = t·λ·g·(1 + g).

  An interruption costs a pause t if the learner runs, with probability g; the
  slice's return costs another one if it runs then, again with probability g.
  This is exact if the repair takes so long compared with t that the two are
  independent.

  Args:
    rate_per_s: λ.
    pause_s: t.
  """
  x = pause_s * rate_per_s
  return 2 / (1 + x + math.sqrt((1 + x) ** 2 + 4 * x))


def waiting_goodput(rate_per_s: float, stands_s: float) -> float:
  """g = 1 / (1 + λR) of a learner without elasticity.

  Exact: it runs for 1/λ on average, and then stands for R.

  Args:
    rate_per_s: λ.
    stands_s: R, mean of a repair and the reconfiguration after it.
  """
  return 1 / (1 + rate_per_s * stands_s)


def uptime(goodput: float, learners: int) -> float:
  """1 − (1 − g)^M: the probability that not all M learners stand at once."""
  return 1 - (1 - goodput) ** learners


def scavenging_time(extra: float, begin: float, end: float) -> float:
  """Returns the time of a fixed amount of work, relative to no extra learners.

  begin + (1 − end) + (end − begin) / (1 + x); with half of the work that is 0.5
  + 0.5 / (1 + x), as in the paper's Table 4. Joining and leaving cost nothing.

  Args:
    extra: x, extra learners as a share of the permanent ones.
    begin: share of the work after which they join.
    end: share of the work after which they leave.
  """
  return begin + (1 - end) + (end - begin) / (1 + extra)
