# SPDX-License-Identifier: Apache-2.0
"""The parts of a layer: RMSNorm, RoPE, grouped-query attention, gated MLP.

Logical axes and roles of parameters are declared where they are made. Shapes
here are one layer's; `Decoder` makes the layers under `nnx.vmap`, which adds
the leading axis 'layers'.

Suffixes of arrays give their shape:
  B batch, L length, D d_model, N heads, K kv_heads, H head_dim, F d_ff,
  C half of head_dim, 1 one.
"""

import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from diloco.models import api, decoder_config
from diloco.models.decoder_config import ADAPTED, DecoderConfig
from diloco.models.sharding import TENSOR, is_cut, platform

ACTIVATIONS = {
  'silu': jax.nn.silu,
  'gelu': functools.partial(jax.nn.gelu, approximate=False),
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
}
assert ACTIVATIONS.keys() == {*decoder_config.ACTIVATIONS}
# Queries [B, L, N, H], keys and values [B, L, K, H] -> [B, L, N, H].
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Attention(nnx.Module):
  """Causal attention; each key head serves heads / kv_heads query heads."""

  def __init__(self, config: DecoderConfig, key: jax.Array):
    width, head_dim = config.d_model, config.head_dim
    heads, kv_heads = config.heads, config.kv_heads
    keys = jax.random.split(key, 4)
    std = 1 / math.sqrt(width)
    self.config = config
    self.norm = stacked_scale(config)
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
    if config.qkv_bias:
      self.query_bias = stacked((heads * head_dim,), 0, 'heads')
      self.key_bias = stacked((kv_heads * head_dim,), 0, 'kv_heads')
      self.value_bias = stacked((kv_heads * head_dim,), 0, 'kv_heads')
    if config.qk_norm:
      self.query_norm = stacked((head_dim,), 1 - config.norm_offset, None)
      self.key_norm = stacked((head_dim,), 1 - config.norm_offset, None)
    add_adapters(self, 'attention', config, key)

  def __call__(
    self, x_BLD: jax.Array, angles: jax.Array, attend: Attend
  ) -> jax.Array:
    config = self.config
    x_BLD = rms_norm(x_BLD, self.norm[...], config)
    q_BLNH, k_BLKH, v_BLKH = products(
      x_BLD, self.query[...], self.key[...], self.value[...]
    )
    q_BLNH = adapted(self, 'query', x_BLD, q_BLNH)
    k_BLKH = adapted(self, 'key', x_BLD, k_BLKH)
    v_BLKH = adapted(self, 'value', x_BLD, v_BLKH)
    if config.qkv_bias:
      q_BLNH = biased(q_BLNH, self.query_bias[...])
      k_BLKH = biased(k_BLKH, self.key_bias[...])
      v_BLKH = biased(v_BLKH, self.value_bias[...])
    if config.qk_norm:
      q_BLNH = rms_norm(q_BLNH, self.query_norm[...], config)
      k_BLKH = rms_norm(k_BLKH, self.key_norm[...], config)
    y_BLNH = attend(rope(q_BLNH, angles), rope(k_BLKH, angles), v_BLKH)
    out_NHD = self.out[...].astype(config.dtype)
    out_BLD = jnp.einsum('BLNH,NHD->BLD', y_BLNH, out_NHD)
    return adapted(self, 'out', y_BLNH, out_BLD)


class Mlp(nnx.Module):
  """down(silu(gate(x)) · up(x)), known as SwiGLU, or with a GELU."""

  def __init__(self, config: DecoderConfig, key: jax.Array):
    width, d_ff = config.d_model, config.d_ff
    keys = jax.random.split(key, 3)
    std = 1 / math.sqrt(width)
    self.config = config
    self.norm = stacked_scale(config)
    self.gate = stacked_normal(keys[0], (width, d_ff), std, ('embed', 'mlp'))
    self.up = stacked_normal(keys[1], (width, d_ff), std, ('embed', 'mlp'))
    self.down = stacked_normal(
      keys[2],
      (d_ff, width),
      residual_std(d_ff, config.layers),
      ('mlp', 'embed'),
    )
    add_adapters(self, 'mlp', config, key)

  def __call__(self, x_BLD: jax.Array) -> jax.Array:
    x_BLD = rms_norm(x_BLD, self.norm[...], self.config)
    gate_BLF, up_BLF = products(x_BLD, self.gate[...], self.up[...])
    gate_BLF = adapted(self, 'gate', x_BLD, gate_BLF)
    up_BLF = adapted(self, 'up', x_BLD, up_BLF)
    y_BLF = ACTIVATIONS[self.config.activation](gate_BLF) * up_BLF
    down_FD = self.down[...].astype(self.config.dtype)
    y_BLD = jnp.einsum('BLF,FD->BLD', y_BLF, down_FD)
    return adapted(self, 'down', y_BLF, y_BLD)


