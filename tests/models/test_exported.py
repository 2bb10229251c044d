# SPDX-License-Identifier: Apache-2.0
"""Exported tensors: back to the bit, and the same loss by others' rules."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from diloco.models import api, hf_format
from diloco.models.decoder import make_decoder
from diloco.models.decoder_config import DecoderConfig, ExpertsConfig

# No two sizes are equal, and no head_dim is d_model / heads.
CONFIG = DecoderConfig(
  vocab=19,
  layers=3,
  d_model=16,
  heads=4,
  kv_heads=2,
  head_dim=6,
  d_ff=24,
  rope_theta=500.0,
)
MIXTURE = dataclasses.replace(CONFIG, experts=ExpertsConfig(5, 2))
LENGTH = 12

of_each = pytest.mark.parametrize(
  'config',
  [
    pytest.param(
      dataclasses.replace(config, tied=tied),
      id=f'{kind}-{"tied" if tied else "untied"}',
    )
    for kind, config in (('dense', CONFIG), ('mixture', MIXTURE))
    for tied in (False, True)
  ],
)


def _params(config):
  """Drawn, the scales of norms too: ones would hide a norm that lost them."""
  rng = np.random.default_rng(7)
  shapes = api.check_model(make_decoder(config))
  return {
    path: (0.4 * rng.standard_normal(leaf.shape) + ('norm' in path)).astype('f')
    for path, leaf in shapes.items()
  }


# A forward pass by the rules of `torch.nn.Linear`, and of Granite and its
# mixture of experts in `transformers`, from the exported tensors and their
# config alone.


def _norm(x, scale, settings):
  square = np.mean(x**2, axis=-1, keepdims=True)
  return scale * (x / np.sqrt(square + settings['rms_norm_eps']))


def _rotate_half(x):
  first, second = np.split(x, 2, axis=-1)
  return np.concatenate([-second, first], axis=-1)


def _turn(x, settings):
  """Turns pairs by position; x: [heads, length, head_dim]."""
  size = settings['head_dim']
  frequencies = settings['rope_theta'] ** -(np.arange(0, size, 2) / size)
  angles = np.outer(np.arange(x.shape[1]), frequencies)
  angles = np.concatenate([angles, angles], axis=-1)
  return x * np.cos(angles) + _rotate_half(x) * np.sin(angles)


def _attention(x, layer, settings):
  def heads(name, count):
    projected = x @ layer(f'self_attn.{name}_proj').T
    return projected.reshape(len(x), count, -1).transpose(1, 0, 2)

  queries, keys = (
    settings['num_attention_heads'],
    settings['num_key_value_heads'],
  )
  query = _turn(heads('q', queries), settings)
  key = _turn(heads('k', keys), settings).repeat(queries // keys, axis=0)
  value = heads('v', keys).repeat(queries // keys, axis=0)
  scores = query @ key.transpose(0, 2, 1) * settings['attention_multiplier']
  scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
  chances = np.exp(scores - scores.max(axis=-1, keepdims=True))
  chances /= chances.sum(axis=-1, keepdims=True)
  mixed = (chances @ value).transpose(1, 0, 2).reshape(len(x), -1)
  return mixed @ layer('self_attn.o_proj').T


def _mlp(x, layer):
  gate = x @ layer('mlp.gate_proj').T
  silu = gate / (1 + np.exp(-gate))
  return (silu * (x @ layer('mlp.up_proj').T)) @ layer('mlp.down_proj').T


def _experts(x, layer, settings):
  """Mixes experts as `granitemoe` does: softmax over the chosen scores."""
  scores = x @ layer('block_sparse_moe.router.layer').T
  y = np.zeros_like(x)
  for token, score in enumerate(scores):
    chosen = np.argsort(-score)[: settings['num_experts_per_tok']]
    weights = np.exp(score[chosen] - score[chosen].max())
    for expert, weight in zip(chosen, weights / weights.sum()):
      both = layer('block_sparse_moe.input_linear')[expert] @ x[token]
      gate, up = np.split(both, 2)
      down = layer('block_sparse_moe.output_linear')[expert]
      y[token] += weight * (down @ (gate / (1 + np.exp(-gate)) * up))
  return y


def _logits(tensors, settings, tokens):
  tensors = {name: x.astype(np.float64) for name, x in tensors.items()}
  table = tensors['model.embed_tokens.weight']
  x = table[tokens] * settings['embedding_multiplier']
  for i in range(settings['num_hidden_layers']):

    def layer(name, i=i):
      return tensors[f'model.layers.{i}.{name}.weight']

    normed = _norm(x, layer('input_layernorm'), settings)
    x = x + _attention(normed, layer, settings)
    normed = _norm(x, layer('post_attention_layernorm'), settings)
    if settings['model_type'] == 'granitemoe':
      x = x + _experts(normed, layer, settings)
    else:
      x = x + _mlp(normed, layer)
  x = _norm(x, tensors['model.norm.weight'], settings)
  tied = settings['tie_word_embeddings']
  head = table if tied else tensors['lm_head.weight']
  return x @ head.T / settings['logits_scaling']


@of_each
def test_their_forward_pass_gives_our_loss(config):
  params = _params(config)
  tensors = hf_format.Tensors(config).exported(params)
  settings = hf_format.exported_config(config, LENGTH, 0, '')
  settings = json.loads(json.dumps(settings))
  tokens = jax.random.randint(
    jax.random.key(1), (2, LENGTH + 1), 0, config.vocab
  )
  loss, metrics = jax.jit(make_decoder(config).loss)(
    api.unflatten(params), {'tokens': tokens}, jax.random.key(0)
  )
  loss = metrics.get(api.CROSS_ENTROPY, loss)  # Without the auxiliary loss.

  losses = []
  for row in np.asarray(tokens):
    chances = np.exp(_logits(tensors, settings, row[:-1]))
    chances /= chances.sum(axis=-1, keepdims=True)
    losses.append(-np.log(chances[np.arange(LENGTH), row[1:]]))
  np.testing.assert_allclose(loss, np.mean(losses), rtol=2e-6)


def test_routers_with_a_bias_are_refused():
  hf_format.family_of(CONFIG)
  hf_format.family_of(MIXTURE)
  biased = ExpertsConfig(5, 2, bias_rate=0.01)
  problem = r'model\.router_bias_rate=0\.01: .* only .*router_bias_rate=0'
  with pytest.raises(ValueError, match=problem):
    hf_format.family_of(dataclasses.replace(CONFIG, experts=biased))
  for name in ('window', 'attention_cap', 'logit_cap'):
    with pytest.raises(ValueError, match=rf'model\.{name}=8'):
      hf_format.family_of(dataclasses.replace(CONFIG, **{name: 8}))
