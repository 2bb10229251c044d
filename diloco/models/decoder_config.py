# SPDX-License-Identifier: Apache-2.0
"""Dimensions of a decoder; free of jax, so that launchers can check them."""

import dataclasses
import math

DTYPES = ('float32', 'bfloat16')
SIZES = ('vocab', 'layers', 'd_model', 'heads', 'kv_heads', 'head_dim', 'd_ff')

LAYER_INPUT = 'layer_input'  # What it is called to `jax.checkpoint`.
# What the backward pass finds stored; the rest is recomputed.
# Values are the policies of `jax.checkpoint_policies`.
REMATS = {
  'none': None,  # Everything.
  'full': 'nothing_saveable',  # Only the input of each layer.
  'dots': 'dots_saveable',  # The results of all matrix products.
  # Results of products with a parameter: not those of the attention.
  'dots_no_batch': 'dots_with_no_batch_dims_saveable',
  # The input of each layer, in the host's memory.
  'offload': 'save_and_offload_only_these_names',
}

AUTO = 'auto'

ACTIVATIONS = ('silu', 'gelu', 'gelu_tanh')  # 'gelu' is exact.
# How RoPE's wavelengths are stretched, in `layers.rope_angles`.
ROPE_SCALINGS = ('none', 'linear', 'llama3')
# Matrices of a layer that get a low-rank addition, by block: how many of their
# axes a product sums over. Experts have none.
ADAPTED = {
  'attention': {'query': 1, 'key': 1, 'value': 1, 'out': 2},
  'mlp': {'gate': 1, 'up': 1, 'down': 1},
}


@dataclasses.dataclass(frozen=True)
class AttentionKind:
  """A computation of attention, in `attention`.

  Attributes:
    platforms: of JAX, where it runs; empty: everywhere.
    dtypes: of its operands.
    caps: whether scores can have a cap.
  """

  platforms: tuple[str, ...] = ()
  dtypes: tuple[str, ...] = DTYPES
  caps: bool = True

  def runs(self, platform: str, dtype: str, cap: float) -> bool:
    """Returns True if it computes what is asked for, there."""
    return (
      (not self.platforms or platform in self.platforms)
      and dtype in self.dtypes
      and (self.caps or not cap)
    )


