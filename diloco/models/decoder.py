# SPDX-License-Identifier: Apache-2.0
"""A decoder: embedding, stacked layers, output head, cross-entropy.

Flax NNX in functional style: the layers are stacked at init, split into arrays,
and run by `jax.lax.scan`, so that the compile time does not grow with depth.
Modules stay in here, in `layers` and in `moe`; the result is a `Model`.

Suffixes of arrays give their shape:
  B batch, L length, D d_model, V vocab.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from diloco.models import api, layers, routing, vocabulary
from diloco.models.attention import Visible, attend, by_cache
from diloco.models.decoder_config import LAYER_INPUT, REMATS, DecoderConfig
from diloco.models.moe import Experts
from diloco.models.sharding import constrain, platform

STREAM = ('batch', 'length', None)
UNROLLED_MAX = 8  # Layers: on a CPU a scan's copies cost a fifth of a step.


def make_decoder(config: DecoderConfig) -> api.Model:
  """Makes the decoder as a `Model`, whose contract is documented there."""
  structure, state = nnx.split(
    nnx.eval_shape(lambda: Decoder(config, jax.random.key(0))), nnx.Param
  )
  variables = {
    '/'.join(keys): variable for keys, variable in nnx.to_flat_state(state)
  }

  next_token = vocabulary.Loss(config.logit_cap, config.z_loss)

  adapters = config.adapters
  frozen = variables.keys() - adapters.keys() if adapters else ()

  def init(key):
    params = nnx.to_pure_dict(nnx.state(Decoder(config, key), nnx.Param))
    if not frozen:
      return params
    # Matrices that stay as they are, in the dtype that products have anyhow.
    flat = api.flatten(params)
    for path in adapters:
      if (base := path[: -len('_a')]) in flat:
        flat[base] = flat[base].astype(config.dtype)
    return api.unflatten(flat)

  def logits_of(decoder, x_BLD):
    logits_BLV = vocabulary.logits(x_BLD, decoder.output_head())
    return next_token.capped(constrain(logits_BLV, 'batch', 'length', 'vocab'))

  def logits(params, tokens_BL):
    decoder = nnx.merge(structure, params)
    return logits_of(decoder, decoder.run(tokens_BL)[0])

  def following(method):
    def logits_and_cache(params, *arguments):
      decoder = nnx.merge(structure, params)
      x_B1D, cache = method(decoder, *arguments)
      return logits_of(decoder, x_B1D)[:, 0], cache

    return logits_and_cache

  def entropies(params, tokens_BL):
    decoder = nnx.merge(structure, params)
    x_BLD, _ = decoder.run(tokens_BL[:, :-1])
    head_VD = decoder.output_head()
    return next_token.of_tokens(x_BLD, head_VD, tokens_BL[:, 1:])

  def loss(params, batch, key):
    del key  # No dropout.
    tokens_BL, segments_BL = batch['tokens'], batch.get('segments')
    told_BL = batch.get('counted')
    if tokens_BL.ndim != 2 or tokens_BL.shape[1] < 2:
      raise ValueError(f'tokens {tokens_BL.shape}, must be [B, L + 1], L ≥ 1')
    decoder, experts = nnx.merge(structure, params), config.experts
    counted_BL = None
    if segments_BL is not None:
      # The first token of a segment is not to be told by the one before.
      counted_BL = segments_BL[:, :-1] == segments_BL[:, 1:]
      counted_BL &= segments_BL[:, 1:] >= 0
      segments_BL = segments_BL[:, :-1]
    if told_BL is not None:
      told_BL = told_BL[:, 1:] > 0
      counted_BL = told_BL if counted_BL is None else counted_BL & told_BL
    x_BLD, told_N = decoder.run(
      tokens_BL[:, :-1],
      lambda chosen: routing.balance(chosen, experts.bias_rate),
      segments_BL,
    )
    loss, metrics = next_token(
      x_BLD, decoder.output_head(), tokens_BL[:, 1:], counted_BL
    )
    if experts is None:
      return loss, metrics
    more, load = routing.auxiliary(told_N, experts)
    return loss + more, {api.CROSS_ENTROPY: loss} | metrics | load

  return api.Model(
    init=init,
    loss=loss,
    axes={path: variable.axes for path, variable in variables.items()},
    roles={
      path: api.FROZEN if path in frozen else variable.role
      for path, variable in variables.items()
    },
    logits=logits,
    language=api.Language(
      entropies, following(Decoder.start), following(Decoder.go_on)
    ),
  )


class Layer(nnx.Module):
  """x + attention(norm(x)), then x + mlp(norm(x)), or experts as MLP."""

  def __init__(self, config: DecoderConfig, key: jax.Array):
    attention_key, mlp_key = jax.random.split(key)
    self.attention = layers.Attention(config, attention_key)
    self.mlp = (Experts if config.experts else layers.Mlp)(config, mlp_key)

  def __call__(
    self, x_BLD: jax.Array, angles: jax.Array, attend: layers.Attend
  ) -> tuple[jax.Array, routing.Routing | None]:
    x_BLD = x_BLD + self.attention(x_BLD, angles, attend)
    if isinstance(self.mlp, layers.Mlp):
      return x_BLD + self.mlp(x_BLD), None
    branch_BLD, routed = self.mlp(x_BLD)
    return x_BLD + branch_BLD, routed


class Cache(NamedTuple):
  """Keys and values of tokens, rotated, of a decoder's layers.

  Attributes:
    keys: [layers, B, S, K, H]; that of place p lies at p mod S.
    values: lie as the keys do.
    lengths_B: int32, tokens of each row up to now.
  """

  keys: jax.Array
  values: jax.Array
  lengths_B: jax.Array


class Decoder(nnx.Module):
  """Maps tokens to what its output head makes logits of."""

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
    scale = jnp.full((width,), 1 - config.norm_offset, jnp.float32)
    self.norm = nnx.Param(scale, axes=('norm',), role=api.PLAIN)
    if not config.tied:
      self.head = layers.normal(
        head_key,
        (vocab, width),
        1 / width,
        axes=('vocab', 'embed'),
        role=api.EMBEDDING,
      )

  def run(
    self,
    tokens_BL: jax.Array,
    tell: Callable[[routing.Routing], Any] = lambda _: None,
    segments_BL: jax.Array | None = None,
  ) -> tuple[jax.Array, Any]:
    """Runs tokens through the layers; position i sees 0 … i of its segment.

    Args:
      tokens_BL: int32.
      tell: called with a layer's routing; not called without experts.
      segments_BL: int32, ascending along a row; None: a row is one segment.

    Returns:
      What the output head is multiplied with, [B, L, D], and the results of
      `tell` for each layer, stacked.
    """
    attend = self._attend(segments_BL)

    def block(layer, x_BLD, angles):
      x_BLD, routed = layer(x_BLD, angles, attend)
      return x_BLD, None if routed is None else tell(routed)

    return self._through(block, tokens_BL, _positions(tokens_BL, segments_BL))

  def start(
    self, tokens_BL: jax.Array, lengths_B: jax.Array
  ) -> tuple[jax.Array, Cache]:
    """Runs the beginnings of texts, of which a cache is made.

    Args:
      lengths_B: int32, tokens of each row; what follows them is ignored.

    Returns:
      What the output head is multiplied with for each row's last token,
      [B, 1, D], and the cache, with room for L tokens of each row.
    """
    attend = self._attend()

    def block(layer, x_BLD, angles):
      kept = []

      def keep(q_BLNH, k_BLKH, v_BLKH):
        kept.append((k_BLKH, v_BLKH))
        return attend(q_BLNH, k_BLKH, v_BLKH)

      return layer(x_BLD, angles, keep)[0], kept[0]

    places_1L = _positions(tokens_BL, None)
    x_BLD, (keys, values) = self._through(block, tokens_BL, places_1L)
    last_B11 = lengths_B[:, None, None] - 1
    x_B1D = jnp.take_along_axis(x_BLD, last_B11, axis=1)
    return x_B1D, Cache(keys, values, lengths_B)

  def go_on(self, token_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Runs one token more of each row, on the cache of those before.

    If there is no room, it takes that of the oldest.

    Returns:
      As `start` does.
    """
    at_B = cache.lengths_B
    visible = Visible(self.config.window, self.config.attention_cap)
    room = cache.keys.shape[2]
    is_new_BS = jnp.arange(room)[None, :] == (at_B % room)[:, None]

    def block(layer, x_BLD, angles, keys_BSKH, values_BSKH):
      kept = []

      def attend(q_B1NH, k_B1KH, v_B1KH):
        is_new = is_new_BS[:, :, None, None]
        kept.append(jnp.where(is_new, k_B1KH, keys_BSKH))
        kept.append(jnp.where(is_new, v_B1KH, values_BSKH))
        return by_cache(q_B1NH, *kept, at_B, visible)

      return layer(x_BLD, angles, attend)[0], tuple(kept)

    x_B1D, (keys, values) = self._through(
      block, token_B[:, None], at_B[:, None], cache.keys, cache.values
    )
    return x_B1D, Cache(keys, values, at_B + 1)

  def _attend(self, segments_BL: jax.Array | None = None) -> layers.Attend:
    config = self.config
    visible = Visible(config.window, config.attention_cap, segments_BL)
    return lambda *qkv: attend(config.attention, *qkv, visible)

  def _through(
    self,
    block: Callable,
    tokens_BL: jax.Array,
    positions: jax.Array,
    *of_layers: jax.Array,
  ) -> tuple[jax.Array, Any]:
    """Returns the stream after all layers, and what they gave, stacked.

    Args:
      block: takes a layer, the stream, the angles of `layers.rope`, and the
        layer's part of each of `of_layers`; returns the stream and what else.
      positions: [B | 1, L], within segments.
    """
    config = self.config
    angles = layers.rope_angles(positions, config)
    x_BLD = vocabulary.look_up(self.embedding[...], tokens_BL, jnp.float32)
    x_BLD = (x_BLD * config.stream_scale).astype(config.dtype)
    x_BLD = constrain(x_BLD, *STREAM)
    structure, stacked = nnx.split(self.layers)

    def step(x_BLD, of_layer):
      x_BLD = checkpoint_name(x_BLD, LAYER_INPUT)
      layer = nnx.merge(structure, of_layer[0])
      x_BLD, more = block(layer, x_BLD, angles, *of_layer[1:])
      return constrain(x_BLD, *STREAM), more

    if remat := REMATS[config.remat]:
      # The scan is itself a barrier against merging the two computations.
      policy = getattr(jax.checkpoint_policies, remat)
      if config.remat == 'offload':
        policy = policy(
          names_which_can_be_saved=[],
          names_which_can_be_offloaded=[LAYER_INPUT],
          offload_src='device',
          offload_dst='pinned_host',
        )
      step = jax.checkpoint(step, policy=policy, prevent_cse=False)
    few = config.layers <= UNROLLED_MAX and platform() == 'cpu'
    x_BLD, more = jax.lax.scan(
      step, x_BLD, (stacked, *of_layers), unroll=config.layers if few else 1
    )
    return layers.rms_norm(x_BLD, self.norm[...], config), more

  def output_head(self) -> jax.Array:
    """Returns what gives the logits, f32 [V, D]."""
    if not self.config.tied:
      return self.head[...]
    if self.config.head_scale:
      return self.embedding[...] * self.config.head_scale
    # As small as a separate head at init: 1 / √D on top of the rows' 1 / √D.
    return self.embedding[...] / math.sqrt(self.config.d_model)


def _positions(tokens_BL, segments_BL) -> jax.Array:
  """Returns the place of each token, [1, L], or within its segment, [B, L]."""
  places_1L = jnp.arange(tokens_BL.shape[1], dtype=jnp.int32)[None]
  if segments_BL is None:
    return places_1L
  begins_BL = jnp.concatenate(
    [
      jnp.ones_like(segments_BL[:, :1], bool),
      segments_BL[:, 1:] != segments_BL[:, :-1],
    ],
    axis=1,
  )
  first_BL = jax.lax.cummax(jnp.where(begins_BL, places_1L, 0), axis=1)
  return places_1L - first_BL
