# SPDX-License-Identifier: Apache-2.0
"""Distributions of the time until a lost slice is back, with a given mean."""

import math
import random
from collections.abc import Callable

Repair = Callable[[random.Random], float]  # Draws seconds.

# Trapezoids of the mean's integral; more do not change any digit.
NODES_PER_UNIT = 64
T_MAX = 4.5
U_MIN = 2.0**-54  # `random()` can be 0, which has no logarithm.


def make(kind: str, mean_s: float, shape: float, power: float) -> Repair:
  """Returns a distribution of repair times with the mean `mean_s`.

  The paper names the exponentiated Weibull, without its parameters.

  Args:
    kind: 'constant', 'exponential' or 'exponentiated_weibull'.
    mean_s: mean of the draws, in seconds, at least 0.
    shape: k > 0 of the exponentiated Weibull, P(x) = (1 − e^−(x/l)^k)^a; others
      ignore it. The scale l follows from the mean.
    power: its a > 0.

  Raises:
    ValueError: names the invalid value, and what is valid.
  """
  if not 0 <= mean_s < math.inf:
    raise ValueError(f'{mean_s=}: must be finite, at least 0')
  match kind:
    case 'constant':
      return lambda rng: mean_s
    case 'exponential':
      return lambda rng: -mean_s * math.log1p(-rng.random())
    case 'exponentiated_weibull':
      if not (shape > 0 and power > 0):
        raise ValueError(f'{shape=}, {power=}: both must be above 0')
      scale_s = mean_s / unit_mean(shape, power)
      return lambda rng: scale_s * quantile(rng.random(), shape, power)
  raise ValueError(
    f'{kind=}: must be constant, exponential or exponentiated_weibull'
  )


def quantile(u: float, shape: float, power: float) -> float:
  """Returns x with P(x) = u at scale 1: (−ln(1 − u^(1/a)))^(1/k); u in [0,
  1).
  """
  beyond = -math.expm1(math.log(max(u, U_MIN)) / power)  # 1 − u^(1/a)
  return (-math.log(beyond)) ** (1 / shape)


def unit_mean(shape: float, power: float) -> float:
  """Returns the mean of the exponentiated Weibull of scale 1.

  ∫ y^(1/k) · a · (1 − e^−y)^(a−1) · e^−y dy over y > 0, where y = x^k; by
  trapezoids in t, y = exp(π/2 · sinh t), which tame both ends for any k, a.
  """
  total = 0.0
  for node in range(
    round(-T_MAX * NODES_PER_UNIT), round(T_MAX * NODES_PER_UNIT) + 1
  ):
    t = node / NODES_PER_UNIT
    log_y = math.pi / 2 * math.sinh(t)
    y = math.exp(log_y)
    log_density = (power - 1) * math.log(-math.expm1(-y)) - y
    total += math.cosh(t) * math.exp(log_y * (1 + 1 / shape) + log_density)
  return total * power * math.pi / 2 / NODES_PER_UNIT
