# SPDX-License-Identifier: Apache-2.0
"""The sections of a run's configuration: keys, types, defaults and rules.

A key stands here and nowhere else; those of the section `protocol` in
`diloco.protocol.config`.
"""

import dataclasses
import difflib
import functools
import math
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated

from diloco.config import own_code
from diloco.models.decoder_config import (
  ACTIVATIONS,
  ATTENTIONS,
  AUTO,
  DTYPES,
  REMATS,
  ROPE_SCALINGS,
)
from diloco.models.kinds import KINDS
from diloco.numerics import codec, fragments, merge
from diloco.numerics.optimizers import INNER, OUTER
from diloco.numerics.schedule import PROGRESS, SCHEDULES
from diloco.protocol.config import BLEND, BOOTSTRAPS, OLD_BLENDS
from diloco.transport import planes

SEED_MAX = 2**32 - 1
F32_TINY, F32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127


class ConfigError(ValueError):
  """The configuration can't be run; lists every problem that was found."""

  def __init__(self, problems: str | Sequence[str]):
    one = isinstance(problems, str)
    self.problems = (problems,) if one else tuple(problems)
    super().__init__(
      'the configuration can not be run:'
      + ''.join(f'\n  {problem}' for problem in self.problems)
    )


@dataclasses.dataclass(frozen=True)
class Rule:
  """A rule for the value of a key, besides its type."""

  text: str  # Such as 'must be at least 1'.
  holds: Callable[[object], bool]  # Not of NaN.
  takes_own: bool = False  # Values may name a function of the user's.


def _key(kind: type, text: str, holds: Callable):
  """The type of a key that has a rule."""
  return Annotated[kind, Rule(text, holds)]


def one_of(choices: Collection[str]):
  """The type of a key that takes one of these names."""
  return _key(str, f'must be one of {", ".join(choices)}', choices.__contains__)


def one_of_or_own(choices: Collection[str]):
  """The type of a key that takes one of these names, or a function's."""
  return Annotated[
    str,
    Rule(
      f"must be one of {', '.join(choices)}, or the 'package.module:function' "
      'of one of your own',
      lambda value: value in choices or own_code.parts(value) is not None,
      takes_own=True,
    ),
  ]


def some_of(choices: Collection[str]):
  """The type of a key that takes several of these names."""
  return _key(
    tuple[str, ...],
    f'must be some of {", ".join(choices)}',
    lambda names: bool(names) and all(x in choices for x in names),
  )


def at_least(least: float, kind: type = int):
  """The type of a key that has a lower bound."""
  return _key(kind, f'must be at least {least}', lambda x: least <= x < INF)


def each_at_least(least: float, kind: type = int):
  """The type of a key that has some numbers with a lower bound."""
  return _key(
    tuple[kind, ...],
    f'must be some numbers, each at least {least}',
    lambda items: bool(items) and all(least <= x < INF for x in items),
  )


INF = math.inf
Count, Whole = at_least(1), at_least(0)
NonNegative = _key(float, 'must be finite, at least 0', lambda x: 0 <= x < INF)
Positive = _key(float, 'must be finite and above 0', lambda x: 0 < x < INF)
Unlimited = _key(
  float, 'must be above 0; inf for no limit, or never', lambda x: x > 0
)
Share = _key(float, 'must be in [0, 1]', lambda x: 0 <= x <= 1)
ShareBelow1 = _key(float, 'must be in [0, 1)', lambda x: 0 <= x < 1)
# What is 0 or Inf as f32 makes NaN of what it divides or multiplies.
F32 = _key(
  float,
  f'must be finite and above 0 as f32, in {F32_TINY:.3g} … {F32_MAX:.3g}',
  lambda x: F32_TINY <= x <= F32_MAX,
)
# Of keys that have no rule of their own.
FINITE = {
  float: Rule('must be a finite number', math.isfinite),
  tuple[float, ...]: Rule(
    'must be finite numbers', lambda xs: all(map(math.isfinite, xs))
  ),
}


