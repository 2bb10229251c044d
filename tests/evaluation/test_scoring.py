# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods of choices against those of one text at a time; answers."""

import dataclasses
import functools
import json
import re

import jax
import numpy as np
import pytest

from diloco.config.sections import MeshConfig
from diloco.data import dialogues
from diloco.data.tasks import Question, read_dialogues
from diloco.data.tokenizers import BYTES
from diloco.evaluation import final_evaluation
from diloco.models import api
from diloco.models.decoder import make_decoder
from diloco.models.decoder_config import DecoderConfig
from diloco.run.on_devices import OnDevices

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


def _rows(questions, window, vocab=128):
  return final_evaluation.choice_rows(questions, BYTES, window, vocab)


def _scored(decoder, rows, at_once):
  model, params = decoder
  shapes = {path: x.shape for path, x in params.items()}
  devices = OnDevices(model, shapes, MeshConfig())
  return final_evaluation.log_likelihoods(
    model.language, devices, params, rows, at_once
  )


def test_a_choices_likelihood_is_that_of_its_bytes(decoder):
  model, params = decoder
  nested = api.unflatten(params)
  logits = functools.partial(jax.jit(model.logits), nested)
  # Five choices, two at a time: the last batch is filled up.
  scored = _scored(decoder, _rows(QUESTIONS, 24), 2)
  wanted = [
    _alone(logits, question.context, choice)
    for question in QUESTIONS
    for choice in question.choices
  ]
  np.testing.assert_allclose(scored, wanted, rtol=1e-5)


def test_a_long_context_loses_its_beginning(decoder):
  short = Question('cat', (' sat.', ' purr'), 0)
  long = Question('The very long-haired cat', (' sat.', ' purr'), 0)
  # 3 + 5 bytes are 7 predictions.
  rows = _rows([long, short], 7)
  assert [row.is_cut for row in rows] == [True, True, False, False]
  scored = _scored(decoder, rows, 4)
  assert scored[:2] == scored[2:]


def test_a_choice_has_the_tokens_that_the_context_alone_has_not():
  """A tokenizer may join the ends of both: here 'ab' is one token."""

  def encode(texts):
    return [re.findall('ab|.', text.decode()) for text in texts]

  pairs = dataclasses.replace(
    BYTES,
    raw_encode=lambda texts: [
      [200 if x == 'ab' else ord(x) for x in each] for each in encode(texts)
    ],
  )
  [first, second] = final_evaluation.choice_rows(
    [Question('xa', ('bc', 'cab'), 0)], pairs, 5, 256
  )
  assert first.tokens.tolist() == [ord('x'), 200, ord('c'), 0, 0, 0]
  assert first.is_choice.tolist() == [False, True, False, False, False]
  assert second.is_choice.tolist() == [False, True, True, False, False]


@pytest.mark.parametrize(
  ('question', 'problem'),
  [
    (Question('a', ('b', 'bcdef'), 0), r'question 2, choices\[1\]: 5 tokens'),
    (Question('é', ('b', 'c'), 0), r'choices\[0\]: has token 195, .* is 128'),
  ],
)
def test_what_the_model_can_not_be_asked_is_named(question, problem):
  with pytest.raises(ValueError, match=problem):
    _rows([QUESTIONS[1], question], 4)


def test_answers_by_sum_and_by_byte_are_counted():
  questions = [
    Question('a', ('bb', 'cccc'), 0),
    Question('a', ('bb', 'cccc'), 1),
    Question('a', ('b', 'c', 'd', 'e'), 2),
    Question('a' * 8, ('b', 'c'), 0),
  ]
  sums = [-2.0, -3.0, -2.0, -3.0, -4.0, -3.0, -2.0, -2.5, -1.0, -1.0]
  rows = _rows(questions, 7)
  score = final_evaluation.task_score('x.jsonl', questions, rows, sums)
  assert score.by_sum.right == 2  # The first and the third; a tie is none.
  assert score.by_byte.right == 2  # The second (−0.75 a byte) and the third.
  assert score.chance == (0.5 + 0.5 + 0.25 + 0.5) / 4
  assert (score.questions, score.cut, score.file) == (4, 1, 'x.jsonl')
  assert score.by_sum.low < 0.5 < score.by_sum.high


# Dialogues -------------------------------------------------------------------


def test_an_answer_is_right_to_its_last_token(tmp_path):
  """The model counts on: b follows a, c follows b."""
  model = api.plain_model(
    lambda key: {'w': jax.numpy.ones(1)},
    lambda params, batch, key: (jax.numpy.float32(0), {}),
    logits=lambda params, tokens: params['w'] * jax.nn.one_hot(tokens + 1, 256),
  )
  devices = OnDevices(model, {'w': (1,)}, MeshConfig())
  pairs = [('xa', 'bcd'), ('ya', 'bce'), ('0', '123456'), ('a', 'b')]
  task = tmp_path / 'asked.jsonl'
  task.write_text(
    ''.join(
      json.dumps({'prompt': prompt, 'completion': completion}) + '\n'
      for prompt, completion in pairs
    )
  )
  # Without the end, which this model does not say.
  asked = [
    (prompt, answer[:-1])
    for prompt, answer in map(
      final_evaluation.asked_of,
      map(BYTES.encode_dialogue, read_dialogues(task)),
    )
  ]
  assert [(bytes(p).decode(), bytes(a).decode()) for p, a in asked] == pairs
  params = {'w': np.ones(1, np.float32)}
  right = final_evaluation.exact_matches(
    api.language_of(model), devices, params, asked, 8, 256, at_once=3
  )
  assert right == [True, False, True, True]
  with pytest.raises(
    ValueError, match=r'dialogue 1: 2 tokens and 3 .* 4 in all'
  ):
    final_evaluation.check_asked(asked, 4, 256)
  with pytest.raises(ValueError, match=r'dialogue 1: has token 120, .* is 110'):
    final_evaluation.check_asked(asked, 8, 110)
  task.write_text(task.read_text() + '{"prompt": 1}\n')
  with pytest.raises(ValueError, match="line 5: has no 'completion'"):
    read_dialogues(task)
  task.write_text('{"context": "a"}\n')
  assert read_dialogues(task) is None


def test_of_a_conversation_the_last_answer_is_asked_for():
  roles = ('user', 'assistant', 'user', 'assistant', 'user')
  messages = [{'role': role, 'content': c} for role, c in zip(roles, 'ABCDE')]
  said = dialogues.document_of({'m': messages}, 'chat:m')
  prompt, answer = final_evaluation.asked_of(BYTES.encode_dialogue(said))
  assert bytes(answer) == b'D\n'
  assert bytes(prompt) == b'user: A\nassistant: B\nuser: C\nassistant: '
