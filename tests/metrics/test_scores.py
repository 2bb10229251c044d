# SPDX-License-Identifier: Apache-2.0
"""Shares with intervals, and evaluations with and without a task."""

import json

import pytest

from diloco.metrics import status

LOSSES = {
  'parameters': 4000,
  'initial_loss': 5.5,
  'final_loss': 1.9,
  'bigram_loss': 2.4,
  'unigram_loss': 3.2,
}


def test_the_interval_is_wilsons():
  """81 of 263, the example of Newcombe (1998): 0.2553 to 0.3662."""
  share = status.share(81, 263)
  assert share.share == 81 / 263
  assert share.low == pytest.approx(0.2553, abs=5e-5)
  assert share.high == pytest.approx(0.3662, abs=5e-5)


def test_all_and_none_have_an_interval_too():
  none, every = status.share(0, 20), status.share(20, 20)
  assert none.low == 0.0 and every.high == 1.0
  # Wilson's bound where nothing was right: z² / (n + z²).
  assert none.high == pytest.approx(3.8415 / 23.8415, rel=1e-4)
  assert every.low == pytest.approx(1 - none.high)


@pytest.mark.parametrize(('right', 'questions'), [(0, 0), (-1, 3), (4, 3)])
def test_no_share_of_nothing(right, questions):
  with pytest.raises(ValueError, match='questions='):
    status.share(right, questions)


def test_an_evaluation_with_a_task_is_read_back(tmp_path):
  task = status.TaskScore(
    'x.jsonl', 8, 0.25, 1, status.share(3, 8), status.share(4, 8)
  )
  evaluation = status.Evaluation(**LOSSES, task=task, final_bits_per_byte=2.7)
  status.write_evaluation(tmp_path / 'evaluation.json', evaluation)
  assert status.read_evaluation(tmp_path / 'evaluation.json') == evaluation


def test_an_evaluation_of_an_earlier_version_is_read(tmp_path):
  path = tmp_path / 'evaluation.json'
  path.write_text(json.dumps(LOSSES))
  assert status.read_evaluation(path) == status.Evaluation(**LOSSES)
