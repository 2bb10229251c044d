# SPDX-License-Identifier: Apache-2.0
"""Lengths of steps: slow learners, jitter and drift."""

import math
import random
import statistics

import pytest

from diloco.fleets import speeds
from diloco.fleets.speeds import Speeds


def test_a_slow_learner_makes_82_steps_while_another_makes_100():
  means = speeds.mean_steps_s(4, 1.0, slow_learners=1, slow_gap=0.18)
  assert means == pytest.approx((1.0, 1.0, 1.0, 1 / 0.82))


def test_all_learners_can_be_slow():
  assert speeds.mean_steps_s(2, 1.0, 8, 0.5) == (2.0, 2.0)


def test_without_jitter_and_drift_steps_are_even():
  pace = Speeds(1.5, 0.0, 0.0, random.Random(0))
  assert {pace.next_s(float(t)) for t in range(5)} == {1.5}


def test_jitter_is_a_share_of_the_step():
  pace = Speeds(2.0, 0.1, 0.0, random.Random(1))
  lengths = [pace.next_s(0.0) for _ in range(10_000)]
  assert statistics.fmean(lengths) == pytest.approx(2.0, abs=4 * 0.2 / 100)
  assert statistics.stdev(lengths) == pytest.approx(0.2, rel=0.05)


def test_no_step_is_shorter_than_a_tenth():
  pace = Speeds(2.0, 0.9, 0.0, random.Random(1))
  assert min(pace.next_s(0.0) for _ in range(1000)) == pytest.approx(0.2)


@pytest.mark.parametrize('looks', [1, 60])
def test_drift_grows_with_the_root_of_the_time(looks):
  """0.1 per √hour is 0.2 after 4 hours, however often one looks."""
  walks = []
  for seed in range(2000):
    pace = Speeds(1.0, 0.0, 0.1, random.Random(seed))
    for look in range(1, looks + 1):
      length_s = pace.next_s(4 * 3600 * look / looks)
    walks.append(math.log(length_s))
  assert statistics.stdev(walks) == pytest.approx(0.2, rel=4 / math.sqrt(4000))
