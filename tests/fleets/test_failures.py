# SPDX-License-Identifier: Apache-2.0
"""Traces of failures: their numbers, and their shares."""

import math
import random
import statistics

import pytest

from diloco.fleets import failures, speeds

REPAIR = failures.make('exponential', 60.0)
HOUR_S = 3600.0


def _draw(seed: int, until_s: float = HOUR_S):
  rate = failures.rate_per_s(1_200_000, 365.0)
  return failures.draw(rate, until_s, REPAIR, random.Random(seed))


def test_a_fleet_of_1_2_m_chips_breaks_every_26_s():
  assert 1 / failures.rate_per_s(1_200_000, 365.0) == pytest.approx(26.28)


def test_the_number_of_interruptions_is_poisson():
  """Mean and variance of 200 counts are both 137."""
  counts = [len(_draw(seed)) for seed in range(200)]
  mean = sum(counts) / len(counts)
  variance = sum((c - mean) ** 2 for c in counts) / (len(counts) - 1)
  expected = HOUR_S / 26.28
  assert abs(mean - expected) < 4 * math.sqrt(expected / len(counts))
  # The variance of a sample variance of n normals is 2σ⁴/(n−1).
  assert abs(variance - expected) < 4 * expected * math.sqrt(2 / 199)


def test_nothing_breaks_at_rate_0():
  assert failures.rate_per_s(1000, math.inf) == 0
  assert failures.draw(0.0, HOUR_S, REPAIR, random.Random(0)) == ()


def test_every_interruption_hits_one_learner():
  trace = _draw(2)
  parts = [failures.of_learner(trace, learner, 8) for learner in range(8)]
  assert sorted(sum(parts, ()), key=lambda i: i.at_s) == list(trace)
  assert all(0.625 <= i.place < 0.75 for i in parts[5])


@pytest.mark.parametrize(
  ('kind', 'spread_s'),
  # Of a Weibull of shape 2: √(4/π − 1) of the mean.
  [('constant', 0.0), ('exponential', 66.3), ('exponentiated_weibull', 34.66)],
)
def test_repairs_have_mean_and_spread(kind, spread_s):
  draw, rng = failures.make(kind, 66.3, shape=2.0), random.Random(7)
  drawn = [draw(rng) for _ in range(20_000)]
  error_s = spread_s / math.sqrt(len(drawn))
  assert abs(statistics.fmean(drawn) - 66.3) <= 4 * error_s + 1e-9
  assert statistics.stdev(drawn) == pytest.approx(spread_s, rel=0.05, abs=1e-9)


def test_slow_learners_and_jitter():
  """While another makes 100 steps a slow one makes 82."""
  means = speeds.mean_steps_s(4, 1.0, slow_learners=1, slow_gap=0.18)
  assert means == pytest.approx((1.0, 1.0, 1.0, 1 / 0.82))
  assert speeds.mean_steps_s(2, 1.0, 8, 0.5) == (2.0, 2.0)
  pace = speeds.Speeds(2.0, 0.1, random.Random(1))
  lengths = [pace.next_s(0.0) for _ in range(10_000)]
  assert statistics.fmean(lengths) == pytest.approx(2.0, abs=4 * 0.2 / 100)
  assert statistics.stdev(lengths) == pytest.approx(0.2, rel=0.05)
  pace = speeds.Speeds(2.0, 0.9, random.Random(1))
  assert min(pace.next_s(0.0) for _ in range(1000)) == pytest.approx(0.2)
