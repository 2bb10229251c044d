# SPDX-License-Identifier: Apache-2.0
"""The border of a model: a plain pair of functions is one, faults are named."""

import jax
import jax.numpy as jnp
import pytest

from diloco.models import api

AXES = {'table': ('vocab', 'embed'), 'top/bias': (None,)}
ROLES = {'table': 'embedding', 'top/bias': 'plain'}


def _init(key):
  table = jax.random.normal(key, (5, 3))
  return {'table': table, 'top': {'bias': jnp.zeros(5)}}


def _loss(params, batch, key):
  del key
  tokens = batch['tokens']
  logits = params['table'][tokens[:, :-1]] @ params['table'].T
  chances = jax.nn.log_softmax(logits + params['top']['bias'][None, None, :])
  picked = jnp.take_along_axis(chances, tokens[:, 1:, None], axis=-1)
  return -jnp.mean(picked), {}


def _model(init=_init, axes=AXES, roles=ROLES):
  return api.Model(init=init, loss=_loss, axes=axes, roles=roles)


def test_a_model_without_flax_is_a_model():
  shapes = api.check_model(_model())
  assert {path: leaf.shape for path, leaf in shapes.items()} == {
    'table': (5, 3),
    'top/bias': (5,),
  }


def test_every_fault_of_the_tables_is_named():
  model = _model(
    axes={'table': ('vocab',), 'ghost': ()},
    roles={'table': 'token', 'top/bias': 'plain'},
  )
  with pytest.raises(ValueError) as error:
    api.check_model(model)
  text = str(error.value)
  assert "axes misses 'top/bias'" in text
  assert "axes names 'ghost', which is no parameter" in text
  assert "axes of 'table' are ('vocab',), its shape is (5, 3)" in text
  assert "role of 'table' is 'token', must be one of" in text


@pytest.mark.parametrize(
  ('params', 'text'),
  [
    ({'a': [jnp.zeros(2)]}, 'a is a list; params are nested dicts of arrays'),
    ({'a': {3: jnp.zeros(2)}}, "a has the key 3; keys are strings without '/'"),
    ({'a/b': jnp.zeros(2)}, "has the key 'a/b'"),
    ({'a': {}}, 'a is an empty dict'),
    (jnp.zeros(2), 'params is a'),
  ],
)
def test_a_tree_without_paths_is_refused(params, text):
  with pytest.raises(ValueError, match=text):
    api.flatten(params)
