# SPDX-License-Identifier: Apache-2.0
"""The sections of a run's configuration as frozen values with their rules.

Defaults stand in `experiments/common.py` and nowhere else, so every field is
required here. The section `protocol` is `diloco.protocol.config`'s.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from diloco.numerics import block_codec, codec, merge, schedule
from diloco.numerics.optimizers import INNER
from diloco.transport import planes

DTYPES = ('float32', 'bfloat16')
EMBEDDING_FRAGMENTS = ('split', 'own')
MODEL_KINDS = ('decoder', 'moe', 'bowl')
PROGRESS = ('global', 'own')
REMATS = ('none', 'full', 'dots', 'dots_no_batch')
SCHEMES = ('balanced', 'tensor', 'layer')

BLOCK_MULTIPLE = 8  # A block of int1 values fills whole bytes.


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

  def __post_init__(self):
    broken = [f'{self.SECTION}.{rule}' for rule in self.broken_rules()]
    if broken:
      raise ConfigError(broken)

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

  def _share(self, *keys: str, one: bool = True) -> Iterator[str]:
    for key in keys:
      value = getattr(self, key)
      if not (0 <= value <= 1 if one else 0 <= value < 1):
        yield f'{key}={value}: must be in [0, 1{"]" if one else ")"}'


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section):
  """Architecture of the model; shapes as in `diloco/models`."""

  SECTION = 'model'

  kind: str
  vocab: int
  layers: int
  d_model: int
  heads: int
  kv_heads: int
  head_dim: int
  d_ff: int
  rope_theta: float
  dtype: str
  remat: str
  tied: bool
  experts: int
  top_k: int
  aux_weight: float
  z_weight: float
  router_bias_rate: float

  @property
  def own(self) -> tuple[str, str] | None:
    """Module and function of the user's own model; None: it is one of ours."""
    found = re.fullmatch(r'(\w+(?:\.\w+)*):(\w+)', self.kind, re.ASCII)
    return (found[1], found[2]) if found else None

  def broken_rules(self):
    if self.kind not in MODEL_KINDS and not self.own:
      yield (
        f'kind={self.kind!r}: must be one of {", ".join(MODEL_KINDS)}, or the '
        "'package.module:function' of a model of your own"
      )
    yield from self._one_of('dtype', DTYPES)
    yield from self._one_of('remat', REMATS)
    yield from self._at_least(2, 'vocab')
    yield from self._at_least(
      1, 'layers', 'd_model', 'heads', 'kv_heads', 'head_dim', 'd_ff'
    )
    if not 1 < self.rope_theta < float('inf'):
      yield f'rope_theta={self.rope_theta}: must be finite and above 1'
    if self.kv_heads >= 1 and self.heads % self.kv_heads:
      yield f'kv_heads={self.kv_heads}: must divide model.heads={self.heads}'
    if self.head_dim % 2:
      yield f'head_dim={self.head_dim}: must be even, RoPE turns pairs'
    yield from self._at_least(1, 'experts', 'top_k')
    for key in ('aux_weight', 'z_weight', 'router_bias_rate'):
      if not 0 <= getattr(self, key) < float('inf'):
        yield f'{key}={getattr(self, key)}: must be finite, at least 0'
    if self.kind == 'moe' and self.top_k > self.experts:
      yield (
        f'top_k={self.top_k}: must be at most model.experts={self.experts}'
      )
    if self.kind == 'bowl':
      yield from self._plain('dtype', 'float32')
      yield from self._plain('remat', 'none')
      yield from self._plain('tied', False)

  def _plain(self, key: str, value) -> Iterator[str]:
    if getattr(self, key) != value:
      yield f"{key}={getattr(self, key)!r}: kind='bowl' knows only {value!r}"


