# SPDX-License-Identifier: Apache-2.0
"""The held-out loss: all batches of a long text, fewer of a short one."""

import dataclasses

import numpy as np
import pytest

from diloco.config import run_config
from diloco.models import api
from diloco.run.heldout import Heldout
from diloco.run.spec import make_run_spec
from experiments import tests_tiny

ROWS, BATCHES = 2, 4  # What is asked for.


@pytest.fixture(scope='module', name='run_spec')
def fixture_run_spec():
  config = tests_tiny.get_config()
  config.run.eval_batch, config.run.eval_batches = ROWS, BATCHES
  return make_run_spec(run_config.build(config))


def _evaluated(run_spec, windows, batches=None):
  """Returns the batches and the loss of a text of so many windows."""
  length = run_spec.config.data.seq_len
  text = run_spec.text
  short = dataclasses.replace(
    text, heldout=text.heldout[: windows * length + 1]
  )
  heldout = Heldout(dataclasses.replace(run_spec, text=short), batches)
  seen = []

  def each(batches):
    for batch in batches:
      seen.append(batch['tokens'])
      yield batch

  loss = heldout.loss(run_spec.initial_parameters(), each)
  assert loss == heldout.loss(run_spec.initial_parameters())
  return seen, loss


def test_a_short_text_gives_fewer_batches_and_it_is_said(run_spec, caplog):
  seen, loss = _evaluated(run_spec, windows=5)
  length = run_spec.config.data.seq_len
  assert [batch.shape for batch in seen] == [(ROWS, length + 1)] * 2
  assert len({row.tobytes() for batch in seen for row in batch}) == 4
  assert 0 < loss < 2 * np.log(256)
  (said,) = caplog.messages
  assert said == (
    'evaluates on 2 batches of 2, all that the held-out text gives: '
    '4 of run.eval_batch=2 are asked for'
  )


def test_a_text_of_one_window_is_one_row(run_spec, caplog):
  seen, _ = _evaluated(run_spec, windows=1)
  assert [len(batch) for batch in seen] == [1]
  assert 'evaluates on 1 batches of 1' in caplog.text


@pytest.mark.parametrize(('asked', 'found'), [(None, BATCHES), (3, 3), (0, 6)])
def test_a_long_text_gives_what_is_asked_for(run_spec, caplog, asked, found):
  seen, _ = _evaluated(run_spec, windows=12, batches=asked)
  assert [len(batch) for batch in seen] == [ROWS] * found
  assert not caplog.messages


def test_a_batch_weighs_what_its_loss_counts(run_spec):
  def loss(params, batch, key):
    first = batch['tokens'][0, 0].astype('float32')
    return first, {api.COUNTED: first % 7}

  model = run_spec.model._replace(loss=loss)
  seen, found = _evaluated(dataclasses.replace(run_spec, model=model), 12)
  firsts = np.array([tokens[0, 0] for tokens in seen])
  assert len(set(firsts % 7)) > 1
  np.testing.assert_allclose(found, np.average(firsts, weights=firsts % 7))
