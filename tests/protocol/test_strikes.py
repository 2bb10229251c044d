# SPDX-License-Identifier: Apache-2.0
"""Checks which contributions are refused, as leaf decisions."""

import math

import pytest

from diloco.protocol.outliers import (
  BELIEF_FACTOR,
  OUTLIER_FACTOR,
  outliers,
  per_root_step,
  usual_after,
)


def test_a_norm_is_compared_per_root_step():
  assert per_root_step(6.0, 9) == 2.0


def test_three_contributions_judge_each_other():
  assert list(outliers({0: 1.0, 1: 1.2, 2: 50.0}, usual=None)) == [2]


def test_what_is_new_for_all_is_nobodys_fault():
  assert outliers({0: 80.0, 1: 90.0, 2: 70.0}, usual=1.0) == {}


def test_half_of_a_round_may_be_too_long():
  assert list(outliers({0: 1.0, 1: 50.0, 2: 1.1, 3: 60.0}, None)) == [1, 3]


@pytest.mark.parametrize('norms', [{0: 50.0}, {0: 1.0, 1: 50.0}])
def test_fewer_are_judged_by_what_is_usual(norms):
  assert list(outliers(norms, usual=1.0)) == [max(norms)]


def test_the_first_round_of_two_is_not_judged():
  assert outliers({0: 1.0, 1: 1e9}, usual=None) == {}


def test_a_norm_at_the_limit_is_merged():
  assert outliers({0: OUTLIER_FACTOR}, usual=1.0) == {}


def test_nothing_is_long_next_to_nothing():
  assert outliers({0: 0.0, 1: 0.0, 2: 1e-9}, usual=None) == {}


def test_a_refusal_says_why():
  reason = outliers({0: 50.0}, usual=1.0)[0]
  assert reason == (
    'norm per √step 50, what is usual is 1, at most 16 times that is merged'
  )


def test_the_first_round_sets_what_is_usual():
  assert usual_after(None, {0: 1.0, 1: 3.0}, refused=0) == 2.0


def test_what_is_usual_moves_a_fifth_of_the_way():
  assert usual_after(1.0, {0: 2.0}, refused=0) == pytest.approx(1.2)


def test_nobody_merged_and_nobody_refused_changes_nothing():
  assert usual_after(1.0, {}, refused=0) == 1.0
  assert usual_after(None, {}, refused=1) is None


def test_a_lasting_change_is_believed_in_the_end():
  """A run whose norms grow a thousandfold at once locks no learner out."""
  usual, refusals = 1.0, 0
  while outliers({0: 1000.0}, usual):
    usual = usual_after(usual, {}, refused=1)
    refusals += 1
  steps = math.log(1000.0 / OUTLIER_FACTOR, BELIEF_FACTOR)
  assert refusals == math.ceil(steps)