@functools.cache
def rules(section: type) -> dict[str, Rule]:
  """Returns the rules of a section's keys; some keys have none."""
  known = {}
  for name, hint in typing.get_type_hints(section, include_extras=True).items():
    if typing.get_origin(hint) is Annotated:
      known[name] = hint.__metadata__[0]
    elif hint in FINITE:
      known[name] = FINITE[hint]
  return known


class Section:
  """Checks its rules at construction; base of the frozen sections.

  A subclass gives its name in the configuration: `section='model'`.
  """

  def __init_subclass__(cls, section: str = ''):
    if section:
      cls.section = section

  def __post_init__(self):
    if broken := [f'{self.section}.{rule}' for rule in self.broken()]:
      raise ConfigError(broken)

  def broken(self) -> Iterator[str]:
    """Yields 'key=value: the rule' for each rule that does not hold."""
    for key, rule in rules(type(self)).items():
      value = getattr(self, key)
      if not rule.holds(value):
        yield f'{key}={value!r}: {rule.text}'
    yield from self.broken_rules()

  def broken_rules(self) -> Iterator[str]:
    """Yields those rules that are of several keys, or of no type of key."""
    return iter(())


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section, section='model'):
  """Architecture of the model; shapes as in `diloco/models`."""

  kind: one_of_or_own(KINDS) = 'decoder'
  given: str = ''  # Of kind 'given': folder of the syncer's initial arrays.
  vocab: at_least(2) = 256  # One token per byte.
  layers: Count = 4  # Decoder blocks.
  d_model: Count = 128  # Width of the residual stream.
  heads: Count = 4  # Query heads.
  kv_heads: Count = 2  # Key and value heads; divides heads.
  head_dim: Count = 32  # Width of one head; even, for RoPE.
  d_ff: Count = 384  # Width of the gated MLP; of each expert, where kind='moe'.
  rope_theta: float = 10_000.0  # Base of RoPE's wavelengths.
  dtype: one_of(DTYPES) = 'float32'  # Of activations; parameters stay float32.
  # What the backward pass finds stored.
  remat: one_of(REMATS) = 'none'
  tied: bool = False  # Whether the output head is the embedding.
  # What computes attention; auto: the best for the devices.
  attention: one_of((AUTO, *ATTENTIONS)) = AUTO
  window: Whole = 0  # Places that a token sees, its own included; 0: all.
  attention_cap: NonNegative = 0.0  # Soft cap of its scores; 0: none.
  logit_cap: NonNegative = 0.0  # Soft cap of the logits; 0: none.
  z_loss: NonNegative = 0.0  # Weight of mean (log Σ exp logit)²; 0: none.
  qkv_bias: bool = False  # Whether queries, keys and values have a bias.
  qk_norm: bool = False  # Whether heads of queries and keys have an RMSNorm.
  norm_epsilon: F32 = 1e-6  # Of all RMSNorms.
  norm_offset: NonNegative = 0.0  # Added to their scales; 1: Gemma's.
  activation: one_of(ACTIVATIONS) = 'silu'  # Of the gated MLP.
  embedding_scale: NonNegative = 0.0  # Factor of its rows; 0: √d_model.
  head_scale: NonNegative = 0.0  # Of a tied head's logits; 0: 1 / √d_model.
  # What stretches RoPE's wavelengths by rope_factor: 'linear' all of them,
  # 'llama3' those above rope_length / rope_low, and partly those above
  # rope_length / rope_high.
  rope_scaling: one_of(ROPE_SCALINGS) = 'none'
  rope_factor: Positive = 1.0  # See rope_scaling.
  rope_low: Positive = 1.0  # See rope_scaling.
  rope_high: Positive = 4.0  # See rope_scaling.
  rope_length: Count = 8192  # See rope_scaling.
  # The parameters that training starts from: 'hf:FOLDER' of Hugging Face, the
  # folder of a run, or its `parameters`; '': drawn from the seed.
  init_from: str = ''
  # r of LoRA: adapters of that rank beside the layers' matrices are trained,
  # all else stays as `init_from` has it; 0: all parameters are trained.
  lora_rank: Whole = 0
  lora_alpha: NonNegative = 0.0  # A · B has the factor α/r; 0: α = 2 · r.
  experts: Count = 8  # Of each layer; this and all below of kind 'moe' only.
  top_k: Count = 2  # Experts that one token is sent to.
  aux_weight: NonNegative = 0.01  # Of the load-balancing loss.
  z_weight: NonNegative = 1e-5  # Of the router's z-loss.
  # What a step moves the bias by; 0: no bias.
  router_bias_rate: NonNegative = 0.0

  def broken_rules(self):
    kind = KINDS.get(self.kind)
    if not self.rope_theta > 1:
      yield f'rope_theta={self.rope_theta}: must be above 1'
    if self.kv_heads >= 1 and self.heads % self.kv_heads:
      yield f'kv_heads={self.kv_heads}: must divide model.heads={self.heads}'
    if self.head_dim % 2:
      yield f'head_dim={self.head_dim}: must be even, RoPE turns pairs'
    if not self.rope_low < self.rope_high:
      yield (
        f'rope_high={self.rope_high}: must be above '
        f'model.rope_low={self.rope_low}'
      )
    if kind and kind.has_experts and self.top_k > self.experts:
      yield (
        f'top_k={self.top_k}: must be at most model.experts={self.experts}'
      )
    if self.lora_rank and not (kind and kind.sizes and self.init_from):
      yield (
        f'lora_rank={self.lora_rank}: needs model.init_from, what the adapters '
        f'are beside, of a decoder; init_from={self.init_from!r}, '
        f'kind={self.kind!r}'
      )
    for key, value in (kind.fixed if kind else {}).items():
      if getattr(self, key) != value:
        yield (
          f'{key}={getattr(self, key)!r}: kind={self.kind!r} knows only '
          f'{value!r}'
        )


