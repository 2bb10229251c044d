# SPDX-License-Identifier: Apache-2.0
"""A decoder: embedding, stacked layers, output head, cross-entropy.

Flax NNX in functional style: the layers are stacked at init, split into arrays,
and run by `jax.lax.scan`, so that the compile time does not grow with depth.
Modules stay in here, in `layers` and in `moe`; the result is a `Model`.

Suffixes of arrays give their shape:
  B batch, L length, D d_model, C half of head_dim, V vocab.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from diloco.models import api, layers, routing
from diloco.models.decoder_config import REMATS, DecoderConfig
from diloco.models.moe import Experts
from diloco.models.sharding import constrain


def make_decoder(config: DecoderConfig) -> api.Model:
  """Makes the decoder as a `Model`, whose contract is documented there."""
  structure, state = nnx.split(
    nnx.eval_shape(lambda: Decoder(config, jax.random.key(0))), nnx.Param
  )
  variables = {
    '/'.join(keys): variable for keys, variable in nnx.to_flat_state(state)
  }

  def init(key):
    return nnx.to_pure_dict(nnx.state(Decoder(config, key), nnx.Param))

  def logits(params, tokens_BL):
    return nnx.merge(structure, params)(tokens_BL)

  def loss(params, batch, key):
    del key  # No dropout.
    tokens_BL = batch['tokens']
    if tokens_BL.ndim != 2 or tokens_BL.shape[1] < 2:
      raise ValueError(f'tokens {tokens_BL.shape}, must be [B, L + 1], L ≥ 1')
    decoder, experts = nnx.merge(structure, params), config.experts
    if experts is None:
      return cross_entropy(decoder(tokens_BL[:, :-1]), tokens_BL[:, 1:])
    logits_BLV, told_N = decoder.run(
      tokens_BL[:, :-1],
      lambda chosen: routing.balance(chosen, experts.bias_rate),
    )
    loss, metrics = cross_entropy(logits_BLV, tokens_BL[:, 1:])
    more, load = routing.auxiliary(told_N, experts)
    return loss + more, metrics | load | {api.CROSS_ENTROPY: loss}

  return api.Model(
    init=init,
    loss=loss,
    axes={path: variable.axes for path, variable in variables.items()},
    roles={path: variable.role for path, variable in variables.items()},
    logits=logits,
  )


def cross_entropy(
  logits_BLV: jax.Array, targets_BL: jax.Array
) -> tuple[jax.Array, api.Metrics]:
  """mean over B·L of log Σ_v exp(logit_v) − logit_target, in nats and f32.

  Returns:
    The loss, and the share of targets that were the likeliest token.
  """
  logits_BLV = logits_BLV.astype(jnp.float32)
  vocab = logits_BLV.shape[-1]
  # A comparison, not a gather: it stays local where the vocabulary is sharded.
  hit_BLV = targets_BL[..., None] == jnp.arange(vocab)[None, None, :]
  target_BL = jnp.sum(jnp.where(hit_BLV, logits_BLV, 0.0), axis=-1)
  loss = jnp.mean(jax.nn.logsumexp(logits_BLV, axis=-1) - target_BL)
  right_BL = jnp.argmax(logits_BLV, axis=-1) == targets_BL
  return loss, {'accuracy': jnp.mean(right_BL.astype(jnp.float32))}


class Layer(nnx.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)), or experts as MLP."""

  def __init__(self, config: DecoderConfig, key: jax.Array):
    attention_key, mlp_key = jax.random.split(key)
    self.attention = layers.Attention(config, attention_key)
    self.mlp = (Experts if config.experts else layers.Mlp)(config, mlp_key)

  def __call__(
    self, x_BLD: jax.Array, angles_LC: jax.Array
  ) -> tuple[jax.Array, routing.Routing | None]:
    x_BLD = x_BLD + self.attention(x_BLD, angles_LC)
    if isinstance(self.mlp, layers.Mlp):
      return x_BLD + self.mlp(x_BLD), None
    branch_BLD, routed = self.mlp(x_BLD)
    return x_BLD + branch_BLD, routed


class Decoder(nnx.Module):
  """Maps tokens to logits."""

  def __init__(self, config: DecoderConfig, key: jax.Array):
    embedding_key, layers_key, head_key = jax.random.split(key, 3)
    vocab, width = config.vocab, config.d_model
    self.config = config
    self.embedding = layers.normal(
      embedding_key,
      (vocab, width),
      1 / math.sqrt(width),
      axes=('vocab', 'embed'),
      role=api.EMBEDDING,
    )
    self.layers = nnx.vmap(lambda key: Layer(config, key))(
      jax.random.split(layers_key, config.layers)
    )
    self.norm = nnx.Param(jnp.ones((width,)), axes=('norm',), role=api.PLAIN)
    if not config.tied:
      self.head = layers.normal(
        head_key,
        (vocab, width),
        1 / width,
        axes=('vocab', 'embed'),
        role=api.EMBEDDING,
      )

  def __call__(self, tokens_BL: jax.Array) -> jax.Array:
    """Returns logits, f32 [B, L, V]; position i sees the tokens 0 … i."""
    return self.run(tokens_BL)[0]

  def run(
    self,
    tokens_BL: jax.Array,
    tell: Callable[[routing.Routing], Any] = lambda _: None,
  ) -> tuple[jax.Array, Any]:
    """Returns logits, and the results of `tell` for each layer, stacked.

    Args:
      tokens_BL: int32.
      tell: called with a layer's routing; not called without experts.
    """
    config = self.config
    angles_LC = layers.rope_angles(
      tokens_BL.shape[1], config.head_dim, config.rope_theta
    )
    # Rows have the length 1; the stream starts with unit variance.
    scale = math.sqrt(config.d_model)
    # Unsharded rows before the look-up: its result is to be sharded by batch.
    table_VD = constrain(self.embedding[...], 'vocab', None)
    x_BLD = (table_VD[tokens_BL] * scale).astype(config.dtype)
    x_BLD = constrain(x_BLD, 'batch', None, None)
    structure, stacked = nnx.split(self.layers)

    def block(x_BLD, layer):
      x_BLD, routed = nnx.merge(structure, layer)(x_BLD, angles_LC)
      metrics = None if routed is None else tell(routed)
      return constrain(x_BLD, 'batch', None, None), metrics

    if remat := REMATS[config.remat]:
      # The scan is itself a barrier against merging the two computations.
      policy = getattr(jax.checkpoint_policies, remat)
      block = jax.checkpoint(block, policy=policy, prevent_cse=False)
    x_BLD, metrics = jax.lax.scan(block, x_BLD, stacked)
    x_BLD = layers.rms_norm(x_BLD, self.norm[...])
    if config.tied:
      # As small as a separate head at init: 1 / √D on top of the rows' 1 / √D.
      head_VD = table_VD / scale
    else:
      head_VD = constrain(self.head[...], 'vocab', None)
    logits_BLV = jnp.einsum(
      'BLD,VD->BLV',
      x_BLD,
      head_VD.astype(config.dtype),
      preferred_element_type=jnp.float32,
    )
    return constrain(logits_BLV, 'batch', None, 'vocab'), metrics
