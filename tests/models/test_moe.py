# SPDX-License-Identifier: Apache-2.0
"""The mixture: against every expert on every token, and on meshes."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.models import api, moe
from diloco.models.decoder import make_decoder
from diloco.models.decoder_config import DecoderConfig, ExpertsConfig
from tests.commands import ROOT, python
from tests.models import dense_experts, sharded_experts

CONFIG = sharded_experts.CONFIG
MESH = '2x2x2'
E, D, F, K = 5, 6, 7, 2


@pytest.fixture(autouse=True)
def _no_rank_promotion():
  with jax.numpy_rank_promotion('raise'):
    yield


def _drawn(rows=3, length=11):
  keys = jax.random.split(jax.random.key(3), 6)
  chances = jax.random.normal(keys[0], (rows, length, E))
  chances = chances.at[..., 1].add(3.0).at[..., 4].add(-99.0)  # One has none.
  gates, chosen = jax.lax.top_k(jax.nn.softmax(chances), K)
  x = jax.random.normal(keys[1], (rows, length, D))
  matrices = (
    jax.random.normal(keys[2], (E, D, F)),
    jax.random.normal(keys[3], (E, D, F)),
    jax.random.normal(keys[4], (E, F, D)),
  )
  return x, chosen, gates, *matrices


def _values_and_gradients(mixture, arrays):
  x, chosen, *others = arrays
  weights = jax.random.normal(jax.random.key(9), x.shape)

  def value(x, *others):
    y = mixture(x, chosen, *others)
    return jnp.sum(weights * y), y

  find = jax.jit(jax.value_and_grad(value, argnums=range(5), has_aux=True))
  (_, y), gradients = find(x, *others)
  return [y, *gradients]


@pytest.mark.parametrize('product', [moe.by_blocks, moe.by_ragged_dot])
def test_it_is_every_expert_on_every_token(product, monkeypatch):
  monkeypatch.setattr(moe, 'mlps', product)
  arrays = _drawn()
  expected = _values_and_gradients(dense_experts.mixture, arrays)
  for x, y in zip(_values_and_gradients(moe.spread, arrays), expected):
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize('product', [moe.by_blocks, moe.by_ragged_dot])
def test_rows_of_no_expert_are_zero_and_have_no_gradient(product):
  _, _, _, *matrices = _drawn()
  x = jax.random.normal(jax.random.key(0), (40, D)).at[25:].set(jnp.nan)
  sizes = jnp.array([7, 0, 18, 0, 0], jnp.int32)
  y = jax.jit(product)(x, sizes, *matrices)
  np.testing.assert_array_equal(y[25:], 0)
  assert np.isfinite(y).all() and np.abs(y[:25]).min() > 0


@pytest.mark.parametrize('bias_rate', [0.0, 1e-3])
def test_tables_and_count_fit_the_parameters(bias_rate):
  experts = ExpertsConfig(4, 2, bias_rate=bias_rate)
  config = dataclasses.replace(CONFIG, experts=experts)
  model = make_decoder(config)
  shapes = api.check_model(model)
  assert config.parameters == sum(leaf.size for leaf in shapes.values())
  found = {
    path: (leaf.shape, model.roles[path]) for path, leaf in shapes.items()
  }
  assert config.arrays == found
  path = 'layers/mlp/router_bias'
  assert (path in shapes) == (bias_rate > 0)
  if bias_rate:
    assert model.roles[path] == api.AVERAGED


def test_one_expert_is_the_dense_decoder():
  sizes = (32, 2, 16, 4, 2, 8, 12)
  dense = make_decoder(DecoderConfig(*sizes))
  config = DecoderConfig(*sizes, experts=ExpertsConfig(1, 1))
  model = make_decoder(config)
  params = sharded_experts.params_of(model)
  batch = sharded_experts.batch()
  dense_params = {
    path: params[path][:, 0] if path.split('/')[-1] in ('gate', 'up', 'down')
    else params[path]
    for path in api.check_model(dense)
  }  # fmt: skip
  loss, metrics = jax.jit(model.loss)(api.unflatten(params), batch, None)
  dense_loss = jax.jit(dense.loss)
  expected, _ = dense_loss(api.unflatten(dense_params), batch, None)
  said = api.reported_loss(loss, metrics)
  np.testing.assert_allclose(said, expected, rtol=1e-6)
  assert loss > said, 'the auxiliary losses are not in the loss'


@pytest.fixture(scope='module')
def on_one():
  """Loss, metrics and gradients without any mesh."""
  model = make_decoder(CONFIG)
  params = api.unflatten(sharded_experts.params_of(model))
  return jax.jit(sharded_experts.step(model))(params, sharded_experts.batch())


@pytest.fixture(scope='module')
def on_mesh():
  """Returns what the script prints in a process with eight devices."""
  done = python(
    *(sharded_experts.__file__, *MESH.split('x')),
    JAX_NUM_CPU_DEVICES='8',
    JAX_PLATFORMS='cpu',
    PYTHONPATH=str(ROOT),
    XLA_FLAGS='',
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)[MESH] | {'stderr': done.stderr}


def test_a_step_on_a_mesh_is_that_of_one_device(on_one, on_mesh):
  loss, metrics, gradients = on_one
  found = on_mesh
  np.testing.assert_allclose(found['loss'], loss, rtol=1e-6)
  for name, value in metrics.items():
    np.testing.assert_allclose(
      found['metrics'][name], value, rtol=1e-5, err_msg=name
    )
  for path, gradient in gradients.items():
    np.testing.assert_allclose(
      found['gradients'][path],
      np.ravel(gradient),
      rtol=1e-4,
      atol=1e-6,
      err_msg=path,
    )


def test_a_device_holds_only_its_experts(on_mesh):
  held = on_mesh['held']
  assert held['tokens'] == 1 / 4, 'rows are not spread over fsdp and expert'
  for name in ('gate', 'up', 'down'):
    assert held[f'layers/mlp/{name}'] == 0.125
  assert held['layers/mlp/router'] == 1 / 2


def test_nothing_of_a_batch_is_gathered_over_experts(on_mesh):
  shapes = on_mesh['gathered']
  assert shapes, 'the counts of rows are gathered: none was found'
  for shape in shapes:
    sizes = [int(size) for size in re.findall(r'\d+(?=[,\]])', shape)]
    assert all(size % sharded_experts.LENGTH for size in sizes), shapes


def test_the_partitioner_never_gives_up(on_mesh):
  assert 'Involuntary full rematerialization' not in on_mesh['stderr']