@dataclasses.dataclass(frozen=True)
class InnerConfig(Section, section='inner'):
  """The learners' optimizer and its schedule."""

  optimizer: one_of_or_own(INNER) = 'adamw'
  lr: F32 = 3e-3  # Peak learning rate.
  schedule: one_of(SCHEDULES) = 'cosine'
  warmup_steps: Whole = 20  # Linear warm-up, in steps of `progress`.
  final_fraction: Share = 0.1  # Last learning rate, as a share of lr.
  # The schedule follows t, or its 'own' steps.
  progress: one_of(PROGRESS) = 'global'
  b1: ShareBelow1 = 0.9  # Decay of AdamW's first moment.
  b2: ShareBelow1 = 0.95  # Decay of AdamW's second moment.
  moments: one_of(DTYPES) = 'float32'  # In which both are stored.
  eps: F32 = 1e-8  # Added to AdamW's denominator.
  weight_decay: NonNegative = 0.1  # Decoupled, of AdamW.
  clip_norm: NonNegative = 1.0  # Global gradient norm; 0 does not clip.
  accumulate: Count = 1  # Parts of a batch, one after another on the devices.


@dataclasses.dataclass(frozen=True)
class OuterConfig(Section, section='outer'):
  """The syncer's optimizer."""

  optimizer: one_of_or_own(OUTER) = 'sgd'
  lr: F32 = 0.6  # Of the outer step.
  momentum: ShareBelow1 = 0.7  # Of the outer step; b1 of 'adam'.
  nesterov: bool = True  # Nesterov's form of the momentum, of 'sgd'.
  b2: ShareBelow1 = 0.95  # Decay of the second moment of 'adam'.
  eps: F32 = 0.1  # Added to the denominator of 'adam'.
  # The share of the run, at its end, in which momentum goes to 0, and lr to
  # final_lr.
  anneal_fraction: Share = 0.1
  final_lr: F32 = 0.8  # What lr is at the end; see anneal_fraction.
  # The share of the run, at its start, in which lr goes from 1, and momentum
  # from 0, to what they are: rounds begin as plain means.
  warmup_fraction: Share = 0.0

  def broken_rules(self):
    kind = OUTER.get(self.optimizer)
    for key in ('anneal_fraction', 'warmup_fraction'):
      if kind and getattr(self, key) and not kind.anneals:
        yield (
          f'{key}={getattr(self, key)}: must be 0, '
          f'optimizer={self.optimizer!r} has no schedule'
        )
    if self.anneal_fraction + self.warmup_fraction > 1:
      yield (
        f'warmup_fraction={self.warmup_fraction}: must be at most 1 - '
        f'anneal_fraction={self.anneal_fraction}'
      )


