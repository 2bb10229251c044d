# SPDX-License-Identifier: Apache-2.0
"""Decoders under the names and shapes of Hugging Face models, both ways.

`FAMILIES` has the architectures of `transformers` that compute what a decoder
does, and `Tensors` says which part of which tensor a parameter is; export and
import read the same tables. A decoder is an architecture if the keys of the
section `model` have the values of its row. What is common to all:

  RMSNorm   before attention and MLP and at the end, ε inside the root. (In bf16
            we multiply in f32 and round once, Llama rounds before the scale as
            well.)
  RoPE      turns the pairs (c, c + head_dim / 2) by position · theta^(−2c /
            head_dim) ("rotate half", not interleaved).
  GQA       query head n reads key head n // (heads / kv_heads), scores are
            divided by √head_dim.
  MLP       down(activation(gate(x)) · up(x)).

Our defaults differ from Llama by two factors: the stream starts with √d_model
times the row of the embedding, and the logits of a tied head are divided by
√d_model. Granite is Llama with exactly these factors in its config, as
`embedding_multiplier` and `logits_scaling`. So the tensors stay as they were
trained, to the bit. A tool that takes the file for a Llama and leaves the
factors out gives other logits.

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

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from diloco.models.decoder_config import DecoderConfig

Box = tuple[tuple[int, int], ...]  # As in `numerics.boxes`.
Values = Mapping[str, object]

# Key of config.json -> that of the section `model`.
_SIZES = {
  'vocab_size': 'vocab',
  'hidden_size': 'd_model',
  'intermediate_size': 'd_ff',
  'num_hidden_layers': 'layers',
  'num_attention_heads': 'heads',
  'num_key_value_heads': 'kv_heads',
  'head_dim': 'head_dim',
  'rms_norm_eps': 'norm_epsilon',
  'tie_word_embeddings': 'tied',
}
_EXPERTS = {
  'num_local_experts': 'experts',
  'num_experts_per_tok': 'top_k',
  'router_aux_loss_coef': 'aux_weight',
}
_ROPE = {
  'factor': 'rope_factor',
  'low_freq_factor': 'rope_low',
  'high_freq_factor': 'rope_high',
  'original_max_position_embeddings': 'rope_length',
}
_ROPE_KEYS = {'none': (), 'linear': ('factor',), 'llama3': tuple(_ROPE)}
_ACTIVATIONS = {
  'silu': 'silu',
  'gelu': 'gelu',
  'gelu_tanh': 'gelu_pytorch_tanh',
}

# What may be another than it was in the model that training starts from: with
# these a model is made to see further.
CHANGEABLE = frozenset(
  {
    *('rope_theta', 'rope_scaling', *_ROPE.values()),
    *('window', 'attention_cap', 'logit_cap', 'aux_weight'),
  }
)


@dataclasses.dataclass(frozen=True)
class Family:
  """An architecture of `transformers`.

  Attributes:
    architecture: its class.
    implied: keys of the section `model` that have these values in it.
    defaults: keys of config.json that have these values if they are missing.
    fixed: keys of config.json that must have these values.
    factors: True if its config has factors of embedding and logits.
    window: True if all its layers may have a window.
    experts: True if each MLP is a mixture of experts.
  """

  architecture: str
  implied: Values
  defaults: Values = dataclasses.field(default_factory=dict)
  fixed: Values = dataclasses.field(default_factory=dict)
  factors: bool = False
  window: bool = False
  experts: bool = False


_PLAIN = {
  'qkv_bias': False,
  'qk_norm': False,
  'norm_offset': 0.0,
  'activation': 'silu',
}
_UNSCALED = {'embedding_scale': 1.0, 'head_scale': 1.0}
_NO_BIAS = {'attention_bias': False}
_NO_BIASES = {**_NO_BIAS, 'mlp_bias': False}
_NO_WINDOW = {'use_sliding_window': False}

# By `model_type`. An export is the first that computes what the decoder does,
# or what its weights came as.
FAMILIES = {
  'llama': Family(
    'LlamaForCausalLM', {**_PLAIN, **_UNSCALED}, fixed=_NO_BIASES
  ),
  'mistral': Family('MistralForCausalLM', {**_PLAIN, **_UNSCALED}, window=True),
  'qwen2': Family(
    'Qwen2ForCausalLM',
    {**_PLAIN, **_UNSCALED, 'qkv_bias': True},
    fixed=_NO_WINDOW,
  ),
  'qwen3': Family(
    'Qwen3ForCausalLM',
    {**_PLAIN, **_UNSCALED, 'qk_norm': True},
    defaults={'head_dim': 128},
    fixed={**_NO_BIAS, **_NO_WINDOW},
  ),
  'gemma': Family(
    'GemmaForCausalLM',
    {
      **_PLAIN,
      'norm_offset': 1.0,
      'activation': 'gelu_tanh',
      'embedding_scale': 0.0,
      'head_scale': 1.0,
    },
    defaults={'head_dim': 256, 'tie_word_embeddings': True},
    fixed=_NO_BIAS,
  ),
  'granite': Family(
    'GraniteForCausalLM', _PLAIN, fixed=_NO_BIASES, factors=True
  ),
  'granitemoe': Family(
    'GraniteMoeForCausalLM', _PLAIN, fixed=_NO_BIAS, factors=True, experts=True
  ),
}


# Dimensions -------------------------------------------------------------------


def section_of(settings: Mapping) -> dict[str, object]:
  """Returns what the contents of config.json are as keys of section `model`.

  Raises:
    ValueError: a key that is needed is missing, or a value is of what our
      decoder does not compute; names key and value.
  """
  name = settings.get('model_type')
  if name not in FAMILIES:
    raise ValueError(
      f'model_type={name!r}: must be one of {", ".join(FAMILIES)}'
    )
  family = FAMILIES[name]
  values = {
    'num_key_value_heads': settings.get('num_attention_heads'),
    'rms_norm_eps': 1e-6,
    'tie_word_embeddings': False,
    **family.defaults,
    **{key: x for key, x in settings.items() if x is not None},
  }
  if 'head_dim' not in values and values.get('num_attention_heads'):
    width = values.get('hidden_size', 0)
    values['head_dim'] = width // values['num_attention_heads']
  sizes = _SIZES | (_EXPERTS if family.experts else {})
  if missing := [key for key in sizes if values.get(key) is None]:
    raise ValueError(f'{missing[0]}: is missing')
  _check_fixed(name, family, values)
  section = {
    'kind': 'moe' if family.experts else 'decoder',
    **{key: values[theirs] for theirs, key in sizes.items()},
    **_PLAIN,
    **family.implied,
    **_rope_of(values),
    'window': (values.get('sliding_window') or 0) if family.window else 0,
    'attention_cap': 0.0,
    'logit_cap': 0.0,
  }
  section['norm_epsilon'] = float(section['norm_epsilon'])
  if family.factors:
    section |= _factors_of(values)
  return section


def _check_fixed(name: str, family: Family, values: Mapping) -> None:
  """Refuses what a config asks for and our decoder has not."""
  activation = values.get('hidden_activation') or values.get('hidden_act')
  wanted = _ACTIVATIONS[str(family.implied['activation'])]
  # Gemma's first configs say 'gelu' of the approximation that it was made with.
  known = {None, wanted, *(['gelu'] if name == 'gemma' else ())}
  if activation not in known:
    raise ValueError(
      f'hidden_act={activation!r}: {name!r} is known with {wanted!r} only'
    )
  kinds = set(values.get('layer_types') or ())
  fixed = {
    **family.fixed,
    'quantization_config': None,
    'use_bidirectional_attention': None,
    'partial_rotary_factor': 1.0,
    'layer_types': values.get('layer_types'),
  }
  if kinds - {'sliding_attention' if family.window else 'full_attention'}:
    fixed['layer_types'] = None
  if family.factors:
    head_dim = values['head_dim']
    fixed |= {'residual_multiplier': 1.0}
    multiplier = values.get('attention_multiplier', 1.0)
    if not math.isclose(multiplier, 1 / math.sqrt(head_dim), rel_tol=1e-6):
      raise ValueError(
        f'attention_multiplier={multiplier}: must be 1 / √head_dim = '
        f'{1 / math.sqrt(head_dim)}'
      )
  for key, value in fixed.items():
    if values.get(key, value) not in (None, value):
      raise ValueError(
        f'{key}={values[key]!r}: our decoder has no such thing'
        + (f', must be {value!r}' if value is not None else '')
      )


def _rope_of(values: Mapping) -> dict[str, object]:
  """Returns the keys of RoPE, which newer configs have in one place."""
  rope = values.get('rope_parameters') or values.get('rope_scaling') or {}
  theta = rope.get('rope_theta', values.get('rope_theta', 10_000.0))
  kind = rope.get('rope_type', rope.get('type', 'default'))
  name = 'none' if kind == 'default' else kind
  if name not in _ROPE_KEYS:
    raise ValueError(
      f'rope_type={kind!r}: must be default or one of '
      f'{", ".join(list(_ROPE_KEYS)[1:])}'
    )
  if rope.get('partial_rotary_factor', 1.0) != 1.0:
    raise ValueError(
      f'partial_rotary_factor={rope["partial_rotary_factor"]}: must be 1.0'
    )
  defaults = {f.name: f.default for f in dataclasses.fields(DecoderConfig)}
  keys = {key: defaults[key] for key in _ROPE.values()}
  for theirs in _ROPE_KEYS[name]:
    if theirs not in rope:
      raise ValueError(f'{theirs}: is missing of rope_type={kind!r}')
    key = _ROPE[theirs]
    keys[key] = type(defaults[key])(rope[theirs])
  return {'rope_theta': float(theta), 'rope_scaling': name, **keys}


def _factors_of(values: Mapping) -> dict[str, float]:
  root = math.sqrt(values['hidden_size'])
  embedding = float(values.get('embedding_multiplier', 1.0))
  logits = float(values.get('logits_scaling', 1.0))
  if not values['tie_word_embeddings'] and logits != 1.0:
    raise ValueError(
      f'logits_scaling={logits}: must be 1.0 of a head of its own'
    )
  return {
    'embedding_scale': 0.0 if embedding == root else embedding,
    'head_scale': 0.0 if logits == root else 1 / logits,
  }


def _plainly(config: DecoderConfig) -> DecoderConfig:
  """Returns the same decoder, its factors written in one way."""
  root = math.sqrt(config.d_model)
  return dataclasses.replace(
    config,
    embedding_scale=0.0
    if config.embedding_scale == root
    else config.embedding_scale,
    head_scale=1.0
    if not config.tied
    else 0.0
    if config.head_scale == 1 / root
    else config.head_scale,
  )


def differing(config: DecoderConfig, section: Values) -> list[str]:
  """Returns the keys of a section `model` of which a decoder has others.

  Args:
    section: some keys with their values; unknown ones do not count.
  """
  known = {f.name for f in dataclasses.fields(DecoderConfig)} - {'experts'}
  other = dataclasses.replace(
    config, **{key: section[key] for key in known & section.keys()}
  )
  mine, theirs = _plainly(config), _plainly(other)
  return sorted(k for k in known if getattr(mine, k) != getattr(theirs, k))


def _is_of(config: DecoderConfig, family: Family) -> bool:
  """Returns True if an architecture computes what the decoder does."""
  plain = _plainly(config)
  experts = config.experts
  return (
    all(getattr(plain, key) == x for key, x in family.implied.items())
    and (family.window or not config.window)
    and not (config.attention_cap or config.logit_cap)
    and (experts is not None) == family.experts
    and not (experts and experts.bias_rate)
  )


def family_of(config: DecoderConfig, wanted: str = '') -> str:
  """Returns a key of `FAMILIES` that computes what the decoder does.

  Args:
    wanted: is taken where it does.

  Raises:
    ValueError: there is none; says what stands against it.
  """
  for name in (*filter(FAMILIES.get, [wanted]), *FAMILIES):
    if _is_of(config, FAMILIES[name]):
      return name
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
  keys = (*_PLAIN, *_UNSCALED)
  said = ', '.join(f'model.{key}={getattr(config, key)!r}' for key in keys)
  raise ValueError(
    f'{said}: no architecture has all of these; there are {", ".join(FAMILIES)}'
  )


def exported_config(
  config: DecoderConfig,
  seq_len: int,
  end: int,
  tokenizer: str,
  source: Mapping | None = None,
) -> dict:
  """Returns the contents of config.json, as plain data.

  Args:
    seq_len: the longest text that it was trained on, in tokens.
    end: the token after each document.
    tokenizer: what is said of the tokenizer.
    source: the config.json with which its weights came; it stays, but for what
      the decoder computes otherwise.
  """
  source = source or {}
  name = family_of(config, source.get('model_type', ''))
  if source.get('model_type') == name:
    merged = {**source}
    merged['dtype' if 'dtype' in source else 'torch_dtype'] = 'float32'
    if differing(config, section_of(source)):
      for key in ('rope_scaling', 'rope_parameters', 'rope_theta'):
        merged.pop(key, None)
      merged |= _computed(name, config)
    return merged
  return {
    **_computed(name, config),
    'max_position_embeddings': seq_len,
    'attention_dropout': 0.0,
    'bos_token_id': None,
    'eos_token_id': end,
    'pad_token_id': None,
    'torch_dtype': 'float32',
    'notes': [tokenizer, *_notes(name, config, seq_len)],
  }


def _computed(name: str, config: DecoderConfig) -> dict:
  """Returns the keys of config.json that say what the decoder computes."""
  family = FAMILIES[name]
  values = {
    'architectures': [family.architecture],
    'model_type': name,
    **{theirs: getattr(config, key) for theirs, key in _SIZES.items()},
    'hidden_act': _ACTIVATIONS[config.activation],
    **_rope(config),
    **family.fixed,
  }
  if family.window:
    values['sliding_window'] = config.window or None
  if family.factors:
    plain, root = _plainly(config), math.sqrt(config.d_model)
    values |= {
      'embedding_multiplier': config.stream_scale,
      'logits_scaling': 1 / plain.head_scale if plain.head_scale else root,
      'attention_multiplier': 1 / math.sqrt(config.head_dim),
      'residual_multiplier': 1.0,
    }
  if config.experts is not None:
    values |= {
      'num_local_experts': config.experts.experts,
      'num_experts_per_tok': config.experts.top_k,
      'output_router_logits': False,
      'router_aux_loss_coef': config.experts.aux_weight,
    }
  return values


def _rope(config: DecoderConfig) -> dict:
  """Returns RoPE as older versions of `transformers` read it and newer ones."""
  theta = {'rope_theta': config.rope_theta}
  kind = config.rope_scaling
  keys = _ROPE_KEYS[kind]
  scaled = {key: getattr(config, _ROPE[key]) for key in keys}
  rope = {'rope_type': kind if keys else 'default', **scaled, **theta}
  both = {**theta, 'rope_parameters': rope}
  return {**both, 'rope_scaling': rope} if keys else both


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


def _notes(name: str, config: DecoderConfig, seq_len: int) -> Iterator[str]:
  yield 'Trained with diloco; weights are those of the global model, in f32.'
  if FAMILIES[name].factors:
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


# Tensors ----------------------------------------------------------------------

# Path in a layer -> name there.
_LAYER = {
  'attention/norm': 'input_layernorm.weight',
  'attention/query': 'self_attn.q_proj.weight',
  'attention/query_bias': 'self_attn.q_proj.bias',
  'attention/query_norm': 'self_attn.q_norm.weight',
  'attention/key': 'self_attn.k_proj.weight',
  'attention/key_bias': 'self_attn.k_proj.bias',
  'attention/key_norm': 'self_attn.k_norm.weight',
  'attention/value': 'self_attn.v_proj.weight',
  'attention/value_bias': 'self_attn.v_proj.bias',
  'attention/out': 'self_attn.o_proj.weight',
  'mlp/norm': 'post_attention_layernorm.weight',
  'mlp/gate': 'mlp.gate_proj.weight',
  'mlp/up': 'mlp.up_proj.weight',
  'mlp/down': 'mlp.down_proj.weight',
}
_WITH_EXPERTS = {
  **_LAYER,
  'mlp/router': 'block_sparse_moe.router.layer.weight',
  # Gate above up.
  'mlp/gate': 'block_sparse_moe.input_linear.weight',
  'mlp/up': 'block_sparse_moe.input_linear.weight',
  'mlp/down': 'block_sparse_moe.output_linear.weight',
}
_TOP = {
  'embedding': 'model.embed_tokens.weight',
  'norm': 'model.norm.weight',
  'head': 'lm_head.weight',
}
LAYERS = 'layers/'
# What files may have besides: it follows from the rest.
_DERIVED = re.compile(r'lm_head\.weight|.*\.rotary_emb\.inv_freq')


@dataclasses.dataclass(frozen=True)
class Place:
  """The place of a parameter, or of a layer of it, in a tensor.

  Attributes:
    name: of the tensor; with {} for the layer.
    shape: of the parameter, or of one layer of it.
    axes: axis of the tensor -> axes of the parameter that are merged in it.
    first: its first row, where others are above it: an index on the tensor's
      last axis but one.
  """

  name: str
  shape: tuple[int, ...]
  axes: tuple[tuple[int, ...], ...]
  first: int = 0

  @property
  def order(self) -> tuple[int, ...]:
    """Axes of the parameter, in the order of the tensor's."""
    return tuple(axis for merged in self.axes for axis in merged)

  @property
  def tensor_shape(self) -> tuple[int, ...]:
    """The shape of its part of the tensor."""
    return tuple(math.prod(self.shape[i] for i in axes) for axes in self.axes)

  def put(self, x: np.ndarray) -> np.ndarray:
    """Returns the part of the tensor that a parameter's layer is."""
    return x.transpose(self.order).reshape(self.tensor_shape)

  def take(self, box: Box, read: Callable[[Box], np.ndarray]) -> np.ndarray:
    """Returns a box of a parameter's layer.

    Args:
      read: returns a box of the tensor.
    """
    ranges = []
    for axes in self.axes:
      # Of merged axes the first counts blocks of the others, which are whole.
      block = math.prod(self.shape[i] for i in axes[1:])
      first, last = box[axes[0]]
      ranges.append((first * block, last * block))
    if self.first:
      ranges[-2] = tuple(self.first + at for at in ranges[-2])
    wanted = [(i, merged.index(i) > 0) for merged in self.axes for i in merged]
    sizes = [
      self.shape[i] if inner else box[i][1] - box[i][0] for i, inner in wanted
    ]
    cut = tuple(slice(*box[i]) if inner else slice(None) for i, inner in wanted)
    x = read(tuple(ranges)).reshape(sizes)[cut]
    return x.transpose(np.argsort(self.order))