@dataclasses.dataclass(frozen=True)
class InnerConfig(Section):
  """The learners' optimizer and its schedule."""

  SECTION = 'inner'

  optimizer: str
  lr: float
  schedule: str
  warmup_steps: int
  final_fraction: float
  progress: str
  b1: float
  b2: float
  eps: float
  weight_decay: float
  clip_norm: float
  accumulate: int

  def broken_rules(self):
    yield from self._one_of('optimizer', INNER)
    yield from self._one_of('schedule', schedule.NAMES)
    yield from self._one_of('progress', PROGRESS)
    yield from self._positive('lr', 'eps')
    yield from self._at_least(0, 'warmup_steps', 'weight_decay', 'clip_norm')
    yield from self._at_least(1, 'accumulate')
    yield from self._share('final_fraction')
    yield from self._share('b1', 'b2', one=False)


@dataclasses.dataclass(frozen=True)
class OuterConfig(Section):
  """The syncer's optimizer."""

  SECTION = 'outer'

  lr: float
  momentum: float
  nesterov: bool
  anneal_fraction: float
  final_lr: float

  def broken_rules(self):
    yield from self._positive('lr', 'final_lr')
    yield from self._share('momentum', one=False)
    yield from self._share('anneal_fraction')


@dataclasses.dataclass(frozen=True)
class FragmentsConfig(Section):
  """Settings of the model's fragments; their number P is
  `protocol.fragments`.
  """

  SECTION = 'fragments'

  scheme: str
  embedding: str

  def broken_rules(self):
    yield from self._one_of('scheme', SCHEMES)
    yield from self._one_of('embedding', EMBEDDING_FRAGMENTS)


@dataclasses.dataclass(frozen=True)
class CodecConfig(Section):
  """The encoding of fragments on the wire."""

  SECTION = 'codec'

  up: str
  down: str
  block_size: int
  scale: str
  error_feedback: bool

  def broken_rules(self):
    yield from self._one_of('up', codec.CODECS)
    yield from self._one_of('down', codec.CODECS)
    yield from self._one_of('scale', block_codec.SCALE_BYTES)
    if self.block_size < 1 or self.block_size % BLOCK_MULTIPLE:
      yield (
        f'block_size={self.block_size}: must be a positive multiple of '
        f'{BLOCK_MULTIPLE}'
      )


@dataclasses.dataclass(frozen=True)
class MergeConfig(Section):
  """Settings of the merge of the learners' outer gradients."""

  SECTION = 'merge'

  rule: str
  embedding: str

  def broken_rules(self):
    yield from self._one_of('rule', merge.RULES)
    yield from self._one_of('embedding', merge.RULES)


@dataclasses.dataclass(frozen=True)
class SyncerConfig(Section):
  """The syncer's processes."""

  SECTION = 'syncer'

  shards: int

  def broken_rules(self):
    yield from self._at_least(1, 'shards')


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section):
  """Devices of one learner, by axis; their product is all it uses."""

  SECTION = 'mesh'

  fsdp: int
  expert: int
  tensor: int

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

  data_plane: str
  host: str
  port: int
  connect_s: float

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

  keep_latest: int
  keep_best: int
  syncer_every_rounds: int
  learner_every_steps: int
  fsync: bool

  def broken_rules(self):
    yield from self._at_least(1, 'keep_latest', 'syncer_every_rounds')
    yield from self._at_least(0, 'keep_best', 'learner_every_steps')


@dataclasses.dataclass(frozen=True)
class ProcessConfig(Section):
  """The section `run`: cadence, evaluation, restarts, threads."""

  SECTION = 'run'

  log_every_steps: int
  eval_every_rounds: int
  eval_batches: int
  eval_batch: int
  restarts_max: int
  restart_delay_s: float
  cpu_threads: int
  compilation_cache: bool
  step_floor_s: float

  def broken_rules(self):
    yield from self._at_least(
      1, 'log_every_steps', 'eval_batches', 'eval_batch'
    )
    yield from self._at_least(
      0,
      'eval_every_rounds',
      'restarts_max',
      'restart_delay_s',
      'cpu_threads',
    )
    if not 0 <= self.step_floor_s < float('inf'):
      yield f'step_floor_s={self.step_floor_s}: must be finite, at least 0'


def broken_name(name: str) -> Iterator[str]:
  """The rule of the run's name, which also names files."""
  if not re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9._-]*', name):
    yield f'name={name!r}: must be letters, digits, dots, dashes'
