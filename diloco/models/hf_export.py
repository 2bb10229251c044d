# SPDX-License-Identifier: Apache-2.0
"""A decoder's parameters under the names and shapes of Hugging Face models.

That of a dense one is Llama's, tensor for tensor, except for two factors:

  RMSNorm   before attention and MLP and at the end, ε inside the root, its
            scale times the normed value: the same. (In bf16 we multiply in f32
            and round once, Llama rounds before the scale as well.)
  RoPE      turns the pairs (c, c + head_dim / 2) by position · theta^(−2c /
            head_dim): the same ("rotate half", not interleaved).
  GQA       query head n reads key head n // (heads / kv_heads), scores are
            divided by √head_dim: the same.
  MLP       down(silu(gate(x)) · up(x)): the same.
  biases    none: the same.
  embedding the stream starts with √d_model times the row. Llama has no such
            factor.
  tied head the logits are those of the embedding divided by √d_model. Llama
            has no such factor; our own head has none either.

Granite is Llama with exactly these factors in its config: they are called
`embedding_multiplier` and `logits_scaling`. So a config.json here says
`granite`, the tensors stay as they were trained, to the bit, and every factor
is represented. A tool that takes the file for a Llama and leaves the factors
out gives other logits.

A mixture of experts is a `granitemoe`, whose layers differ in the MLP alone:

  router    scores are x · router, the K largest are chosen, their weights are
            the softmax over the chosen: our probabilities of all experts,
            divided by the sum of those that were chosen, are the same.
  experts   down_e(silu(gate_e(x)) · up_e(x)), gate above up in one tensor.
  capacity  none: each expert takes all tokens that chose it, ours too, so that
            no token is dropped in either.

A router's bias (`model.router_bias_rate`) has no place in it.

Linear maps are [out, in], as in `torch.nn.Linear`; the heads are flattened,
head by head, into one axis.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from diloco.models.decoder_config import DecoderConfig

# As in `layers`, which imports jax; a test compares the two.
NORM_EPSILON = 1e-6

# Exported name -> the paths in one layer of the decoder whose matrices it
# holds, one above the other.
_ATTENTION = {
  'input_layernorm': ('attention/norm',),
  'self_attn.q_proj': ('attention/query',),
  'self_attn.k_proj': ('attention/key',),
  'self_attn.v_proj': ('attention/value',),
  'self_attn.o_proj': ('attention/out',),
  'post_attention_layernorm': ('mlp/norm',),
}
_MLP = {
  'mlp.gate_proj': ('mlp/gate',),
  'mlp.up_proj': ('mlp/up',),
  'mlp.down_proj': ('mlp/down',),
}
_EXPERTS = {
  'block_sparse_moe.router.layer': ('mlp/router',),
  'block_sparse_moe.input_linear': ('mlp/gate', 'mlp/up'),
  'block_sparse_moe.output_linear': ('mlp/down',),
}
_TOP = {
  'embedding': 'model.embed_tokens.weight',
  'norm': 'model.norm.weight',
  'head': 'lm_head.weight',
}


def check_exportable(config: DecoderConfig) -> None:
  """Checks that an architecture of `transformers` computes what we do.

  Raises:
    ValueError: the routers have a bias, or attention and logits what these
      architectures have not.
  """
  for name in ('window', 'attention_cap', 'logit_cap'):
    if value := getattr(config, name):
      raise ValueError(
        f'model.{name}={value}: can not be exported, only a model trained with '
        f'model.{name}=0'
      )
  if config.experts is not None and config.experts.bias_rate:
    raise ValueError(
      f'model.router_bias_rate={config.experts.bias_rate}: routers with a '
      'bias can not be exported, only a mixture of experts trained with '
      'model.router_bias_rate=0'
    )


def to_exported(
  params: Mapping[str, np.ndarray], config: DecoderConfig
) -> dict[str, np.ndarray]:
  """Returns exported name -> array, one tensor per layer and role.

  Args:
    params: path -> array, the layers stacked.
  """
  tensors = {
    name: np.ascontiguousarray(params[path])
    for path, name in _TOP.items()
    if path != 'head' or not config.tied
  }
  layer = _ATTENTION | (_EXPERTS if config.experts else _MLP)
  for name, paths in layer.items():
    for i in range(config.layers):
      parts = [
        _turned(params[f'layers/{path}'][i].reshape(_matrix(path, config)))
        for path in paths
      ]
      whole = np.concatenate(parts, axis=-2) if len(parts) > 1 else parts[0]
      tensors[f'model.layers.{i}.{name}.weight'] = np.ascontiguousarray(whole)
  return tensors


def exported_config(
  config: DecoderConfig, seq_len: int, end: int, tokenizer: str
) -> dict:
  """Returns the contents of config.json, as plain data.

  Args:
    seq_len: the longest text that it was trained on, in tokens.
    end: the token after each document.
    tokenizer: what is said of the tokenizer.
  """
  root = math.sqrt(config.d_model)
  return {
    **_architecture(config),
    'vocab_size': config.vocab,
    'hidden_size': config.d_model,
    'intermediate_size': config.d_ff,
    'num_hidden_layers': config.layers,
    'num_attention_heads': config.heads,
    'num_key_value_heads': config.kv_heads,
    'head_dim': config.head_dim,
    'hidden_act': 'silu',
    'max_position_embeddings': seq_len,
    'rms_norm_eps': NORM_EPSILON,
    # Newer versions of `transformers` write the first as the second.
    'rope_theta': config.rope_theta,
    'rope_parameters': {
      'rope_type': 'default',
      'rope_theta': config.rope_theta,
    },
    'attention_bias': False,
    'attention_dropout': 0.0,
    'tie_word_embeddings': config.tied,
    'embedding_multiplier': root,
    'logits_scaling': root if config.tied else 1.0,
    'attention_multiplier': 1 / math.sqrt(config.head_dim),
    'residual_multiplier': 1.0,
    'bos_token_id': None,
    'eos_token_id': end,
    'pad_token_id': None,
    'torch_dtype': 'float32',
    'notes': [tokenizer, *_notes(config, seq_len)],
  }


def generation_config(seq_len: int, end: int) -> dict:
  """Returns the contents of generation_config.json; see `exported_config`."""
  return {'do_sample': True, 'eos_token_id': end, 'max_length': seq_len}


def tokenizer_config(seq_len: int, end_text: str) -> dict:
  """Returns the contents of tokenizer_config.json, beside tokenizer.json.

  Args:
    end_text: the end token as the tokenizer's file calls it; '' if there it is
      an ordinary token.
  """
  return {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'model_max_length': seq_len,
    'clean_up_tokenization_spaces': False,
    **({'eos_token': end_text} if end_text else {}),
  }


def _architecture(config: DecoderConfig) -> dict:
  experts = config.experts
  if experts is None:
    return {
      'architectures': ['GraniteForCausalLM'],
      'model_type': 'granite',
      'mlp_bias': False,
    }
  return {
    'architectures': ['GraniteMoeForCausalLM'],
    'model_type': 'granitemoe',
    'num_local_experts': experts.experts,
    'num_experts_per_tok': experts.top_k,
    'output_router_logits': False,
    'router_aux_loss_coef': experts.aux_weight,
  }


def _notes(config: DecoderConfig, seq_len: int) -> Iterator[str]:
  yield 'Trained with diloco; weights are those of the global model, in f32.'
  yield (
    'Llama but for embedding_multiplier (sqrt of hidden_size) and '
    'logits_scaling; a reader that leaves these out gives other logits.'
  )
  if config.experts is not None:
    yield (
      'No expert has a capacity: none drops a token, in training neither. '
      'The routers were computed in float32; rounded, they may choose others.'
    )
  yield (
    'RoPE turns the pairs (c, c + head_dim / 2); linear weights are '
    '[out, in]; query head n reads key head n // (heads / key heads).'
  )
  yield f'Trained on sequences of {seq_len} tokens, never on longer ones.'
  if config.dtype != 'float32':
    yield (
      f'Trained with activations in {config.dtype}; norms, softmax of the '
      'loss and weights in float32.'
    )
  if config.heads * config.head_dim != config.d_model:
    yield (
      'head_dim is not hidden_size / num_attention_heads; a reader must take '
      'head_dim from here.'
    )


def _matrix(path: str, config: DecoderConfig) -> tuple[int, ...]:
  """Returns a parameter's shape as (in, out), with heads and head_dim merged,
  or (experts, in, out); a norm's as it is.
  """
  shape = config.arrays[f'layers/{path}'][0][1:]
  if path == 'attention/out':
    return math.prod(shape[:2]), shape[2]
  if path.startswith('attention/') and len(shape) > 1:
    return shape[0], math.prod(shape[1:])
  return shape


def _turned(x: np.ndarray) -> np.ndarray:
  """[…, in, out] as […, out, in]; a norm's scale as it is."""
  return x if x.ndim == 1 else np.swapaxes(x, -1, -2)
