# SPDX-License-Identifier: Apache-2.0
"""The sections of a run's configuration: keys, types, defaults and rules.

A key stands here and nowhere else; those of the section `protocol` in
`diloco.protocol.config`.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from diloco.models.decoder_config import DTYPES, REMATS
from diloco.models.kinds import KINDS
from diloco.numerics import block_codec, codec, fragments, merge, schedule
from diloco.numerics.optimizers import INNER, OUTER
from diloco.transport import planes

SEED_MAX = 2**32 - 1
F32_TINY, F32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127


class ConfigError(ValueError):
  """The configuration can't be run; lists every problem that was found."""

  def __init__(self, problems: Sequence[str]):
    self.problems = tuple(problems)
    super().__init__(
      'the configuration can not be run:'
      + ''.join(f'\n  {problem}' for problem in self.problems)
    )


class Section:
  """Checks its rules at construction; base of the frozen sections."""

  SECTION = ''
  INFINITE = frozenset()  # Keys that may be inf: no limit, or never.

  def __post_init__(self):
    rules = list(self._infinities()) or self.broken_rules()
    if broken := [f'{self.SECTION}.{rule}' for rule in rules]:
      raise ConfigError(broken)

  def _infinities(self) -> Iterator[str]:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      numbers = value if isinstance(value, tuple) else (value,)
      for number in numbers:
        may_be = field.name in self.INFINITE and number == math.inf
        is_float = isinstance(number, float)
        if is_float and not (math.isfinite(number) or may_be):
          yield f'{field.name}={value}: must be a finite number'

  def broken_rules(self) -> Iterator[str]:
    """Yields 'key=value: the rule' for each rule that does not hold."""
    raise NotImplementedError

  def _one_of(self, key: str, allowed: Iterable[str]) -> Iterator[str]:
    value = getattr(self, key)
    if value not in allowed:
      yield f'{key}={value!r}: must be one of {", ".join(allowed)}'

  def _at_least(self, least: float, *keys: str) -> Iterator[str]:
    for key in keys:
      if not getattr(self, key) >= least:  # Written so that NaN fails.
        yield f'{key}={getattr(self, key)}: must be at least {least}'

  def _positive(self, *keys: str) -> Iterator[str]:
    for key in keys:
      if not 0 < getattr(self, key) < float('inf'):
        yield f'{key}={getattr(self, key)}: must be finite and above 0'

  def _in_f32(self, *keys: str) -> Iterator[str]:
    """What is 0 or Inf as f32 makes NaN of what it divides or multiplies."""
    for key in keys:
      if not F32_TINY <= getattr(self, key) <= F32_MAX:
        yield (
          f'{key}={getattr(self, key)}: must be finite and above 0 as f32, in '
          f'{F32_TINY:.3g} … {F32_MAX:.3g}'
        )

  def _finite(self, *keys: str) -> Iterator[str]:
    for key in keys:
      if not 0 <= getattr(self, key) < float('inf'):
        yield f'{key}={getattr(self, key)}: must be finite, at least 0'

  def _share(self, *keys: str, one: bool = True) -> Iterator[str]:
    for key in keys:
      value = getattr(self, key)
      if not (0 <= value <= 1 if one else 0 <= value < 1):
        yield f'{key}={value}: must be in [0, 1{"]" if one else ")"}'


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section):
  """Architecture of the model; shapes as in `diloco/models`."""

  SECTION = 'model'

  kind: str = 'decoder'  # A key of KINDS, or a 'module:function' of yours.
  vocab: int = 256  # One token per byte.
  layers: int = 4  # Decoder blocks.
  d_model: int = 128  # Width of the residual stream.
  heads: int = 4  # Query heads.
  kv_heads: int = 2  # Key and value heads; divides heads.
  head_dim: int = 32  # Width of one head; even, for RoPE.
  d_ff: int = 384  # Width of the gated MLP; of each expert, where kind='moe'.
  rope_theta: float = 10_000.0  # Base of RoPE's wavelengths.
  dtype: str = 'float32'  # Of activations; parameters stay float32.
  remat: str = 'none'  # What the backward pass finds stored; of REMATS.
  tied: bool = False  # Whether the output head is the embedding.
  experts: int = 8  # Of each layer; this and all below of kind 'moe' only.
  top_k: int = 2  # Experts that one token is sent to.
  aux_weight: float = 0.01  # Of the load-balancing loss.
  z_weight: float = 1e-5  # Of the router's z-loss.
  router_bias_rate: float = 0.0  # What a step moves the bias by; 0: no bias.

  @property
  def own(self) -> tuple[str, str] | None:
    """Module and function of the user's own model; None: it is one of ours."""
    found = re.fullmatch(r'(\w+(?:\.\w+)*):(\w+)', self.kind, re.ASCII)
    return (found[1], found[2]) if found else None

  def broken_rules(self):
    kind = KINDS.get(self.kind)
    if not kind and not self.own:
      yield (
        f'kind={self.kind!r}: must be one of {", ".join(KINDS)}, or the '
        "'package.module:function' of a model of your own"
      )
    yield from self._one_of('dtype', DTYPES)
    yield from self._one_of('remat', REMATS)
    yield from self._at_least(2, 'vocab')
    yield from self._at_least(
      1, 'layers', 'd_model', 'heads', 'kv_heads', 'head_dim', 'd_ff'
    )
    if not self.rope_theta > 1:
      yield f'rope_theta={self.rope_theta}: must be above 1'
    if self.kv_heads >= 1 and self.heads % self.kv_heads:
      yield f'kv_heads={self.kv_heads}: must divide model.heads={self.heads}'
    if self.head_dim % 2:
      yield f'head_dim={self.head_dim}: must be even, RoPE turns pairs'
    yield from self._at_least(1, 'experts', 'top_k')
    yield from self._finite('aux_weight', 'z_weight', 'router_bias_rate')
    if kind and kind.has_experts and self.top_k > self.experts:
      yield (
        f'top_k={self.top_k}: must be at most model.experts={self.experts}'
      )
    for key, value in (kind.fixed if kind else {}).items():
      if getattr(self, key) != value:
        yield (
          f'{key}={getattr(self, key)!r}: kind={self.kind!r} knows only '
          f'{value!r}'
        )


