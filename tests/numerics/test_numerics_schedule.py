# SPDX-License-Identifier: Apache-2.0
"""Inner learning rates at the corners, and between them."""

import itertools

import pytest

from diloco.numerics import schedule


@pytest.mark.parametrize('name', schedule.SCHEDULES)
def test_warm_up_is_linear_and_reaches_the_peak(name):
  rate = schedule.make_schedule(name, 2.0, 4, 100)
  assert [rate(t) for t in range(4)] == [0.5, 1.0, 1.5, 2.0]
  assert rate(0.5) == 0.75
  assert schedule.make_schedule(name, 2.0, 0, 100)(0) == 2.0


def test_corners():
  constant = schedule.make_schedule('constant', 1.0, 10, 110, 0.1)
  cosine = schedule.make_schedule('cosine', 1.0, 10, 110, 0.1)
  wsd = schedule.make_schedule('wsd', 1.0, 10, 110, 0.1)
  assert [constant(t) for t in (10, 60, 110, 999)] == [1, 1, 1, 1]
  assert [cosine(t) for t in (10, 60, 110, 999)] == pytest.approx(
    [1, 0.55, 0.1, 0.1]
  )
  assert [wsd(t) for t in (10, 88, 99, 110, 999)] == pytest.approx(
    [1, 1, 0.55, 0.1, 0.1]
  )


@pytest.mark.parametrize('name', schedule.SCHEDULES)
def test_never_rises_after_the_peak_and_never_jumps(name):
  rate = schedule.make_schedule(name, 1.0, 10, 100, 0.05)
  values = [rate(t / 8) for t in range(8 * 9, 8 * 120)]
  falls = [before - after for before, after in itertools.pairwise(values)]
  assert min(falls) >= 0 and max(falls) < 0.01
