# SPDX-License-Identifier: Apache-2.0
"""Attention by each name is the same function; splash lowers to its kernel."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from diloco.models.attention import ATTENTIONS, Visible, attend
from diloco.models.decoder_config import AUTO

ROWS, WIDTH = 2, 128
CASES = {
  'one token': {'length': 1},
  'one less than a block': {'length': 127},
  'a block': {'length': 128},
  'many': {'length': 1000, 'heads': (8, 1)},
  'two documents': {'length': 200, 'documents': True},
  'window': {'length': 200, 'window': 50},
  'cap': {'length': 200, 'cap': 5.0},
  'all of it': {'length': 200, 'documents': True, 'window': 70, 'cap': 5.0},
}


def _operands(
  length, heads=(4, 2), dtype='float32', documents=False, **visible
):
  """Returns q, k, v, a direction for gradients, and what is visible."""
  heads, kv_heads = heads
  keys = jax.random.split(jax.random.key(length), 4)
  q, k, v, along = (
    jax.random.normal(key, (ROWS, length, count, WIDTH)).astype(dtype)
    for key, count in zip(keys, (heads, kv_heads, kv_heads, heads))
  )
  segments = None
  if documents:  # In each row, at another place.
    ends = jnp.array([[length // 3], [length // 2]])
    segments = (jnp.arange(length)[None, :] >= ends).astype(jnp.int32)
  return (q, k, v), along, Visible(segments_BL=segments, **visible)


def _all(name, operands, along, visible):
  """Returns the result and the gradients of its part along a direction."""

  def part(*operands):
    y = attend(name, *operands, visible)
    return jnp.sum((y * along).astype(jnp.float32)), y

  gradient = jax.jit(jax.value_and_grad(part, (0, 1, 2), has_aux=True))
  (_, y), gradients = gradient(*operands)
  return [np.asarray(x, np.float32) for x in (y, *gradients)]


def _numpy(operands, visible):
  """Computes it in f64, query by query."""
  q, k, v = (np.asarray(x, np.float64) for x in operands)
  y = np.zeros_like(q)
  group = q.shape[2] // k.shape[2]
  for b, n, i in itertools.product(
    *map(range, (len(q), q.shape[2], q.shape[1]))
  ):
    first = max(0, i + 1 - visible.window) if visible.window else 0
    seen = np.arange(first, i + 1)
    if visible.segments_BL is not None:
      ids = np.asarray(visible.segments_BL[b])
      seen = seen[ids[seen] == ids[i]]
    scores = k[b, seen, n // group] @ q[b, i, n] / np.sqrt(q.shape[3])
    if visible.cap:
      scores = visible.cap * np.tanh(scores / visible.cap)
    powers = np.exp(scores - scores.max())
    y[b, i, n] = powers / powers.sum() @ v[b, seen, n // group]
  return y


@pytest.mark.parametrize('case', [name for name in CASES if name != 'many'])
def test_xla_is_a_numpy_implementation(case):
  operands, _, visible = _operands(**CASES[case])
  y = attend('xla', *operands, visible)
  np.testing.assert_allclose(y, _numpy(operands, visible), atol=2e-5)


@pytest.mark.parametrize('case', CASES)
def test_splash_is_xla_in_f32(case):
  operands = _operands(**CASES[case])
  for ours, theirs in zip(_all('splash', *operands), _all('xla', *operands)):
    np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize('case', ['a block', 'all of it'])
def test_splash_is_xla_in_bf16(case):
  operands = _operands(**CASES[case], dtype='bfloat16')
  for ours, theirs in zip(_all('splash', *operands), _all('xla', *operands)):
    np.testing.assert_allclose(ours, theirs, atol=2e-2, rtol=2e-2)


def _lowered(name, platform, dtype):
  """Returns the module of forward and backward pass for a platform."""
  device = jax.sharding.AbstractDevice(
    device_kind=platform, num_cores=1, platform=platform
  )
  mesh = jax.sharding.AbstractMesh((1,), ('fsdp',), abstract_device=device)
  operands, along, visible = _operands(256, dtype=dtype)

  def part(*operands):
    return jnp.sum(attend(name, *operands, visible) * along)

  with jax.sharding.use_abstract_mesh(mesh):
    gradient = jax.jit(jax.grad(part, (0, 1, 2)))
    traced = gradient.trace(*operands)
  return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize('name', ['splash', AUTO])
def test_on_a_tpu_it_is_a_mosaic_kernel(name):
  text = _lowered(name, 'tpu', 'float32')
  assert text.count('tpu_custom_call') == 3  # Forward, and two backward.
  assert '256x256' not in text


def test_on_a_cpu_it_is_no_kernel():
  assert 'custom_call' not in _lowered(AUTO, 'cpu', 'float32')


def test_cudnn_is_its_kernel(monkeypatch):
  """Only lowered: no GPU has run it."""
  # JAX asks which cuDNN is here, even where it only lowers.
  monkeypatch.setattr(
    fused_attention_stablehlo, 'check_cudnn_version', lambda: 91000
  )
  operands, along, visible = _operands(256, dtype='bfloat16')

  def part(*operands):
    return jnp.sum(attend('cudnn', *operands, visible) * along)

  traced = jax.jit(jax.grad(part, (0, 1, 2))).trace(*operands)
  text = traced.lower(lowering_platforms=('cuda',)).as_text()
  assert '__cudnn$fmha' in text


def test_auto_takes_what_computes_a_cap():
  asked = 'gpu', 'bfloat16'
  assert ATTENTIONS['cudnn'].runs(*asked, 0.0)
  assert not ATTENTIONS['cudnn'].runs(*asked, 5.0)
  assert not ATTENTIONS['cudnn'].runs('gpu', 'float32', 0.0)
