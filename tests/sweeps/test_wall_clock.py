# SPDX-License-Identifier: Apache-2.0
"""`experiments/wall_clock.py` finds the worth of a gap in a known law."""

import math

import pytest

from experiments import recipe, wall_clock


def law(tokens: float) -> float:
  return 1.3 - 0.1 * math.log(tokens)


LOSSES = {recipe.budget(x): law(x) for x in recipe.BUDGETS} | {
  recipe.LABEL: law(1.0),
  'M = 2': law(0.9),
  'M = 4': law(0.7),
  'M = 8': law(0.3),
}


def test_a_gap_is_the_tokens_that_data_parallel_needs_for_the_loss():
  for label, share in (('M = 2', 0.9), ('M = 4', 0.7), ('M = 8', 0.3)):
    assert wall_clock.tokens_worth(LOSSES, label) == pytest.approx(share)


def test_equal_wall_clock_is_more_tokens_that_are_each_worth_less():
  """With fewer chips, which fail less, the gap nears that of equal tokens."""
  worth = {m: wall_clock.tokens_worth(LOSSES, f'M = {m}') for m in (2, 8)}
  errors = {2: 0.2, 8: 0.3}
  chart = wall_clock.picture(LOSSES, worth, errors, (15e4, 24e5))
  of_few, of_most = zip(*(line.ys for line in chart.lines[1:]))
  gaps = [100 * (LOSSES[f'M = {m}'] / law(1.0) - 1) for m in (2, 8)]
  assert all(0 < few < gap for few, gap in zip(of_few[1:], gaps[1:]))
  assert of_most[1] < of_few[1] and of_most[0] < 0 < of_few[1]


def test_a_narrow_link_hurts_the_other_more():
  up_to = [
    wall_clock.ahead_up_to(8, worth, 24e5) for worth in (0.001, 0.3, 1.0)
  ]
  none, some, every = up_to
  assert (none, every) == ('no bandwidth', 'any')
  assert 1 < float(some.removesuffix(' Gbit/s')) < 104, 'full speed'
