# SPDX-License-Identifier: Apache-2.0
"""Repair times have the mean that was asked for, and the right shape."""

import math
import random
import statistics

import pytest

from diloco.fleets import failures

DRAWS = 20_000


@pytest.mark.parametrize('shape', [0.5, 1.0, 1.5, 4.0])
def test_with_power_1_the_mean_is_that_of_a_weibull(shape):
  mean = failures.unit_mean(shape, 1.0)
  assert mean == pytest.approx(math.gamma(1 + 1 / shape), rel=1e-12)


@pytest.mark.parametrize('power', [2, 3, 10])
def test_with_shape_1_the_mean_is_that_of_the_last_of_some_to_be_repaired(
  power,
):
  """(1 − e^−x)^a is the largest of a exponentials: 1 + 1/2 + … + 1/a."""
  harmonic = sum(1 / i for i in range(1, power + 1))
  assert failures.unit_mean(1.0, power) == pytest.approx(harmonic, rel=1e-12)


@pytest.mark.parametrize('power', [0.2, 0.5])
def test_the_mean_of_a_steep_beginning_is_the_integral_of_the_quantile(power):
  nodes = 100_000
  mean = statistics.fmean(
    failures.quantile((i + 0.5) / nodes, 1.5, power) for i in range(nodes)
  )
  assert failures.unit_mean(1.5, power) == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize('u', [1e-12, 0.3, 0.999])
def test_the_quantile_inverts_the_distribution(u):
  x = failures.quantile(u, 1.5, 3.0)
  assert (1 - math.exp(-(x**1.5))) ** 3.0 == pytest.approx(u, rel=1e-3)


def test_the_quantile_of_0_is_finite():
  assert 0 <= failures.quantile(0.0, 1.5, 3.0) < 1e-3


@pytest.mark.parametrize(
  'kind', ['constant', 'exponential', 'exponentiated_weibull']
)
def test_draws_have_the_mean_asked_for(kind):
  draw = failures.make(kind, 66.3, shape=1.5, power=3.0)
  rng = random.Random(7)
  drawn = [draw(rng) for _ in range(DRAWS)]
  error_s = statistics.stdev(drawn) / math.sqrt(DRAWS)
  assert abs(statistics.fmean(drawn) - 66.3) <= 4 * error_s + 1e-9


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'kind': 'weibull'}, "kind='weibull': must be constant, exp"),
    ({'mean_s': math.inf}, 'mean_s=inf: must be finite'),
    ({'shape': 0.0}, r'shape=0.0, power=3.0: both must be above 0'),
  ],
)
def test_what_can_not_be_drawn_is_named(change, message):
  asked = {
    'kind': 'exponentiated_weibull', 'mean_s': 60.0, 'shape': 1.5, 'power': 3.0
  } | change  # fmt: skip
  with pytest.raises(ValueError, match=message):
    failures.make(**asked)
