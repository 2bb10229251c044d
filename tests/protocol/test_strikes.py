# SPDX-License-Identifier: Apache-2.0
"""Checks which contributions are refused, as leaf decisions."""

import math

import pytest

from diloco.protocol.outliers import (
  BELIEF_FACTOR,
  OUTLIER_FACTOR,
  outliers,
  usual_after,
)


def test_three_contributions_judge_each_other():
  assert list(outliers({0: 1.0, 1: 1.2, 2: 50.0}, usual=None)) == [2]


@pytest.mark.parametrize('norms', [{0: 50.0}, {0: 1.0, 1: 50.0}])
def test_fewer_are_judged_by_what_is_usual(norms):
  assert list(outliers(norms, usual=1.0)) == [max(norms)]


def test_the_first_round_of_two_is_not_judged():
  assert outliers({0: 1.0, 1: 1e9}, usual=None) == {}


def test_nothing_is_long_next_to_nothing():
  assert outliers({0: 0.0, 1: 0.0, 2: 1e-9}, usual=None) == {}


def test_a_lasting_change_is_believed_in_the_end():
  """A run whose norms grow a thousandfold at once locks no learner out."""
  usual, refusals = 1.0, 0
  while outliers({0: 1000.0}, usual):
    usual = usual_after(usual, {}, refused=1)
    refusals += 1
  steps = math.log(1000.0 / OUTLIER_FACTOR, BELIEF_FACTOR)
  assert refusals == math.ceil(steps)