@dataclasses.dataclass(frozen=True)
class FragmentsConfig(Section, section='fragments'):
  """Settings of the fragments; their number P is `protocol.fragments`."""

  scheme: one_of(fragments.SCHEMES) = 'balanced'
  embedding: one_of(fragments.EMBEDDINGS) = 'split'


@dataclasses.dataclass(frozen=True)
class CodecConfig(Section, section='codec'):
  """The encoding of fragments on the wire."""

  # Of a learner's delta to its base.
  up: one_of_or_own(codec.CODECS) = 'int4'
  down: one_of_or_own(codec.CODECS) = 'int4'  # Of the syncer's outer update.
  block_size: int = 128  # Values that share one scale.
  scale: one_of(codec.STORED) = 'bf16'  # Type of the scales.
  error_feedback: bool = True  # The syncer keeps its rounding residual.

  def broken_rules(self):
    multiple = codec.BLOCK_MULTIPLE
    if self.block_size < 1 or self.block_size % multiple:
      yield (
        f'block_size={self.block_size}: must be a positive multiple of '
        f'{multiple}'
      )

  def make(self, name: str) -> codec.Codec:
    """Makes `up`, `down` or another codec.

    Raises:
      ValueError: it is one of the user's own, which can't be found or fails the
        checks of `numerics.codec.check_codec`.
    """
    if own_code.parts(name) is None:
      return codec.make_codec(name, self.block_size, self.scale)
    key = 'codec.up' if name == self.up else 'codec.down'
    return own_code.make(key, name, self, check=codec.check_codec)

  def value_bytes(self, name: str) -> float:
    """Returns the bytes per value of a long tensor; errors as of `make`."""
    return codec.value_bytes(self.make(name))


@dataclasses.dataclass(frozen=True)
class MergeConfig(Section, section='merge'):
  """Settings of the merge of the learners' outer gradients."""

  rule: one_of_or_own(merge.RULES) = 'rda'  # Of all but embeddings.
  # Of embedding and output head.
  embedding: one_of_or_own(merge.RULES) = 'mean'


@dataclasses.dataclass(frozen=True)
class SyncerConfig(Section, section='syncer'):
  """The syncer's processes."""

  shards: Count = 1  # S, the processes that share Θ; one of them leads.


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section, section='mesh'):
  """Devices of one learner, by axis; their product is all it uses."""

  fsdp: Count = 1  # Devices of one slice over which parameters are sharded.
  expert: Count = 1  # Devices over which the experts are spread.
  context: Count = 1  # Devices over which a sequence is split.
  tensor: Count = 1  # Devices over which heads and d_ff are split.
  # Slices of a learner: groups of hosts that fail together, each with all
  # parameters and its share of the batch; the axes above are those of one.
  slices: Count = 1

  @property
  def slice_devices(self) -> int:
    """The number of devices that one slice takes."""
    return self.fsdp * self.expert * self.context * self.tensor

  @property
  def devices(self) -> int:
    """The number of devices that it takes, in all slices."""
    return self.slices * self.slice_devices

  @property
  def product(self) -> str:
    """The axes as a message names them."""
    axes = ('fsdp', 'expert', 'context', 'tensor')
    if self.slices > 1:
      axes = ('slices', *axes)
    sizes = (f'mesh.{axis}={getattr(self, axis)}' for axis in axes)
    return ' * '.join(sizes)


