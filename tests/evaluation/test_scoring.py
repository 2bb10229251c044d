# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods of choices against those of one text at a time."""

import functools

import jax
import numpy as np
import pytest

from diloco.data.tasks import Question
from diloco.evaluation import final_evaluation
from diloco.models import api
from diloco.models.decoder import make_decoder
from diloco.models.decoder_config import DecoderConfig

DECODER = DecoderConfig(
  vocab=128, layers=1, d_model=16, heads=2, kv_heads=1, head_dim=8, d_ff=16
)
QUESTIONS = [
  Question('The cat', (' sat.', ' purrs loudly', '!'), 0),
  Question('x', ('=1', ' = 2'), 1),
]


@pytest.fixture(scope='module')
def decoder():
  model = make_decoder(DECODER)
  rng = np.random.default_rng(0)
  shapes = api.check_model(model)
  return model, {
    path: (0.4 * rng.standard_normal(leaf.shape) + ('norm' in path)).astype('f')
    for path, leaf in shapes.items()
  }


def _alone(logits, context, choice):
  """Σ log softmax over the choice's bytes of one text, in f64."""
  text = np.zeros((1, 32), np.int32)
  written = (context + choice).encode()
  text[0, : len(written)] = np.frombuffer(written, np.uint8)
  logits_LV = np.asarray(logits(text)[0], np.float64)
  chances = np.exp(logits_LV) / np.exp(logits_LV).sum(axis=-1, keepdims=True)
  return sum(
    np.log(chances[i - 1, written[i]])
    for i in range(len(context), len(written))
  )


def test_a_choices_likelihood_is_that_of_its_bytes(decoder):
  model, params = decoder
  nested = api.unflatten(params)
  logits = functools.partial(jax.jit(model.logits), nested)
  # Five choices, two at a time: the last batch is filled up.
  scored = final_evaluation.log_likelihoods(
    model, params, QUESTIONS, 24, rows=2
  )
  assert [len(row) for row in scored] == [3, 2]
  for question, row in zip(QUESTIONS, scored):
    wanted = [_alone(logits, question.context, c) for c in question.choices]
    np.testing.assert_allclose(row, wanted, rtol=1e-5)


def test_a_long_context_loses_its_beginning(decoder):
  short = Question('cat', (' sat.', ' purr'), 0)
  long = Question('The very long-haired cat', (' sat.', ' purr'), 0)
  # 3 + 5 bytes are 7 predictions.
  [cut, whole] = final_evaluation.log_likelihoods(*decoder, [long, short], 7, 4)
  np.testing.assert_array_equal(cut, whole)


def test_answers_by_sum_and_by_byte_are_counted():
  questions = [
    Question('a', ('bb', 'cccc'), 0),
    Question('a', ('bb', 'cccc'), 1),
    Question('a', ('b', 'c', 'd', 'e'), 2),
    Question('a' * 8, ('b', 'c'), 0),
  ]
  sums = [[-2.0, -3.0], [-2.0, -3.0], [-4.0, -3.0, -2.0, -2.5], [-1.0, -1.0]]
  score = final_evaluation.task_score('x.jsonl', questions, sums, 7)
  assert score.by_sum.right == 2  # The first and the third; a tie is none.
  assert score.by_byte.right == 2  # The second (−0.75 a byte) and the third.
  assert score.chance == (0.5 + 0.5 + 0.25 + 0.5) / 4
  assert (score.questions, score.cut, score.file) == (4, 1, 'x.jsonl')
  assert score.by_sum.low < 0.5 < score.by_sum.high