# 'auto' is the first that runs.
ATTENTIONS = {
  'splash': AttentionKind(platforms=('tpu',)),
  'cudnn': AttentionKind(platforms=('gpu',), dtypes=('bfloat16',), caps=False),
  'xla': AttentionKind(),
}


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
  """A mixture of experts in place of each MLP, checked at construction.

  Attributes:
    experts: E, number of gated MLPs in each layer.
    top_k: K, number of experts per token.
    aux_weight: weight of the load-balancing loss.
    z_weight: weight of the z-loss, which keeps the router's logits small.
    bias_rate: change of the router's bias in one step; 0: there is no bias.
  """

  experts: int
  top_k: int
  aux_weight: float = 0.01
  z_weight: float = 1e-5
  bias_rate: float = 0.0

  def __post_init__(self):
    if not 1 <= self.top_k <= self.experts:
      raise ValueError(
        f'experts: top_k={self.top_k}, must be in 1 … {self.experts}'
      )
    for name in ('aux_weight', 'z_weight', 'bias_rate'):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(
          f'experts: {name}={getattr(self, name)}, must be finite and ≥ 0'
        )


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """The dimensions of a decoder, checked at construction.

  Attributes:
    vocab: tokens are integers from 0 to vocab - 1; the model does not detect
      others, so the data pipeline must.
    layers: number of blocks of attention and MLP.
    d_model: width of the residual stream.
    heads: query heads.
    kv_heads: key and value heads; divides `heads`. Equal: plain multi-head.
    head_dim: width of one head; even, because RoPE rotates pairs.
    d_ff: width of the gated MLP, or of each expert.
    rope_theta: base of the RoPE wavelengths.
    dtype: dtype of the computation; parameters, norms and the loss are f32.
    remat: key of `REMATS` that saves memory in the backward pass.
    tied: True if the embedding is also the output head.
    attention: key of `ATTENTIONS`, or 'auto'.
    window: places that a query sees, its own included; 0: all before it.
    attention_cap: scores s become cap · tanh(s / cap); 0: they stay.
    logit_cap: the same of logits.
    z_loss: weight of the loss that keeps logits small; 0: there is none.
    qkv_bias: True if queries, keys and values have a bias.
    qk_norm: True if each head of queries and keys has an RMSNorm.
    norm_epsilon: ε of all RMSNorms.
    norm_offset: is added to the scale of each RMSNorm.
    activation: one of `ACTIVATIONS`, of the gated MLP.
    embedding_scale: factor of the embedding's rows; 0: √d_model.
    head_scale: factor of a tied head's logits; 0: 1 / √d_model.
    rope_scaling: one of `ROPE_SCALINGS`.
    rope_factor: by which wavelengths are stretched.
    rope_low: of 'llama3': wavelengths above rope_length / rope_low are
      stretched in full.
    rope_high: of 'llama3': those below rope_length / rope_high are not.
    rope_length: of 'llama3': length that the model was first trained on.
    lora_rank: r of LoRA (arXiv 2106.09685): x · W becomes
      x · W + α/r · x · A · B, and A [in, r] and B [r, out] alone are trained;
      0: all parameters are.
    lora_alpha: α of it; 0: 2 · r.
    experts: None: one MLP for all tokens.
  """

  vocab: int
  layers: int
  d_model: int
  heads: int
  kv_heads: int
  head_dim: int
  d_ff: int
  rope_theta: float = 10_000.0
  dtype: str = 'float32'
  remat: str = 'none'
  tied: bool = False
  attention: str = AUTO
  window: int = 0
  attention_cap: float = 0.0
  logit_cap: float = 0.0
  z_loss: float = 0.0
  qkv_bias: bool = False
  qk_norm: bool = False
  norm_epsilon: float = 1e-6
  norm_offset: float = 0.0
  activation: str = 'silu'
  embedding_scale: float = 0.0
  head_scale: float = 0.0
  rope_scaling: str = 'none'
  rope_factor: float = 1.0
  rope_low: float = 1.0
  rope_high: float = 4.0
  rope_length: int = 8192
  lora_rank: int = 0
  lora_alpha: float = 0.0
  experts: ExpertsConfig | None = None

  def __post_init__(self):
    broken = list(self._broken_rules())
    if broken:
      raise ValueError('decoder: ' + '; '.join(broken))

  @property
  def stream_scale(self) -> float:
    """The factor of the embedding's rows. They are drawn with the length 1: by
    √d_model the stream starts with unit variance.
    """
    return self.embedding_scale or math.sqrt(self.d_model)

  @property
  def lora_scale(self) -> float:
    """α/r: the factor of A · B."""
    return (self.lora_alpha or 2 * self.lora_rank) / self.lora_rank

  @property
  def trained(self) -> dict[str, tuple[tuple[int, ...], str]]:
    """Path -> shape and role of what Θ consists of."""
    return self.adapters if self.lora_rank else self.arrays

  @property
  def adapters(self) -> dict[str, tuple[tuple[int, ...], str]]:
    """Path -> shape and role of LoRA's parameters; empty if `lora_rank` is 0.

    Those of `layers/mlp/up` are `layers/mlp/up_a` and `layers/mlp/up_b`.
    """
    if not self.lora_rank:
      return {}
    made = {}
    for path, inputs in self.adapted.items():
      layers, *shape = self.arrays[path][0]
      for name, ends in (
        ('a', (*shape[:inputs], self.lora_rank)),
        ('b', (self.lora_rank, *shape[inputs:])),
      ):
        made[f'{path}_{name}'] = (layers, *ends), 'stacked'
    return made

  @property
  def adapted(self) -> dict[str, int]:
    """Path -> how many axes a product sums over, of what has adapters."""
    return {
      f'layers/{block}/{name}': inputs
      for block, named in ADAPTED.items()
      for name, inputs in named.items()
      if not (self.experts and block == 'mlp')
    }

  @property
  def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
    """Path -> shape and role of every parameter, as the model makes them; those
    of LoRA apart, see `adapters`.
    """
    width, heads = self.d_model, (self.heads, self.head_dim)
    kv_heads = self.kv_heads, self.head_dim
    attention = {
      'norm': (width,),
      'query': (width, *heads),
      'key': (width, *kv_heads),
      'value': (width, *kv_heads),
      'out': (*heads, width),
    }
    if self.qkv_bias:
      attention['query_bias'] = (math.prod(heads),)
      attention['key_bias'] = attention['value_bias'] = (math.prod(kv_heads),)
    if self.qk_norm:
      attention['query_norm'] = attention['key_norm'] = (self.head_dim,)
    experts = (self.experts.experts,) if self.experts else ()
    mlp = {
      'norm': (width,),
      'gate': (*experts, width, self.d_ff),
      'up': (*experts, width, self.d_ff),
      'down': (*experts, self.d_ff, width),
    }
    if self.experts:
      mlp['router'] = (width, *experts)
      if self.experts.bias_rate > 0:
        mlp['router_bias'] = experts
    tables = ('embedding',) if self.tied else ('embedding', 'head')
    return {
      **dict.fromkeys(tables, ((self.vocab, width), 'embedding')),
      **{
        f'layers/{block}/{name}': (
          (self.layers, *shape),
          'averaged' if name == 'router_bias' else 'stacked',
        )
        for block, named in (('attention', attention), ('mlp', mlp))
        for name, shape in named.items()
      },
      'norm': ((width,), 'plain'),
    }

  @property
  def parameters(self) -> int:
    """The number of scalar parameters, without those of LoRA."""
    return sum(math.prod(shape) for shape, _ in self.arrays.values())

  def _broken_rules(self):
    for name in SIZES:
      if getattr(self, name) < 1:
        yield f'{name}={getattr(self, name)}, must be at least 1'
    if self.kv_heads >= 1 and self.heads % self.kv_heads:
      yield (
        f'kv_heads={self.kv_heads} does not divide heads={self.heads}; '
        f'each key head serves equally many query heads'
      )
    if self.head_dim % 2:
      yield f'head_dim={self.head_dim}, must be even: RoPE turns pairs'
    if not 1 < self.rope_theta < math.inf:
      yield f'rope_theta={self.rope_theta}, must be finite and above 1'
    if self.dtype not in DTYPES:
      yield f'dtype={self.dtype!r}, must be one of {DTYPES}'
    if self.remat not in REMATS:
      yield f'remat={self.remat!r}, must be one of {tuple(REMATS)}'
    if self.attention not in (AUTO, *ATTENTIONS):
      yield f'attention={self.attention!r}, must be one of {tuple(ATTENTIONS)}'
    if self.activation not in ACTIVATIONS:
      yield f'activation={self.activation!r}, must be one of {ACTIVATIONS}'
    if self.experts and self.activation != 'silu':
      yield f"activation={self.activation!r}, must be 'silu' with experts"
    if self.rope_scaling not in ROPE_SCALINGS:
      given = f'rope_scaling={self.rope_scaling!r}'
      yield f'{given}, must be one of {ROPE_SCALINGS}'
    for name in ('norm_epsilon', 'rope_factor', 'rope_low', 'rope_length'):
      if not 0 < getattr(self, name) < math.inf:
        yield f'{name}={getattr(self, name)}, must be finite and above 0'
    if not self.rope_low < self.rope_high < math.inf:
      yield f'rope_high={self.rope_high}, must be finite and above rope_low'
    for name in (
      *('window', 'attention_cap', 'logit_cap', 'z_loss'),
      *('norm_offset', 'embedding_scale', 'head_scale'),
      *('lora_rank', 'lora_alpha'),
    ):
      if not 0 <= getattr(self, name) < math.inf:
        yield f'{name}={getattr(self, name)}, must be finite and ≥ 0'
