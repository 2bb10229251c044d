# SPDX-License-Identifier: Apache-2.0
"""A model of the user's own, two functions: in the lab, and what is refused."""

import sys

import pytest

from diloco.config import run_config
from diloco.config.sections import ConfigError
from diloco.lab.run import train
from diloco.run.spec import make_run_spec
from experiments import own_model


def _config(**model):
  config = own_model.get_config('quicktest')
  config.model.update(**model)
  return run_config.build(config)


def test_it_learns_in_the_lab():
  config = own_model.get_config('quicktest')
  config.protocol.total_steps = 120
  config.lab.eval_every_steps = 20
  trained = train(make_run_spec(run_config.build(config)))
  losses = [point.loss for point in trained.points]
  assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(
  ('kind', 'message'),
  [
    ('nowhere.at_all:model', "No module named 'nowhere'; modules are looked"),
    ('experiments.own_model:modle', 'own_model.py has no function modle'),
  ],
)
def test_a_model_that_is_not_there_is_named(kind, message):
  with pytest.raises(ValueError, match=message):
    make_run_spec(_config(kind=kind))


@pytest.mark.parametrize(
  'kind', ['decodr', 'a.b', 'a:', ':b', 'a b:c', 'a:b:c']
)
def test_no_such_kind(kind):
  with pytest.raises(ConfigError, match=r'the .package\.module:function. of'):
    _config(kind=kind)


BROKEN = {
  'a_pair': r'gave a tuple, must give .* plain_model\(init, loss\)',
  'vector': 'must be an f32 scalar',
  'alone': 'must give the pair',
  'listed': 'nested dicts of arrays',
}

MODULE = """
import jax.numpy as jnp
from diloco.models import api as interface

def init(key):
  return {'w': jnp.zeros(2), 'v': jnp.ones(2)}

def mean(params, batch, key):
  return jnp.mean(params['w']) + 0.0 * jnp.mean(batch['tokens']), {}

def a_pair(sizes):
  return init, mean

def scalars(sizes):
  def loss(params, batch, key):
    off = params['w'] - 1 + params['scale'] + jnp.sum(params['gates'] - 0.5)
    return jnp.mean(off ** 2) + 0.0 * jnp.mean(batch['tokens']), {}
  return interface.plain_model(
    lambda key: {
      'w': jnp.zeros(2), 'scale': jnp.ones(()), 'gates': jnp.zeros(4)
    },
    loss,
    roles={'gates': 'stacked'},
  )

def vector(sizes):
  def loss(params, batch, key):
    return jnp.float32(batch['tokens'][:, 1:]), {}
  return interface.plain_model(init, loss)

def alone(sizes):
  return interface.plain_model(init, lambda *given: mean(*given)[0])

def listed(sizes):
  return interface.plain_model(lambda key: {'w': [jnp.zeros(2)]}, mean)
"""


@pytest.fixture
def some_models(tmp_path, monkeypatch):
  """The module `some_models`, where a user's modules are looked for."""
  (tmp_path / 'some_models.py').write_text(MODULE)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, 'some_models', raising=False)


@pytest.mark.usefixtures('some_models')
@pytest.mark.parametrize('codec', ['f32', 'int4'])
def test_a_parameter_may_be_one_number(codec):
  """Parameters of shape (), and one per layer: every fragment moves its own."""
  config = own_model.get_config('quicktest')
  config.model.kind = 'some_models:scalars'
  config.protocol.total_steps = 120
  config.lab.eval_every_steps = 40
  config.codec.update(up=codec, down=codec)
  trained = train(make_run_spec(run_config.build(config)))
  assert trained.points[-1].loss < 0.1 < trained.points[0].loss


@pytest.mark.usefixtures('some_models')
@pytest.mark.parametrize('name', sorted(BROKEN))
def test_a_model_that_is_none_says_why(name):
  with pytest.raises(ValueError, match=BROKEN[name]) as found:
    make_run_spec(_config(kind=f'some_models:{name}'))
  assert f"model.kind='some_models:{name}'" in str(found.value)