class Tensors:
  """Which tensors a decoder's parameters are.

  Attributes:
    places: path -> where it is.
    shapes: name -> shape of each tensor.
  """

  def __init__(self, config: DecoderConfig):
    self._config = config
    names = _WITH_EXPERTS if config.experts else _LAYER
    self.places = {}
    for path, (shape, _) in config.arrays.items():
      if path.startswith(LAYERS):
        within = path.removeprefix(LAYERS)
        name, shape = f'model.layers.{{}}.{names[within]}', shape[1:]
        above = config.d_ff if config.experts and within == 'mlp/up' else 0
        self.places[path] = Place(name, shape, _axes(within, shape), above)
      else:
        axes = tuple((i,) for i in range(len(shape)))
        self.places[path] = Place(_TOP[path], shape, axes)
    self.shapes: dict[str, tuple[int, ...]] = {}
    for place in self.places.values():
      for name in self._names(place):
        shape = list(place.tensor_shape)
        if place.first or name in self.shapes:  # Both halves are alike.
          shape[-2] *= 2
        self.shapes[name] = tuple(shape)

  def check(self, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compares tensors with those of the decoder.

    Raises:
      ValueError: one is missing, is of another shape, or belongs to nothing.
    """
    for name, shape in self.shapes.items():
      if name not in found:
        raise ValueError(f'tensor {name!r} is missing')
      if tuple(found[name]) != shape:
        raise ValueError(
          f'tensor {name!r} is of shape {list(found[name])}, must be of '
          f'{list(shape)}'
        )
    for name in sorted(found.keys() - self.shapes.keys()):
      if not _DERIVED.fullmatch(name):
        raise ValueError(f'tensor {name!r} is none of the decoder')

  def read(
    self, path: str, box: Box, read: Callable[[str, Box], np.ndarray]
  ) -> np.ndarray:
    """Returns a box of a parameter, the layers stacked.

    Args:
      read: returns a box of the tensor of that name.
    """
    place = self.places[path]
    if not path.startswith(LAYERS):
      return place.take(box, lambda box: read(place.name, box))
    parts = []
    for i in range(*box[0]):
      name = place.name.format(i)
      parts.append(place.take(box[1:], lambda box, n=name: read(n, box)))
    return np.stack(parts)

  def exported(self, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns name -> array of every tensor.

    Args:
      params: path -> array, the layers stacked.
    """
    parts: dict[str, list[np.ndarray]] = {}
    for path, place in sorted(
      self.places.items(), key=lambda item: item[1].first
    ):
      stacked = path.startswith(LAYERS)
      layers = params[path] if stacked else [params[path]]
      for name, x in zip(self._names(place), layers, strict=True):
        parts.setdefault(name, []).append(place.put(x))
    return {
      name: np.ascontiguousarray(np.concatenate(x, axis=-2) if x[1:] else x[0])
      for name, x in parts.items()
    }

  def _names(self, place: Place) -> list[str]:
    if '{}' not in place.name:
      return [place.name]
    return [place.name.format(i) for i in range(self._config.layers)]


def _axes(path: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
  """Returns `Place.axes` of a path in a layer: [in, out] becomes [out, in]."""
  if path == 'attention/out':
    return (2,), (0, 1)
  if path.startswith('attention/') and len(shape) == 3:
    return (1, 2), (0,)
  match len(shape):
    case 1:
      return ((0,),)
    case 2:
      return (1,), (0,)
    case _:
      return (0,), (2,), (1,)