@dataclasses.dataclass(frozen=True)
class InnerConfig(Section):
  """The learners' optimizer and its schedule."""

  SECTION = 'inner'

  optimizer: str = 'adamw'  # A key of INNER.
  lr: float = 3e-3  # Peak learning rate.
  schedule: str = 'cosine'  # A key of SCHEDULES.
  warmup_steps: int = 20  # Linear warm-up, in steps of `progress`.
  final_fraction: float = 0.1  # Last learning rate, as a share of lr.
  progress: str = 'global'  # The schedule follows t, or its 'own' steps.
  b1: float = 0.9  # Decay of AdamW's first moment.
  b2: float = 0.95  # Decay of AdamW's second moment.
  eps: float = 1e-8  # Added to AdamW's denominator.
  weight_decay: float = 0.1  # Decoupled, of AdamW.
  clip_norm: float = 1.0  # Global gradient norm; 0 does not clip.
  accumulate: int = 1  # Parts of a batch, one after another on the devices.

  def broken_rules(self):
    yield from self._one_of('optimizer', INNER)
    yield from self._one_of('schedule', schedule.SCHEDULES)
    yield from self._one_of('progress', schedule.PROGRESS)
    yield from self._in_f32('lr', 'eps')
    yield from self._at_least(0, 'warmup_steps', 'weight_decay', 'clip_norm')
    yield from self._at_least(1, 'accumulate')
    yield from self._share('final_fraction')
    yield from self._share('b1', 'b2', one=False)


@dataclasses.dataclass(frozen=True)
class OuterConfig(Section):
  """The syncer's optimizer."""

  SECTION = 'outer'

  optimizer: str = 'sgd'  # A key of OUTER.
  lr: float = 0.6  # Of the outer step.
  momentum: float = 0.7  # Of the outer step; b1 of 'adam'.
  nesterov: bool = True  # Nesterov's form of the momentum, of 'sgd'.
  b2: float = 0.95  # Decay of the second moment of 'adam'.
  eps: float = 0.1  # Added to the denominator of 'adam'.
  # The share of the run, at its end, in which momentum goes to 0, and lr to
  # final_lr.
  anneal_fraction: float = 0.1
  final_lr: float = 0.8  # What lr is at the end; see anneal_fraction.

  def broken_rules(self):
    yield from self._one_of('optimizer', OUTER)
    yield from self._in_f32('lr', 'final_lr', 'eps')
    yield from self._share('momentum', 'b2', one=False)
    yield from self._share('anneal_fraction')
    kind = OUTER.get(self.optimizer)
    if kind and self.anneal_fraction and not kind.anneals:
      yield (
        f'anneal_fraction={self.anneal_fraction}: must be 0, '
        f'optimizer={self.optimizer!r} has no annealing'
      )


@dataclasses.dataclass(frozen=True)
class FragmentsConfig(Section):
  """Settings of the model's fragments; their number P is
  `protocol.fragments`.
  """

  SECTION = 'fragments'

  scheme: str = 'balanced'  # A key of SCHEMES.
  embedding: str = 'split'  # A key of EMBEDDINGS.

  def broken_rules(self):
    yield from self._one_of('scheme', fragments.SCHEMES)
    yield from self._one_of('embedding', fragments.EMBEDDINGS)


@dataclasses.dataclass(frozen=True)
class CodecConfig(Section):
  """The encoding of fragments on the wire."""

  SECTION = 'codec'

  up: str = 'int4'  # Of a learner's delta to its base.
  down: str = 'int4'  # Of the syncer's outer update.
  block_size: int = 128  # Values that share one scale.
  scale: str = 'bf16'  # 'bf16' or 'f32'.
  error_feedback: bool = True  # The syncer keeps its rounding residual.

  def broken_rules(self):
    yield from self._one_of('up', codec.CODECS)
    yield from self._one_of('down', codec.CODECS)
    yield from self._one_of('scale', block_codec.SCALE_BYTES)
    multiple = block_codec.BLOCK_MULTIPLE
    if self.block_size < 1 or self.block_size % multiple:
      yield (
        f'block_size={self.block_size}: must be a positive multiple of '
        f'{multiple}'
      )


