# SPDX-License-Identifier: Apache-2.0
"""A text is not read so often that the model gets worse on any other."""

import json

import pytest

from diloco.config import run_config
from diloco.metrics import names
from diloco.metrics.status import Evaluation
from diloco.metrics.workdir import EVALUATOR, Workdir
from experiments import train as train_config
from launch import epochs, train

pytestmark = pytest.mark.beside


def config_of(path, **protocol):
  given = train_config.get_config()
  given.data.update(source='text', path=str(path))
  given.protocol.update(**protocol)
  return run_config.build(given)


@pytest.fixture
def text(tmp_path):
  path = tmp_path / 'book.txt'
  path.write_bytes(b'a' * 35_000)
  return path


def test_a_small_text_has_fewer_steps(text, tmp_path):
  # 33,600 bytes are trained on; a step of 2 learners takes 2 * 8 * 128.
  config = config_of(text)
  assert epochs.epochs_of(config) == pytest.approx(800 * 2048 / 33_600)
  assert epochs.steps_for(config) == 10 * 33_600 // 2048 == 164
  assert '800 steps read the 33,600 bytes of text 48.8 times; more than 10' in (
    epochs.line(config)
  )
  assert 'more than' not in epochs.line(config_of(text, total_steps=164))
  text.write_bytes(b'a' * 1_000_000)
  assert epochs.steps_for(config) == 800
  text.write_bytes(b'a' * 4267)
  assert epochs.steps_for(config) == 24, 'one cycle of H'


def test_train_takes_them_unless_steps_are_given(text):
  def keys(*words):
    given = train.arguments(['train', str(text), '--workdir=w', *words])
    return [w for w in given if 'steps' in w]

  assert keys() == [
    '--config.inner.warmup_steps=16', '--config.protocol.total_steps=164',
  ]  # fmt: skip
  assert keys('--learners=4') == [
    '--config.inner.warmup_steps=8', '--config.protocol.total_steps=82',
  ]  # fmt: skip
  assert keys('--steps=800') == ['--config.protocol.total_steps=800']
  text.write_bytes(b'a' * 1_000_000)
  assert keys() == []


def test_a_loss_that_rose_is_called_over_fitted(tmp_path):
  workdir = Workdir(tmp_path)
  evaluation = Evaluation(1, 5.5, 5.265, None, None)
  assert epochs.over_fitted(workdir, evaluation) is None, 'nothing is known'
  path = workdir.metrics(EVALUATOR)
  path.parent.mkdir()
  curve = {20: 5.3433, 160: 2.3982, 200: 2.5529, 400: 5.2645}
  path.write_text(
    ''.join(
      json.dumps({'step': step, names.EVAL_LOSS: loss}) + '\n'
      for step, loss in curve.items()
    )
  )
  assert epochs.over_fitted(workdir, evaluation) == (
    'the loss on held-out text rose from its minimum 2.398 at step 160 to '
    '5.265: over-fitted. More text, or about 160 steps, give a better model'
  )
  good = Evaluation(1, 5.5, 2.41, None, None)
  assert epochs.over_fitted(workdir, good) is None
