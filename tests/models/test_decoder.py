# SPDX-License-Identifier: Apache-2.0
"""The decoder: against numpy, against itself, against what it promises."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.models import api
from diloco.models.decoder import make_decoder
from diloco.models.decoder_config import REMATS, DecoderConfig

CONFIG = DecoderConfig(
  vocab=19, layers=3, d_model=16, heads=4, kv_heads=2, head_dim=6, d_ff=24
)
# Draws of random numbers are slow to compile, and then soon done.
_jit = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)


@pytest.fixture(autouse=True)
def _no_rank_promotion():
  with jax.numpy_rank_promotion('raise'):
    yield


def _tokens(config, rows=2, length=12, seed=1):
  key = jax.random.key(seed)
  return jax.random.randint(key, (rows, length + 1), 0, config.vocab)


@functools.cache  # Compiled once; several tests compare with the same.
def _loss_and_gradients(config):
  model = make_decoder(config)
  params = _jit(model.init)(jax.random.key(0))
  batch = {'tokens': _tokens(config)}
  gradient = _jit(jax.value_and_grad(model.loss, has_aux=True))
  (loss, _), gradients = gradient(params, batch, jax.random.key(0))
  return loss, api.flatten(gradients)


# An independent forward pass: one row, f64, loops over positions and heads.


def _numpy_norm(x, scale):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def _numpy_turn(vector, position, theta):
  half = len(vector) // 2
  pair = vector[:half] + 1j * vector[half:]
  angle = position * theta ** (-np.arange(half) / half)
  turned = pair * np.exp(1j * angle)
  return np.concatenate([turned.real, turned.imag])


def _numpy_attention(x, layer, config):
  weights = layer['attention']
  x = _numpy_norm(x, weights['norm'])
  out = np.zeros((len(x), config.d_model))
  for head in range(config.heads):
    group = head // (config.heads // config.kv_heads)
    query = x @ weights['query'][:, head]
    key = x @ weights['key'][:, group]
    value = x @ weights['value'][:, group]
    query = [_numpy_turn(q, i, config.rope_theta) for i, q in enumerate(query)]
    key = [_numpy_turn(k, i, config.rope_theta) for i, k in enumerate(key)]
    for i in range(len(x)):
      scores = np.array([query[i] @ key[j] for j in range(i + 1)])
      chance = np.exp(scores / math.sqrt(config.head_dim))
      mixed = (chance / chance.sum()) @ value[: i + 1]
      out[i] += mixed @ weights['out'][head]
  return out


def _numpy_mlp(x, layer):
  weights = layer['mlp']
  x = _numpy_norm(x, weights['norm'])
  gate = x @ weights['gate']
  return (gate / (1 + np.exp(-gate)) * (x @ weights['up'])) @ weights['down']


def _numpy_logits(params, tokens, config):
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  x = params['embedding'][tokens] * math.sqrt(config.d_model)
  for number in range(config.layers):
    layer = jax.tree.map(lambda leaf: leaf[number], params['layers'])  # noqa: B023
    x = x + _numpy_attention(x, layer, config)
    x = x + _numpy_mlp(x, layer)
  x = _numpy_norm(x, params['norm'])
  if config.tied:
    return x @ params['embedding'].T / math.sqrt(config.d_model)
  return x @ params['head'].T


@pytest.mark.parametrize(
  ('kv_heads', 'tied'), [(1, False), (2, True), (4, False)]
)
def test_logits_and_loss_equal_a_numpy_implementation(kv_heads, tied):
  config = dataclasses.replace(CONFIG, kv_heads=kv_heads, tied=tied)
  model = make_decoder(config)
  params = _jit(model.init)(jax.random.key(0))
  # Scales of one would hide a norm that forgets them.
  params = jax.tree.map(
    lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(7), leaf.shape),
    params,
  )
  tokens = _tokens(config)
  batch = {'tokens': tokens}
  loss, metrics = _jit(model.loss)(params, batch, jax.random.key(0))

  tokens = np.asarray(tokens)
  losses, hits = [], []
  for row in tokens:
    logits = _numpy_logits(params, row[:-1], config)
    chance = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    losses.append(-np.log(chance[np.arange(len(row) - 1), row[1:]]))
    hits.append(logits.argmax(axis=-1) == row[1:])
  np.testing.assert_allclose(loss, np.mean(losses), rtol=2e-6)
  np.testing.assert_allclose(metrics['accuracy'], np.mean(hits), rtol=1e-6)


@pytest.mark.parametrize('remat', [name for name in REMATS if name != 'none'])
def test_remat_changes_no_gradient(remat):
  loss, gradients = _loss_and_gradients(CONFIG)
  config = dataclasses.replace(CONFIG, remat=remat)
  remat_loss, remat_gradients = _loss_and_gradients(config)
  np.testing.assert_allclose(remat_loss, loss, rtol=1e-6)
  for path, gradient in gradients.items():
    np.testing.assert_allclose(
      remat_gradients[path], gradient, rtol=1e-4, atol=1e-6, err_msg=path
    )


@pytest.mark.parametrize('remat', ['full', 'offload'])
def test_offload_keeps_the_inputs_of_layers_on_the_host(remat):
  """As lowered for a TPU; on a CPU it is the same memory."""
  model = make_decoder(dataclasses.replace(CONFIG, remat=remat))
  params = jax.eval_shape(model.init, jax.random.key(0))
  tokens = jnp.zeros((2, 9), jnp.int32)
  gradient = jax.jit(
    jax.grad(lambda params: model.loss(params, {'tokens': tokens}, None)[0])
  )
  text = gradient.trace(params).lower(lowering_platforms=('tpu',)).as_text()
  assert ('pinned_host' in text) == (remat == 'offload')


def test_bfloat16_is_close_to_float32():
  loss, gradients = _loss_and_gradients(CONFIG)
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  coarse_loss, coarse_gradients = _loss_and_gradients(config)
  assert coarse_loss.dtype == jnp.float32
  np.testing.assert_allclose(coarse_loss, loss, rtol=5e-3)
  for path, gradient in gradients.items():
    coarse = coarse_gradients[path]
    assert coarse.dtype == jnp.float32, path
    error = np.linalg.norm(coarse - gradient) / np.linalg.norm(gradient)
    assert 0 < error < 0.05, f'{path}: {error=}'


@pytest.mark.parametrize(('kv_heads', 'tied'), [(1, False), (4, True)])
def test_tables_and_count_fit_the_parameters(kv_heads, tied):
  config = dataclasses.replace(CONFIG, kv_heads=kv_heads, tied=tied)
  model = make_decoder(config)
  shapes = api.check_model(model)
  count = sum(math.prod(leaf.shape) for leaf in shapes.values())
  assert count == config.parameters
  found = {
    path: (leaf.shape, model.roles[path]) for path, leaf in shapes.items()
  }
  assert config.arrays == found
  assert ('head' in shapes) == (not tied)
  assert {leaf.dtype for leaf in shapes.values()} == {jnp.dtype('float32')}


@pytest.mark.parametrize('tied', [False, True])
def test_first_loss_is_that_of_guessing(tied):
  config = DecoderConfig(256, 4, 64, 4, 2, 16, 128, tied=tied)
  model = make_decoder(config)
  params = _jit(model.init)(jax.random.key(0))
  batch = {'tokens': _tokens(config, rows=4, length=64)}
  loss, _ = _jit(model.loss)(params, batch, jax.random.key(0))
  assert abs(loss - math.log(256)) < 0.05


def test_init_is_a_function_of_the_key():
  init = _jit(make_decoder(CONFIG).init)
  first, again, other = (
    api.flatten(init(jax.random.key(seed))) for seed in (0, 0, 1)
  )
  for path, leaf in first.items():
    np.testing.assert_array_equal(leaf, again[path])
    if not path.endswith('norm'):
      assert not np.array_equal(leaf, other[path]), path
  layers = first['layers/mlp/up']
  assert not np.array_equal(layers[0], layers[1]), 'layers share their draws'


@pytest.mark.parametrize(
  ('change', 'text'),
  [
    ({'kv_heads': 3}, 'kv_heads=3 does not divide heads=4'),
    ({'head_dim': 7}, 'head_dim=7, must be even'),
    ({'remat': 'some'}, r"remat='some', must be one of \('none', 'full'"),
    ({'dtype': 'float16'}, "dtype='float16', must be one of"),
    ({'layers': 0}, 'layers=0, must be at least 1'),
    ({'rope_theta': 1.0}, 'rope_theta=1.0, must be finite and above 1'),
  ],
)
def test_a_wrong_size_is_refused(change, text):
  with pytest.raises(ValueError, match=text):
    dataclasses.replace(CONFIG, **change)


def test_one_token_is_too_few_to_predict():
  model = make_decoder(CONFIG)
  params = _jit(model.init)(jax.random.key(0))
  with pytest.raises(ValueError, match=r'\(2, 1\)'):
    model.loss(params, {'tokens': jnp.zeros((2, 1), int)}, jax.random.key(0))
