# SPDX-License-Identifier: Apache-2.0
"""Formulas against the paper's figures and against simulated fleets."""

import math
import random
import statistics

import pytest

from diloco.fleets import failures, systems
from diloco.metrics import goodput as metrics_goodput

PAUSE_S, REPAIR_S = 13.7, 66.3
HOURS_S = 10 * 3600.0
SEEDS = range(8)


def _rate(chips: int, learners: int = 1) -> float:
  return failures.rate_per_s(chips, 365.0) / learners


def _trace(chips: int, seed: int, learners: int = 1):
  draw = failures.make('exponentiated_weibull', REPAIR_S, 1.5)
  return failures.draw(
    _rate(chips), HOURS_S / learners, draw, random.Random(seed)
  )


def _stops(chips, seed, rule, learners=1):
  """Returns the stops of each learner, and the time of the run."""
  trace = _trace(chips, seed, learners)
  until_s = HOURS_S / learners
  own = [failures.of_learner(trace, i, learners) for i in range(learners)]
  return [rule(part, PAUSE_S, until_s) for part in own], until_s


def _goodput(chips, seed, rule):
  (stops,), until_s = _stops(chips, seed, rule)
  useful_s, stepping_s = failures.running_s(stops, (), until_s)
  assert useful_s == pytest.approx(stepping_s)
  return useful_s / until_s


def _meets(values, expected: float, off: float = 0.0):
  """Returns whether a mean is within 4 standard errors of the theory."""
  error = statistics.stdev(values) / math.sqrt(len(values))
  return abs(statistics.fmean(values) - expected) < 4 * error + off


@pytest.mark.parametrize(
  ('chips', 'learners', 'percent'),
  [
    (150_000, 1, 89.0), (600_000, 1, 69.4), (1_200_000, 1, 55.3),
    (2_400_000, 4, 69.4), (1_200_000, 8, 89.0),
  ],
)  # fmt: skip
def test_elastic_goodput_of_the_paper_s_fleets(chips, learners, percent):
  goodput = systems.elastic_goodput(_rate(chips, learners), PAUSE_S)
  assert 100 * goodput == pytest.approx(percent, abs=0.06)


def test_elastic_goodput_solves_its_equation():
  g = systems.elastic_goodput(1 / 20, PAUSE_S)
  assert 1 - g == pytest.approx(PAUSE_S / 20 * g * (1 + g))


@pytest.mark.parametrize(
  ('chips', 'percent'), [(150_000, 72.4), (600_000, 39.6), (2_400_000, 14.1)]
)
def test_goodput_without_elasticity_of_the_paper_s_fleets(chips, percent):
  goodput = systems.waiting_goodput(_rate(chips), 80.0)
  assert 100 * goodput == pytest.approx(percent, abs=0.06)


@pytest.mark.parametrize('chips', [150_000, 600_000, 2_400_000])
def test_waiting_fleets_meet_their_formula(chips):
  simulated = [_goodput(chips, seed, failures.waiting) for seed in SEEDS]
  expected = systems.waiting_goodput(_rate(chips), PAUSE_S + REPAIR_S)
  assert _meets(simulated, expected)


@pytest.mark.parametrize('chips', [150_000, 600_000, 2_400_000])
def test_elastic_fleets_meet_their_formula(chips):
  """Within half a point: a return soon after its own pause finds the learner
  running more often than g."""
  simulated = [_goodput(chips, seed, failures.elastic) for seed in SEEDS]
  expected = systems.elastic_goodput(_rate(chips), PAUSE_S)
  assert _meets(simulated, expected, off=0.005)


@pytest.mark.parametrize('learners', [2, 8])
def test_uptime_of_independent_learners_meets_its_formula(learners):
  def uptime(seed):
    every, until_s = _stops(2_400_000, seed, failures.elastic, learners)
    running = []
    for stops in every:
      edges = [0.0, *(x for s in stops for x in (s.begin_s, s.end_s)), until_s]
      running += [(a, min(b, until_s)) for a, b in zip(edges[::2], edges[1::2])]
    up = metrics_goodput.joined(span for span in running if span[0] < span[1])
    return sum(end_s - begin_s for begin_s, end_s in up) / until_s

  g = systems.elastic_goodput(_rate(2_400_000, learners), PAUSE_S)
  expected = systems.uptime(g, learners)
  assert _meets(list(map(uptime, SEEDS)), expected, off=0.005 / learners)


@pytest.mark.parametrize(
  ('extra', 'time'),
  [(0, 1.0), (0.25, 0.9), (0.5, 5 / 6), (1, 0.75), (3, 0.625)],
)
def test_scavenging_times_of_the_paper(extra, time):
  assert systems.scavenging_time(extra, 0.25, 0.75) == pytest.approx(time)


def test_scavenging_all_the_time_is_a_larger_fleet():
  assert systems.scavenging_time(1.0, 0.0, 1.0) == 0.5


def test_few_slices_lose_a_share_while_one_is_away():
  """A learner of three, for whom a repair takes far longer than a pause."""
  pause_s, repair_s, until_s = 10.0, 500.0, 2e6
  rate = 1 / 5000
  g = systems.elastic_goodput(rate, pause_s)
  expected = g * systems.slices_there(rate, repair_s, g, 3)
  draw = failures.make('exponential', repair_s)
  shares = []
  for seed in SEEDS:
    trace = failures.draw(rate, until_s, draw, random.Random(seed))
    stops = failures.elastic(trace, pause_s, until_s)
    there = failures.capacities(trace, stops, 1 / 3)
    shares.append(failures.running_s(stops, there, until_s)[0] / until_s)
  assert expected == pytest.approx(0.963, abs=0.001)
  assert _meets(shares, expected)