def add_adapters(
  module: nnx.Module, block: str, config: DecoderConfig, key: jax.Array
):
  """Gives a layer's matrices the A and B of LoRA, if `lora_rank` asks for it.

  A is drawn, B is 0: the model starts as what it was.
  """
  if not config.lora_rank:
    return
  rank = config.lora_rank
  for number, (name, inputs) in enumerate(ADAPTED[block].items()):
    matrix = getattr(module, name)
    shape, axes = matrix.shape, matrix.axes[1:]
    a = stacked_normal(
      jax.random.fold_in(key, number),
      (*shape[:inputs], rank),
      1 / math.sqrt(math.prod(shape[:inputs])),
      (*axes[:inputs], None),
    )
    b = stacked((rank, *shape[inputs:]), 0.0, None, *axes[inputs:])
    setattr(module, f'{name}_a', a)
    setattr(module, f'{name}_b', b)


def adapted(
  module: nnx.Module, name: str, x: jax.Array, y: jax.Array
) -> jax.Array:
  """Returns y + α/r · x · A · B, where y is x times the matrix `name`."""
  if not module.config.lora_rank:
    return y
  a, b = (getattr(module, f'{name}_{end}')[...].astype(x.dtype) for end in 'ab')
  low = jnp.tensordot(x, a, a.ndim - 1) * module.config.lora_scale
  return y + jnp.tensordot(low, b, 1)


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


def biased(x_BLNH: jax.Array, bias: jax.Array) -> jax.Array:
  """x + bias [N · H], in the dtype of x."""
  bias_11NH = bias.reshape(1, 1, *x_BLNH.shape[2:])
  return x_BLNH + bias_11NH.astype(x_BLNH.dtype)


def rms_norm(
  x_BLD: jax.Array, scale_D: jax.Array, config: DecoderConfig
) -> jax.Array:
  """x / √(mean(x²) + ε) · (offset + scale), computed in f32, in the dtype of x.

  Args:
    x_BLD: or with more axes; the mean is that over the last one.
  """
  x32_BLD = x_BLD.astype(jnp.float32)
  square_BL1 = jnp.mean(jnp.square(x32_BLD), axis=-1, keepdims=True)
  normed_BLD = x32_BLD * jax.lax.rsqrt(square_BL1 + config.norm_epsilon)
  if config.norm_offset:
    scale_D = config.norm_offset + scale_D
  scale_11D = jnp.expand_dims(scale_D, range(x_BLD.ndim - 1))
  return (normed_BLD * scale_11D).astype(x_BLD.dtype)


def rope_angles(positions: jax.Array, config: DecoderConfig) -> jax.Array:
  """position · theta^(−2c / head_dim) for each pair c, in f32.

  Scaled 'linear', wavelengths are `rope_factor` times as long; as 'llama3', the
  long ones are, the short ones stay, and those between are in between.

  Args:
    positions: [B, L], or [1, L]; the result has the axis C more.
  """
  pairs_C = jnp.arange(config.head_dim // 2, dtype=jnp.float32)
  frequency_C = config.rope_theta ** (-2.0 * pairs_C / config.head_dim)
  if config.rope_scaling != 'none':
    share_C = 0.0  # Of what stays as it is.
    if config.rope_scaling == 'llama3':
      waves_C = config.rope_length * frequency_C / (2 * math.pi)
      share_C = (waves_C - config.rope_low) / (
        config.rope_high - config.rope_low
      )
      share_C = jnp.clip(share_C, 0, 1)
    frequency_C *= share_C + (1 - share_C) / config.rope_factor
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


def stacked(
  shape: tuple[int, ...], value: float, *axes: str | None
) -> nnx.Param:
  """Makes one layer's parameter of equal values, as `stacked_normal` does."""
  filled = jnp.full(shape, value, jnp.float32)
  return nnx.Param(filled, axes=('layers', *axes), role=api.STACKED)


def stacked_scale(config: DecoderConfig) -> nnx.Param:
  """Makes the scale of one layer's norm of the stream."""
  return stacked((config.d_model,), 1 - config.norm_offset, 'norm')
