# SPDX-License-Identifier: Apache-2.0
"""A decoder's parameters under the names and shapes of Hugging Face models.

The architecture is Llama's, tensor for tensor, except for two factors:

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

Linear maps are [out, in], as in `torch.nn.Linear`; the heads are flattened,
head by head, into one axis.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from diloco.models.decoder_config import DecoderConfig

# As in `blocks`, which imports jax; a test compares the two.
NORM_EPSILON = 1e-6

# A path in one layer of the decoder, and its exported name.
_LAYER = {
  'attention/norm': 'input_layernorm',
  'attention/query': 'self_attn.q_proj',
  'attention/key': 'self_attn.k_proj',
  'attention/value': 'self_attn.v_proj',
  'attention/out': 'self_attn.o_proj',
  'mlp/norm': 'post_attention_layernorm',
  'mlp/gate': 'mlp.gate_proj',
  'mlp/up': 'mlp.up_proj',
  'mlp/down': 'mlp.down_proj',
}
_TOP = {
  'embedding': 'model.embed_tokens.weight',
  'norm': 'model.norm.weight',
  'head': 'lm_head.weight',
}


def check_exportable(config: DecoderConfig) -> None:
  """Checks that a decoder is dense: only then it has Llama's tensors.

  Raises:
    ValueError: it is a mixture of experts.
  """
  if config.experts is not None:
    raise ValueError(
      f'model.experts={config.experts.experts}: a mixture of experts can not '
      "be exported, only model.kind='decoder'"
    )


def to_exported(
  params: Mapping[str, np.ndarray], config: DecoderConfig
) -> dict[str, np.ndarray]:
  """Returns exported name -> array, one tensor per layer and role.

  Args:
    params: path -> array, the layers stacked.
  """
  tensors = {_TOP[p]: np.ascontiguousarray(params[p]) for p in _top(config)}
  for path in _LAYER:
    for layer, x in enumerate(params[f'layers/{path}']):
      # [in, out…] as a matrix, then transposed; the [out] of a norm stays.
      matrix = x if x.ndim == 1 else x.reshape(_matrix(path, config)).T
      tensors[_name(path, layer)] = np.ascontiguousarray(matrix)
  return tensors


def from_exported(
  tensors: Mapping[str, np.ndarray], config: DecoderConfig
) -> dict[str, np.ndarray]:
  """Returns path -> array: the parameters whose `to_exported` is `tensors`.

  Raises:
    ValueError: a tensor is missing or unknown, or has another shape.
  """
  shapes = exported_shapes(config)
  for name in sorted(shapes.keys() | tensors.keys()):
    shape = tensors[name].shape if name in tensors else None
    if shape != shapes.get(name):
      raise ValueError(f'{name}: {shape}, the config says {shapes.get(name)}')
  params = {path: np.array(tensors[_TOP[path]]) for path in _top(config)}
  for path in _LAYER:
    layers = [tensors[_name(path, i)] for i in range(config.layers)]
    stacked = np.stack([x.T for x in layers])  # A norm's is its own transpose.
    shape = (config.layers, *_ours(path, config))
    params[f'layers/{path}'] = stacked.reshape(shape)
  return params


def exported_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
  """Returns exported name -> shape of every tensor."""
  width, vocab = config.d_model, config.vocab
  tops = {'embedding': (vocab, width), 'norm': (width,), 'head': (vocab, width)}
  shapes = {_TOP[path]: tops[path] for path in _top(config)}
  for path in _LAYER:
    ours = _ours(path, config)
    theirs = ours if len(ours) == 1 else _matrix(path, config)[::-1]
    shapes |= {_name(path, i): theirs for i in range(config.layers)}
  return shapes


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
    'architectures': ['GraniteForCausalLM'],
    'model_type': 'granite',
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
    'mlp_bias': False,
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


def _notes(config: DecoderConfig, seq_len: int) -> Iterator[str]:
  yield 'Trained with diloco; weights are those of the global model, in f32.'
  yield (
    'Llama but for embedding_multiplier (sqrt of hidden_size) and '
    'logits_scaling; a reader that leaves these out gives other logits.'
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


def _top(config: DecoderConfig) -> list[str]:
  return [path for path in _TOP if path != 'head' or not config.tied]


def _name(path: str, layer: int) -> str:
  return f'model.layers.{layer}.{_LAYER[path]}.weight'


def _ours(path: str, config: DecoderConfig) -> tuple[int, ...]:
  """Returns the shape of one layer's parameter in the decoder."""
  width, d_ff, head_dim = config.d_model, config.d_ff, config.head_dim
  return {
    'attention/norm': (width,),
    'attention/query': (width, config.heads, head_dim),
    'attention/key': (width, config.kv_heads, head_dim),
    'attention/value': (width, config.kv_heads, head_dim),
    'attention/out': (config.heads, head_dim, width),
    'mlp/norm': (width,),
    'mlp/gate': (width, d_ff),
    'mlp/up': (width, d_ff),
    'mlp/down': (d_ff, width),
  }[path]


def _matrix(path: str, config: DecoderConfig) -> tuple[int, int]:
  """Returns a parameter's shape as (in, out), with heads and head_dim
  merged.
  """
  shape = _ours(path, config)
  if path == 'attention/out':
    return math.prod(shape[:2]), shape[2]
  return shape[0], math.prod(shape[1:])