@dataclasses.dataclass(frozen=True)
class TransportConfig(Section, section='transport'):
  """Addresses of processes and the data plane; port 0 is any free one."""

  # What fragments travel by.
  data_plane: one_of(planes.CONFIGURABLE) = 'jax_transfer'
  host: str = '127.0.0.1'  # Where the syncer listens.
  port: int = 0  # 0: any free one.
  connect_s: Positive = 60.0  # How long a learner looks for the syncer.

  def broken_rules(self):
    if not self.host:
      yield "host='': must be a host name or address, such as 127.0.0.1"
    if not 0 <= self.port <= 65535:
      yield f'port={self.port}: must be in 0 … 65535'


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section, section='checkpoint'):
  """Settings of checkpoints: where, how often, and which to keep."""

  # Of this run alone, which all its machines see: a path, or gs://BUCKET/…;
  # '': the workdir.
  folder: str = ''
  keep_latest: Count = 2  # Newest checkpoints of a process that stay.
  syncer_every_rounds: Count = 16  # Between two of the syncer's.
  # Between two of a learner's, which take turns over this time; 0: none.
  learner_every_steps: Whole = 200
  # Of a learner with several slices on accelerators: steps between two copies
  # that outlive a lost slice. On CPUs each boundary does.
  slice_copy_every_steps: Count = 20
  # Of a learner that is behind the run: through a live peer, through a peer's
  # newest checkpoint, whose folder it must see, or that where no peer lives.
  bootstrap: one_of(BOOTSTRAPS) = 'peer'
  # A close is on disk before any learner is told: it survives a loss of power,
  # not only the end of the process.
  fsync: bool = True

  def broken_rules(self):
    if not re.fullmatch(r'(/.*|gs://[^/]+/.*[^/].*)?', self.folder):
      yield (
        f'folder={self.folder!r}: must be an absolute path or '
        "gs://BUCKET/FOLDER, or '' for the workdir"
      )


@dataclasses.dataclass(frozen=True)
class ProcessConfig(Section, section='run'):
  """The section `run`: cadence, evaluation, restarts, threads."""

  log_every_steps: Count = 10  # Between two records of a learner's metrics.
  profile_at_step: Whole = 0  # A process's step that begins a trace; 0: none.
  profile_steps: Count = 5  # Inner steps of a trace, also of one asked for.
  # Rounds between two evaluations of Θ while the run goes on; 0: none.
  eval_every_rounds: Whole = 32
  eval_batches: Count = 16  # Held-out batches of one evaluation.
  eval_batch: Count = 16  # Sequences in one of them.
  restarts_max: Whole = 10  # Of one process; then the run stops.
  restart_delay_s: NonNegative = 1.0  # Between a death and the restart.
  cpu_threads: Whole = 0  # NPROC of each process; 0 leaves it as it is.
  compilation_cache: bool = True  # One for all processes, in the workdir.
  # An inner step takes at least this: it sleeps.
  step_floor_s: NonNegative = 0.0


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


# A nested mapping, read into sections; all that is wrong is listed.


TUPLES = {
  tuple[str, ...]: (str, 'a tuple of str'),
  tuple[int, ...]: (int, 'a tuple of int'),
  tuple[float, ...]: (float, 'a tuple of float'),
}


def split_fields(
  config: type, but: Collection[str] = ()
) -> tuple[dict[str, type], dict[str, type]]:
  """Returns the types of a configuration's sections, and of its other keys."""
  types = typing.get_type_hints(config)
  types = {name: types[name] for name in types if name not in but}
  parts = {n: t for n, t in types.items() if dataclasses.is_dataclass(t)}
  return parts, {n: t for n, t in types.items() if n not in parts}


