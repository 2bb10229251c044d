# SPDX-License-Identifier: Apache-2.0
"""The inner step against AdamW in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.config.sections import InnerConfig
from diloco.numerics import inner
from diloco.numerics.fragments import TensorSpec
from diloco.numerics.optimizers import INNER

SHAPES = {'w': (3, 4), 'norm': (4,), 'layers/norm': (2, 4)}
SPECS = {
  'w': TensorSpec((3, 4)),
  'norm': TensorSpec((4,)),
  'layers/norm': TensorSpec((2, 4), 'stacked'),
}
RNG = jax.random.key(0)


def normal(rng, dtype=jnp.float32):
  return {
    k: jnp.asarray(rng.standard_normal(s), dtype) for k, s in SHAPES.items()
  }


def linear(params, batch, rng):
  """Σ batch · θ: the gradient is the batch."""
  del rng
  terms = jax.tree.map(lambda p, b: jnp.sum(p * b), params, batch)
  return sum(jax.tree.leaves(terms)), {'accuracy': jnp.asarray(1, jnp.bfloat16)}


def run(optimizer, params, batches, lrs):
  step = jax.jit(inner.TrainStep(linear, optimizer))
  state = optimizer.init(params)
  for batch, lr in zip(batches, lrs):
    params, state, metrics = step(params, state, batch, lr, RNG)
  return params, metrics


def reference_adamw(params, grads, lrs, *, decay, clip, decayed):
  """Loshchilov & Hutter, in f64."""
  params = {k: np.float64(v) for k, v in params.items()}
  m = {k: 0 * v for k, v in params.items()}
  v = {k: 0 * x for k, x in params.items()}
  for t, (grad, lr) in enumerate(zip(grads, lrs), 1):
    norm = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in grad.values()))
    for k in params:
      g = np.float64(grad[k]) * (min(1, clip / norm) if clip else 1)
      m[k] = 0.9 * m[k] + 0.1 * g
      v[k] = 0.95 * v[k] + 0.05 * g**2
      update = m[k] / (1 - 0.9**t) / (np.sqrt(v[k] / (1 - 0.95**t)) + 1e-8)
      update += decay * params[k] * (k in decayed)
      params[k] = params[k] - lr * update
  return params


def test_moments_in_bfloat16_are_stored_so_and_move_parameters_alike():
  rng = np.random.default_rng(0)
  params, batches = normal(rng), [normal(rng) for _ in range(8)]
  coarse = inner.adamw(specs=SPECS, moments='bfloat16')
  stored = jax.tree.leaves(coarse.init(params))
  assert sum(x.dtype == jnp.bfloat16 for x in stored) == 2 * len(SHAPES)
  exact, _ = run(inner.adamw(specs=SPECS), params, batches, [1e-2] * 8)
  found, _ = run(coarse, params, batches, [1e-2] * 8)
  for path, x in exact.items():
    moved = np.abs(x - params[path]).max()
    difference = np.abs(found[path] - x).max()
    assert 0 < difference < 0.02 * moved, path


@pytest.mark.parametrize('clip_norm', [0.0, 1.0])
@pytest.mark.parametrize(
  ('specs', 'decayed'), [(None, {'w', 'layers/norm'}), (SPECS, {'w'})]
)
def test_adamw_is_its_formula(clip_norm, specs, decayed):
  rng = np.random.default_rng(0)
  params, grads = normal(rng), [normal(rng) for _ in range(10)]
  lrs = [0.1 / (t + 1) for t in range(10)]
  optimizer = inner.adamw(weight_decay=0.3, clip_norm=clip_norm, specs=specs)
  actual, metrics = run(optimizer, params, grads, lrs)
  expected = reference_adamw(
    params, grads, lrs, decay=0.3, clip=clip_norm, decayed=decayed
  )
  for k in SHAPES:
    np.testing.assert_allclose(actual[k], expected[k], rtol=2e-5, atol=1e-6)
  norm = np.sqrt(sum(np.sum(np.square(g)) for g in grads[-1].values()))
  np.testing.assert_allclose(metrics['grad_norm'], norm, rtol=1e-6)


def test_nested_params_decay_as_flat_ones():
  flat = normal(np.random.default_rng(2))
  nested = {'w': flat['w'], 'norm': flat['norm']}
  nested['layers'] = {'norm': flat['layers/norm']}
  assert inner.decays(flat, SPECS) == {
    'w': True,
    'norm': False,
    'layers/norm': False,
  }
  assert inner.decays(nested, SPECS) == {
    'w': True,
    'norm': False,
    'layers': {'norm': False},
  }
  assert inner.decays(flat)['layers/norm'] is True


def test_bf16_params_keep_their_dtype_and_have_f32_moments():
  rng = np.random.default_rng(4)
  params, grad = normal(rng, jnp.bfloat16), normal(rng, jnp.bfloat16)
  optimizer = inner.adamw()
  state = optimizer.init(params)
  after, after_state, _ = inner.TrainStep(linear, optimizer)(
    params, state, grad, jnp.float32(0.1), RNG
  )
  types = jax.tree.map(lambda x: (x.shape, x.dtype), (params, state))
  assert (
    jax.tree.map(lambda x: (x.shape, x.dtype), (after, after_state)) == types
  )
  floats = [x for x in jax.tree.leaves(state) if x.ndim]
  assert floats and all(x.dtype == jnp.float32 for x in floats)


def test_another_learning_rate_does_not_compile_again():
  traces = []

  def loss(params, batch, rng):
    traces.append(1)
    return linear(params, batch, rng)

  rng = np.random.default_rng(5)
  optimizer = inner.adamw()
  step = jax.jit(inner.TrainStep(loss, optimizer))
  params, state = normal(rng), optimizer.init(normal(rng))
  for lr in (0.1, 0.05, 0.0):
    batch = normal(rng)
    params, state, _ = step(params, state, batch, jnp.float32(lr), RNG)
  assert len(traces) == 1


def test_an_averaged_tensor_moves_by_its_gradient_and_nothing_else():
  rng = np.random.default_rng(7)
  params, grads = normal(rng), [normal(rng) for _ in range(3)]
  specs = SPECS | {'layers/norm': TensorSpec((2, 4), 'averaged')}
  optimizer = inner.adamw(specs=specs)
  state = optimizer.init(params)
  assert all(x.shape != (2, 4) for x in jax.tree.leaves(state)), 'moments'
  step = jax.jit(inner.TrainStep(linear, optimizer, specs))
  after = params
  for grad in grads:
    after, state, metrics = step(after, state, grad, 0.0, RNG)
  # The learning rate is 0: all else stays. Moved as it is, above the clip.
  expected = params['layers/norm'] - sum(g['layers/norm'] for g in grads)
  np.testing.assert_allclose(after['layers/norm'], expected, rtol=1e-5)
  np.testing.assert_array_equal(after['w'], params['w'])
  others = [grads[-1][k] for k in ('w', 'norm')]
  norm = np.sqrt(sum(np.sum(np.square(g)) for g in others))
  np.testing.assert_allclose(metrics['grad_norm'], norm, rtol=1e-6)


def rows_mean(params, batch, rng):
  """Mean over rows of (x_r · w)², a loss that is no sum of its parts."""
  del rng
  y = batch['x'] @ params['w']
  return jnp.mean(jnp.square(y)), {'largest': jnp.max(jnp.abs(y[:, 0]))}


@pytest.mark.parametrize('parts', [2, 3, 6])
def test_a_batch_in_parts_is_the_whole_batch_to_rounding(parts):
  rng = np.random.default_rng(8)
  params = {'w': normal(rng)['w']}
  batch = {'x': rng.standard_normal((6, 3)).astype('f')}
  whole = inner.accumulated(rows_mean, params, batch, RNG, 1)
  found = inner.accumulated(rows_mean, params, batch, RNG, parts)
  np.testing.assert_allclose(found[0], whole[0], rtol=1e-6)
  np.testing.assert_allclose(found[2]['w'], whole[2]['w'], rtol=1e-5)
  # A metric that is no mean over rows is the mean of what the parts say.
  rows = np.abs(batch['x'] @ params['w'])[:, 0]
  each = [rows[i::parts].max() for i in range(parts)]
  np.testing.assert_allclose(found[1]['largest'], np.mean(each), rtol=1e-6)


def test_each_part_has_a_key_of_its_own():
  def drawn(params, batch, rng):
    return jnp.mean(params['w']) * 0, {'draw': jax.random.uniform(rng)}

  params, batch = {'w': jnp.ones((3, 4))}, {'x': jnp.ones((4, 3))}
  _, metrics, _ = inner.accumulated(drawn, params, batch, RNG, 2)
  draws = [jax.random.uniform(jax.random.fold_in(RNG, i)) for i in range(2)]
  np.testing.assert_allclose(metrics['draw'], np.mean(draws), rtol=1e-6)
  assert draws[0] != draws[1]


MATRICES = {
  'table': (TensorSpec((8, 6), 'embedding'), ('vocab', 'embed')),
  'norm': (TensorSpec((2, 6), 'stacked'), ('layers', 'norm')),
  'router': (TensorSpec((2, 6, 3), 'stacked'), ('layers', 'embed', 'router')),
  'query': (
    TensorSpec((2, 6, 3, 4), 'stacked'),
    ('layers', 'embed', 'heads', None),
  ),
  'up': (
    TensorSpec((2, 3, 6, 5), 'stacked'),
    ('layers', 'experts', 'embed', 'mlp'),
  ),
  'bias': (TensorSpec((2, 3), 'averaged'), ('layers', None)),
}


def test_muon_turns_each_matrix_and_leaves_the_rest_to_adamw():
  specs = {path: spec for path, (spec, _) in MATRICES.items()}
  axes = {path: names for path, (_, names) in MATRICES.items()}
  section = InnerConfig(weight_decay=0.0, moments='bfloat16')
  rng = np.random.default_rng(1)
  grads = {
    path: jnp.asarray(rng.standard_normal(spec.shape), jnp.float32)
    for path, spec in specs.items()
  }
  updates = {}
  for name in ('adamw', 'muon'):
    optimizer = INNER[name](section, specs, axes)
    state = optimizer.init(grads)
    dtypes = {x.dtype for x in jax.tree.leaves(state) if x.ndim > 1}
    assert dtypes == {jnp.dtype('bfloat16')}
    updates[name], _ = jax.jit(optimizer.update)(grads, state, grads)
  for path in ('table', 'norm', 'router', 'bias'):
    np.testing.assert_array_equal(updates['muon'][path], updates['adamw'][path])
  _assert_turned(updates['muon']['query'], grads['query'], (2, 6, 12))
  _assert_turned(updates['muon']['up'], grads['up'], (6, 6, 5))


def _assert_turned(update, grad, shape):
  """Each matrix U·S·Vᵀ of the gradient became about c·U·Vᵀ.

  All gradients are alike, and so is their momentum. Newton and Schulz's five
  steps leave singular values within 0.6 … 1.3.
  """
  size = inner.MUON_RMS * np.sqrt(max(shape[1:]))
  for got, one in zip(update.reshape(shape), grad.reshape(shape)):
    left, _, right = np.linalg.svd(one, full_matrices=False)
    turned = left.T @ np.asarray(got) @ right.T / size
    assert np.all((np.diag(turned) > 0.6) & (np.diag(turned) < 1.3))
    np.testing.assert_allclose(turned - np.diag(np.diag(turned)), 0, atol=0.03)


def test_what_is_a_matrix_for_muon():
  specs, axes = {'norm': TensorSpec((4,))}, {'norm': ('norm',)}
  out = TensorSpec((2, 3, 4, 6), 'stacked')
  names = ('layers', 'heads', None, 'embed')
  assert inner.matrix_axes(out, names) == ((1, 2), (3,))
  with pytest.raises(ValueError, match='no parameter is a matrix for Muon'):
    INNER['muon'](InnerConfig(), specs, axes)
