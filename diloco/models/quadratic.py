# SPDX-License-Identifier: Apache-2.0
"""A quadratic model: no language model, but many parameters and cheap steps.

For measurements in which a step's own computation does not matter, such as what
a step waits for when another process dies. Its loss is not a cross-entropy and
its tokens have no meaning; but different batches pull in different directions,
so that learners drift apart and merging has an effect.

Suffixes of arrays give their shape:
  N layers, D d_model, F d_ff, B batch, L length.
"""

import math

import jax
import jax.numpy as jnp

from diloco.models import api

NOISE = 0.5  # E‖ξ‖ / E‖θ‖ at init: ends at about a quarter of the first loss.
PATH = 'layers/kernel'


def make_bowl(layers: int, d_model: int, d_ff: int) -> api.Model:
  """½·‖θ − ξ(batch)‖² with θ of shape [layers, d_model, d_ff].

  The gradient is θ − ξ(batch). ξ is drawn anew for each batch, from the batch's
  tokens and nothing else: of rank one in each layer, with mean 0, so the
  minimum is at θ = 0. The expected loss is 1 at init.

  Raises:
    ValueError: a size is less than 1.
  """
  shape = (layers, d_model, d_ff)
  if min(shape) < 1:
    raise ValueError(f'bowl: {layers=}, {d_model=}, {d_ff=}, must be ≥ 1')
  # E‖θ‖² + E‖ξ‖² = 2 at init, shared as 1 : NOISE².
  deviation = math.sqrt(2 / (1 + NOISE**2) / math.prod(shape))

  def init(key):
    return {'layers': {'kernel': deviation * jax.random.normal(key, shape)}}

  def loss(params, batch, key):
    del key  # The step's key is unused: the same batch must pull the same way.
    theta_NDF = params['layers']['kernel']
    xi_NDF = NOISE * deviation * _direction(batch['tokens'], shape)
    return 0.5 * jnp.sum(jnp.square(theta_NDF - xi_NDF)), {}

  return api.Model(
    init=init,
    loss=loss,
    axes={PATH: ('layers', 'embed', 'mlp')},
    roles={PATH: api.STACKED},
  )


def _direction(tokens_BL: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
  """Returns entries of mean 0 and variance 1, which only tokens determine."""
  layers, d_model, d_ff = shape
  weights_BL = _hash(jnp.arange(tokens_BL.size, dtype=jnp.uint32)) | 1
  tokens_BL = tokens_BL.astype(jnp.uint32).reshape(-1)
  drawn = jax.random.key(jnp.sum(_hash(tokens_BL * weights_BL)))
  left, right = jax.random.split(drawn)
  left_ND = jax.random.normal(left, (layers, d_model))
  right_NF = jax.random.normal(right, (layers, d_ff))
  return left_ND[:, :, None] * right_NF[:, None, :]


def _hash(x: jax.Array) -> jax.Array:
  """Mixes the bits of uint32 values, so that their sums rarely collide."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)