def key_types(
  sections: Mapping[str, type], top: Mapping[str, type]
) -> dict[str, type]:
  """Every valid key, such as 'outer.lr', with the type of its value.

  Args:
    sections: the dataclass of each section, by name.
    top: types of the keys outside of any section.
  """
  types = dict(top)
  for section, cls in sections.items():
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
      types[f'{section}.{field.name}'] = hints[field.name]
  return types


def typed_values(
  config: Mapping, expected: Mapping[str, type]
) -> tuple[dict[str, object], list[str]]:
  """Values by flat key, as far as they are valid, and what is wrong.

  Unknown keys are named with the nearest valid one.
  """
  values = flatten(config)
  problems = [
    f'{key}: unknown key{nearest(key, expected)}'
    for key in sorted(values.keys() - expected.keys())
  ]
  problems += [
    f'{key}: missing, expected {type_name(expected[key])}'
    for key in sorted(expected.keys() - values.keys())
  ]
  typed = {}
  for key in sorted(values.keys() & expected.keys()):
    try:
      typed[key] = _as_type(values[key], expected[key])
    except TypeError:
      problems.append(
        f'{key}={values[key]!r}: expected {type_name(expected[key])}, got '
        f'{type(values[key]).__name__}'
      )
  if (blend := typed.get(BLEND)) in OLD_BLENDS:
    typed[BLEND] = _renamed(blend)
  return typed, problems


@functools.cache  # Of a sweep's many variants, one says so.
def _renamed(blend: str) -> str:
  text = f'note: {BLEND}={blend} is now {OLD_BLENDS[blend]}'
  print(f'{text}; the old name goes with the next release', file=sys.stderr)
  return OLD_BLENDS[blend]


def make_sections(
  typed: Mapping[str, object], sections: Mapping[str, type]
) -> tuple[dict[str, object], list[str]]:
  """The sections of which all values are there, and the rules they break."""
  parts, problems = {}, []
  for section, cls in sections.items():
    names = [field.name for field in dataclasses.fields(cls)]
    if not all(f'{section}.{name}' in typed for name in names):
      continue  # Already reported as missing or of the wrong type.
    try:
      parts[section] = cls(**{n: typed[f'{section}.{n}'] for n in names})
    except ConfigError as error:
      problems += error.problems
    except ValueError as error:  # ProtocolConfig's own rules.
      rules = re.split(r'; (?=\w+=)', str(error).removeprefix(f'{section}: '))
      problems += [f'{section}.{rule}' for rule in rules]
  return parts, problems


def nearest(key: str, valid) -> str:
  """Returns ', did you mean …?' with the valid key most like `key`, or ''."""
  section, _, name = key.rpartition('.')
  initials = ''.join(word[:1] for word in name.split('_'))
  short = f'{section}.{initials}'
  if '_' in name and short in valid:  # learning_rate is called lr.
    return f', did you mean {short}?'
  near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
  if not near:  # The section may be wrong, or left out.
    last = key.rpartition('.')[2]
    near = [k for k in sorted(valid) if k.rpartition('.')[2] == last]
  return f', did you mean {near[0]}?' if near else ''


def flatten(config: Mapping, prefix: str = '') -> dict[str, object]:
  """Flattens a nested mapping: {'outer': {'lr': 1.0}} to {'outer.lr': 1.0}."""
  flat = {}
  for key in config:
    value = config[key]
    if hasattr(value, 'keys'):  # Mapping or ConfigDict.
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[f'{prefix}{key}'] = value
  return flat


def _as_type(value, kind):
  """Converts `value` to `kind`; an int may be a float, a bool no int."""
  if kind in TUPLES:
    if not isinstance(value, list | tuple):
      raise TypeError
    return tuple(_as_type(item, TUPLES[kind][0]) for item in value)
  if kind is float and type(value) is int:
    value = float(value)
  if type(value) is not kind:
    raise TypeError
  return value


def type_name(kind) -> str:
  """Returns what a message calls the type of a key."""
  return TUPLES[kind][1] if kind in TUPLES else kind.__name__