@dataclasses.dataclass(frozen=True)
class MergeConfig(Section):
  """Settings of the merge of the learners' outer gradients."""

  SECTION = 'merge'

  rule: str = 'rda'  # 'rda' or 'mean', for all but embeddings.
  embedding: str = 'mean'  # 'mean' or 'rda', for embedding and output head.

  def broken_rules(self):
    yield from self._one_of('rule', merge.RULES)
    yield from self._one_of('embedding', merge.RULES)


@dataclasses.dataclass(frozen=True)
class SyncerConfig(Section):
  """The syncer's processes."""

  SECTION = 'syncer'

  shards: int = 1  # S, the processes that share Θ; one of them leads.

  def broken_rules(self):
    yield from self._at_least(1, 'shards')


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section):
  """Devices of one learner, by axis; their product is all it uses."""

  SECTION = 'mesh'

  fsdp: int = 1  # Devices of one learner over which parameters are sharded.
  expert: int = 1  # Devices over which the experts are spread.
  tensor: int = 1  # Devices over which heads and d_ff are split.

  @property
  def devices(self) -> int:
    """The number of devices that it takes."""
    return self.fsdp * self.expert * self.tensor

  def broken_rules(self):
    yield from self._at_least(1, 'fsdp', 'expert', 'tensor')


@dataclasses.dataclass(frozen=True)
class TransportConfig(Section):
  """Addresses of processes and the data plane; port 0 is any free one."""

  SECTION = 'transport'

  data_plane: str = 'jax_transfer'  # 'jax_transfer' or 'grpc'.
  host: str = '127.0.0.1'  # Where the syncer listens.
  port: int = 0  # 0: any free one.
  connect_s: float = 60.0  # How long a learner looks for the syncer.

  def broken_rules(self):
    yield from self._one_of('data_plane', planes.CONFIGURABLE)
    yield from self._positive('connect_s')
    if not self.host:
      yield "host='': must be a host name or address, such as 127.0.0.1"
    if not 0 <= self.port <= 65535:
      yield f'port={self.port}: must be in 0 … 65535'


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section):
  """Settings of checkpoints: how often, and which to keep."""

  SECTION = 'checkpoint'

  keep_latest: int = 2  # Newest checkpoints of a process that stay.
  keep_best: int = 0  # Those of the lowest loss that stay besides.
  syncer_every_rounds: int = 16  # Between two of the syncer's.
  learner_every_steps: int = 200  # Between two of a learner's; 0: none.
  # A close is on disk before any learner is told: it survives a loss of power,
  # not only the end of the process.
  fsync: bool = True

  def broken_rules(self):
    yield from self._at_least(1, 'keep_latest', 'syncer_every_rounds')
    yield from self._at_least(0, 'keep_best', 'learner_every_steps')


@dataclasses.dataclass(frozen=True)
class ProcessConfig(Section):
  """The section `run`: cadence, evaluation, restarts, threads."""

  SECTION = 'run'

  log_every_steps: int = 10  # Between two records of a learner's metrics.
  profile_at_step: int = 0  # A process's step that begins a trace; 0: none.
  profile_steps: int = 5  # Inner steps of a trace, also of one asked for.
  eval_every_rounds: int = 0  # Θ is evaluated beside the run; 0: at its end.
  eval_batches: int = 16  # Held-out batches of one evaluation.
  eval_batch: int = 16  # Sequences in one of them.
  restarts_max: int = 10  # Of one process; then the run stops.
  restart_delay_s: float = 1.0  # Between a death and the restart.
  cpu_threads: int = 0  # NPROC of each process; 0 leaves it as it is.
  compilation_cache: bool = True  # One for all processes, in the workdir.
  step_floor_s: float = 0.0  # An inner step takes at least this: it sleeps.

  def broken_rules(self):
    yield from self._at_least(
      1, 'log_every_steps', 'eval_batches', 'eval_batch', 'profile_steps'
    )
    yield from self._at_least(
      0,
      'profile_at_step',
      'eval_every_rounds',
      'restarts_max',
      'restart_delay_s',
      'cpu_threads',
    )
    yield from self._finite('step_floor_s')


def defaults(section: type) -> dict[str, object]:
  """Returns the keys of a section's dataclass with their defaults."""
  return {each.name: each.default for each in dataclasses.fields(section)}


def broken_top(top: Mapping) -> Iterator[str]:
  """The rules of `name`, which also names files, and of `seed`, if given."""
  name, seed = top.get('name'), top.get('seed', 0)
  if name is not None and not re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9._-]*', name):
    yield f'name={name!r}: must be letters, digits, dots, dashes'
  if not 0 <= seed <= SEED_MAX:
    yield f'seed={seed}: must be in 0 … {SEED_MAX}'
