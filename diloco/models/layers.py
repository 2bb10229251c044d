# SPDX-License-Identifier: Apache-2.0
"""The parts of a layer: RMSNorm, RoPE, grouped-query attention, gated MLP.

Logical axes and roles of parameters are declared where they are made. Shapes
here are one layer's; `Decoder` makes the layers under `nnx.vmap`, which adds
the leading axis 'layers'.

Suffixes of arrays give their shape:
  B batch, L length, D d_model, N heads, K kv_heads, H head_dim, F d_ff,
  C half of head_dim, 1 one.
"""

import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from diloco.models import api
from diloco.models.decoder_config import DecoderConfig
from diloco.models.sharding import TENSOR, is_cut, platform

NORM_EPSILON = 1e-6
# Queries [B, L, N, H], keys and values [B, L, K, H] -> [B, L, N, H].
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Attention(nnx.Module):
  """Causal attention; each key head serves heads / kv_heads query heads."""

  def __init__(self, config: DecoderConfig, key: jax.Array):
    width, head_dim = config.d_model, config.head_dim
    heads, kv_heads = config.heads, config.kv_heads
    keys = jax.random.split(key, 4)
    std = 1 / math.sqrt(width)
    self.dtype = config.dtype
    self.norm = stacked_ones(width)
    self.query = stacked_normal(
      keys[0], (width, heads, head_dim), std, ('embed', 'heads', None)
    )
    self.key = stacked_normal(
      keys[1], (width, kv_heads, head_dim), std, ('embed', 'kv_heads', None)
    )
    self.value = stacked_normal(
      keys[2], (width, kv_heads, head_dim), std, ('embed', 'kv_heads', None)
    )
    self.out = stacked_normal(
      keys[3],
      (heads, head_dim, width),
      residual_std(heads * head_dim, config.layers),
      ('heads', None, 'embed'),
    )

  def __call__(
    self, x_BLD: jax.Array, angles: jax.Array, attend: Attend
  ) -> jax.Array:
    x_BLD = rms_norm(x_BLD, self.norm[...])
    q_BLNH, k_BLKH, v_BLKH = products(
      x_BLD, self.query[...], self.key[...], self.value[...]
    )
    y_BLNH = attend(rope(q_BLNH, angles), rope(k_BLKH, angles), v_BLKH)
    return jnp.einsum('BLNH,NHD->BLD', y_BLNH, self.out[...].astype(self.dtype))


class Mlp(nnx.Module):
  """down(silu(gate(x)) · up(x)), known as SwiGLU."""

  def __init__(self, config: DecoderConfig, key: jax.Array):
    width, d_ff = config.d_model, config.d_ff
    keys = jax.random.split(key, 3)
    std = 1 / math.sqrt(width)
    self.dtype = config.dtype
    self.norm = stacked_ones(width)
    self.gate = stacked_normal(keys[0], (width, d_ff), std, ('embed', 'mlp'))
    self.up = stacked_normal(keys[1], (width, d_ff), std, ('embed', 'mlp'))
    self.down = stacked_normal(
      keys[2],
      (d_ff, width),
      residual_std(d_ff, config.layers),
      ('mlp', 'embed'),
    )

  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    x_BLD = rms_norm(x_BLD, self.norm[...])
    gate_BLF, up_BLF = products(x_BLD, self.gate[...], self.up[...])
    return jnp.einsum(
      'BLF,FD->BLD',
      jax.nn.silu(gate_BLF) * up_BLF,
      self.down[...].astype(self.dtype),
    )


def products(x_BLD: jax.Array, *matrices: jax.Array) -> list[jax.Array]:
  """x · matrix of several matrices [D, …], as one product where that is less.

  On a CPU it is: the same FLOPs take two thirds of the time. Where the last
  axes are cut, a matrix of all would have to be put together over devices.
  """
  matrices = [matrix.astype(x_BLD.dtype) for matrix in matrices]
  if platform() != 'cpu' or is_cut(TENSOR):
    return [jnp.tensordot(x_BLD, matrix, 1) for matrix in matrices]
  flat = [matrix.reshape(matrix.shape[0], -1) for matrix in matrices]
  ends = list(itertools.accumulate(each.shape[1] for each in flat))
  y = jnp.tensordot(x_BLD, jnp.concatenate(flat, axis=1), 1)
  parts = jnp.split(y, ends[:-1], axis=-1)
  return [
    part.reshape(*x_BLD.shape[:-1], *matrix.shape[1:])
    for part, matrix in zip(parts, matrices)
  ]


def rms_norm(x_BLD: jax.Array, scale_D: jax.Array) -> jax.Array:
  """x / √(mean(x²) + ε) · scale, computed in f32, in the dtype of x."""
  x32_BLD = x_BLD.astype(jnp.float32)
  square_BL1 = jnp.mean(jnp.square(x32_BLD), axis=-1, keepdims=True)
  normed_BLD = x32_BLD * jax.lax.rsqrt(square_BL1 + NORM_EPSILON)
  return (normed_BLD * scale_D[None, None, :]).astype(x_BLD.dtype)


def rope_angles(positions: jax.Array, head_dim: int, theta: float) -> jax.Array:
  """position · theta^(−2c / head_dim) for each pair c, in f32.

  Args:
    positions: [B, L], or [1, L]; the result has the axis C more.
  """
  pairs_C = jnp.arange(head_dim // 2, dtype=jnp.float32)
  frequency_C = theta ** (-2.0 * pairs_C / head_dim)
  return positions.astype(jnp.float32)[..., None] * frequency_C[None, None]


def rope(x_BLNH: jax.Array, angles: jax.Array) -> jax.Array:
  """Rotates each head's pairs (c, c + C) by their position's angle, in f32."""
  cos, sin = (f(angles)[:, :, None, :] for f in (jnp.cos, jnp.sin))
  a_BLNC, b_BLNC = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
  turned_BLNH = jnp.concatenate(
    [a_BLNC * cos - b_BLNC * sin, b_BLNC * cos + a_BLNC * sin], axis=-1
  )
  return turned_BLNH.astype(x_BLNH.dtype)


def residual_std(fan_in: int, layers: int) -> float:
  """Standard deviation of a matrix whose result enters the residual stream."""
  # 2·layers branches are added to the stream; together they have unit variance.
  return 1 / math.sqrt(fan_in * 2 * layers)


def normal(
  key: jax.Array,
  shape: tuple[int, ...],
  std: float,
  *,
  axes: tuple[str | None, ...],
  role: str,
) -> nnx.Param:
  """Draws an f32 parameter from N(0, std²), and enters it in both tables."""
  value = std * jax.random.normal(key, shape, jnp.float32)
  return nnx.Param(value, axes=axes, role=role)


def stacked_normal(
  key: jax.Array,
  shape: tuple[int, ...],
  std: float,
  axes: tuple[str | None, ...],
) -> nnx.Param:
  """Draws one layer's parameter; `vmap` adds the leading axis 'layers'."""
  axes = ('layers', *axes)
  return normal(key, shape, std, axes=axes, role=api.STACKED)


def stacked_ones(width: int) -> nnx.Param:
  """Makes the scale of one layer's norm."""
  axes = ('layers', 'norm')
  return nnx.Param(jnp.ones((width,)), axes=axes, role=api.STACKED)
