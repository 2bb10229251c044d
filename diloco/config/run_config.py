# SPDX-License-Identifier: Apache-2.0
"""Turns a configuration from `experiments/` into one checked, frozen value.

Imports no jax: the launcher reads configurations on machines without devices.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping

from diloco.config import own_code, sections
from diloco.config.data_section import BYTES, DataConfig
from diloco.config.lab_section import LabConfig
from diloco.config.sections import ConfigError
from diloco.data.sources import BYTE_VOCAB, IN_MEMORY
from diloco.models.kinds import KINDS
from diloco.numerics.fragments import EMBEDDINGS
from diloco.numerics.merge import RULES
from diloco.numerics.schedule import DECAY_FRACTION, SCHEDULES
from diloco.protocol.config import BLEND, ProtocolConfig, with_current_blend
from diloco.transport.planes import PLANES

ALL_LEARNERS = 0  # As protocol.quorum.

TOTAL_STEPS = 'protocol.total_steps'
UNLIKE = 'unlike_learners'

# Bounds of a run's processes, derived from M, P, S and the ids.
SESSIONS_MAX = 1024  # Of a syncer; each has two threads there.
SESSIONS_LEAST = 64
SPARE_SESSIONS = 16  # Of learners that are back while their old one ends.
MESSAGE_BYTES_MAX = 1 << 20  # As `transport.wire` has it; a test compares.
PULLS_PER_LEARNER = 4  # Side by side.
SHARES_BYTES = 48  # Of one learner in an `Update`, at most.
PART_BYTES = 32  # Of one part of a payload, and its CRC in an `Update`.
FRAGMENT_BYTES = 160  # Of one fragment in a `StateOffered`, at most.
MESSAGE_ROOM_BYTES = 1 << 14  # For all other fields of a message.

# What may differ between processes of one run: where they run and how fast.
PER_PROCESS_KEYS = frozenset(
  {
    'name',  # Compared by itself in the hello.
    'faults',
    UNLIKE,
    'checkpoint',
    'mesh',
    'run',
    'lab',
    'data.path',  # The text itself has its own fingerprint: all of these
    'data.mix',  # that decide about tokens are in it.
    'data.text_key',
    'data.tokenizer',
    'data.end_token',
    'data.heldout_path',
    'data.index_path',
    'data.threads',
    'data.batch',  # What was trained is counted in rows and tokens.
    'inner.accumulate',
    'model.given',
    'model.remat',
    'model.init_from',  # The parameters have their own fingerprint.
    'transport.connect_s',
    'transport.host',
    'transport.port',
  }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """One validated run configuration; made by `build`."""

  name: str = 'base'  # Of the run; learners of another run are refused.
  seed: int = 0  # Of the initial parameters and of the data order.
  faults: tuple[str, ...] = ()  # Such as 'kill learner 1 at 0.33' of the steps.
  # Settings of single learners, such as '1: data.batch=2, mesh.fsdp=2; 3-4: …'.
  unlike_learners: str = ''
  model: sections.ModelConfig
  data: DataConfig
  inner: sections.InnerConfig
  outer: sections.OuterConfig
  fragments: sections.FragmentsConfig
  codec: sections.CodecConfig
  merge: sections.MergeConfig
  protocol: ProtocolConfig
  syncer: sections.SyncerConfig
  mesh: sections.MeshConfig
  transport: sections.TransportConfig
  checkpoint: sections.CheckpointConfig
  run: sections.ProcessConfig
  lab: LabConfig

  def __post_init__(self):
    broken = list(_broken_between(_shallow(self)))
    if broken:
      raise ConfigError(broken)


SECTIONS, TOP = sections.split_fields(RunConfig)


def defaults() -> dict[str, object]:
  """Returns all keys of a run, nested, with their defaults."""
  values = {name: sections.defaults(SECTIONS[name]) for name in SECTIONS}
  top = sections.defaults(RunConfig)
  return {n: top[n] for n in TOP} | values


def build(config: Mapping) -> RunConfig:
  """The checked value of a nested mapping, such as a `ConfigDict`.

  Raises:
    ConfigError: lists unknown keys with the nearest valid one, missing keys,
      wrong types and broken rules, all in one message.
  """
  if 'study' in config:
    raise ConfigError(
      'this configuration is of a simulation, not of a training run: start '
      'it with python -m diloco.simulate --config=…'
    )
  typed, problems = sections.typed_values(config, key_types())
  _fill_quorum(typed)
  parts, broken = _parts(typed)
  problems += [*broken, *_broken_between(parts)]
  if problems:
    raise ConfigError(problems)
  return RunConfig(**parts)


def restore(fields: Mapping) -> RunConfig:
  """The value of which `dataclasses.asdict` gave `fields`, also by JSON.

  Raises:
    ConfigError: as `build`.
  """
  return build(unfold(fields))


def unfold(fields: Mapping) -> dict:
  """Returns what `dataclasses.asdict` gave, with the keys of a file of
  `experiments/`.

  Keys that are newer than it have their defaults, with which a run goes on as
  it began.
  """
  unfolded = {UNLIKE: '', **fields}
  for section, cls in SECTIONS.items():
    if isinstance(recorded := fields.get(section), Mapping):
      unfolded[section] = sections.defaults(cls) | with_current_blend(recorded)
  unfolded.get('checkpoint', {}).pop('keep_best', None)  # Gone since 0.1.0.
  if 'blend_alpha' in unfolded:  # Where it stood once.
    unfolded['protocol']['blend_alpha'] = unfolded.pop('blend_alpha')
  return unfolded


def flat(config: RunConfig) -> dict[str, object]:
  """Returns all keys with their values, such as 'outer.lr'."""
  return sections.flatten(unfold(dataclasses.asdict(config)))


def key_types() -> dict[str, type]:
  """Every valid key, such as 'outer.lr', with the type of its value."""
  return sections.key_types(SECTIONS, TOP)


def own_code_of(config: RunConfig) -> Iterator[tuple[str, str]]:
  """Yields the keys that name a function of the user's own, with the value."""
  keys = [
    f'{section}.{key}'
    for section, cls in SECTIONS.items()
    for key, rule in sections.rules(cls).items()
    if rule.takes_own
  ]
  values = flat(config)
  for key in (*keys, BLEND):
    if own_code.parts(values[key]):
      yield key, values[key]


def with_slices(config: RunConfig, live: int) -> RunConfig:
  """Returns the configuration of a learner that has so many of its slices.

  The rows of a slice stay what they are.

  Raises:
    ConfigError: it has not so many.
  """
  slices = config.mesh.slices
  if not 1 <= live <= slices:
    raise ConfigError(f'{live} slices: must be in 1 … mesh.slices={slices}')
  rows = config.data.batch // slices
  return dataclasses.replace(
    config,
    data=dataclasses.replace(config.data, batch=rows * live),
    mesh=dataclasses.replace(config.mesh, slices=live),
  )


def check_devices(config: RunConfig, device_count: int) -> None:
  """Refuses a mesh that does not fit the devices of this learner.

  Raises:
    ConfigError: the mesh needs more devices than there are, or leaves some.
  """
  mesh = config.mesh
  if mesh.devices != device_count:
    raise ConfigError(
      f'{mesh.product} = {mesh.devices} devices: this learner has '
      f'{device_count}'
    )


def check_learner(config: RunConfig, learner: int) -> None:
  """Refuses a learner id that the run does not have.

  Raises:
    ConfigError: it is not in 0 … data.shards - 1.
  """
  if not 0 <= learner < config.data.shards:
    raise ConfigError(
      f'learner={learner}: must be in 0 … {config.data.shards - 1}, there '
      f'are data.shards={config.data.shards}'
    )


def agreement(config: RunConfig) -> dict[str, str]:
  """Returns what learners and syncer must agree on, as JSON by key."""
  values = sections.flatten(dataclasses.asdict(config))
  return {k: json.dumps(x) for k, x in values.items() if _is_agreed(k)}


def _is_agreed(key: str) -> bool:
  return PER_PROCESS_KEYS.isdisjoint((key, key.partition('.')[0]))


def extended(
  mine: Mapping[str, str], theirs: Mapping[str, str]
) -> dict[str, str]:
  """Returns the agreement `theirs`, with the steps of `mine` if those are more.

  A run may be extended, never shortened: both have one beginning.
  """
  steps = mine.get(TOTAL_STEPS), theirs.get(TOTAL_STEPS)
  if None in steps or int(steps[0]) <= int(steps[1]):
    return dict(theirs)
  return {**theirs, TOTAL_STEPS: steps[0]}


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
  """Names what differs between two agreements; '' if nothing does.

  Keys of sections that are newer than one of them have their defaults in it, as
  in `unfold`. One that an older agreement has, and no newer, says nothing.
  """
  newer = {
    f'{section}.{key}': json.dumps(value)
    for section, cls in SECTIONS.items()
    for key, value in sections.defaults(cls).items()
    if f'{section}.{key}' in mine.keys() ^ theirs.keys()
  }
  mine, theirs = newer | dict(mine), newer | dict(theirs)
  keys = sorted(filter(_is_agreed, mine.keys() | theirs.keys()))
  return '; '.join(
    f'{key}: {mine.get(key, "absent")} here, {theirs.get(key, "absent")} there'
    for key in keys
    if mine.get(key) != theirs.get(key)
  )


@dataclasses.dataclass(frozen=True)
class RunLimits:
  """Limits of a syncer of a run."""

  sessions: int
  pulls: int  # Concurrent pulls of one shard.
  workers: int  # Threads of a gRPC data plane that sends to all learners.
  hosts: int


def limits_of(learners: int, ids: int, shards: int) -> RunLimits:
  """The limits of a run.

  Args:
    ids: of learners that may join, `data.shards`; at least M.
  """
  wanted = ids + shards - 1 + SPARE_SESSIONS
  sessions = min(max(wanted, SESSIONS_LEAST), SESSIONS_MAX)
  update = MESSAGE_BYTES_MAX - MESSAGE_ROOM_BYTES - SHARES_BYTES * learners
  return RunLimits(
    sessions=sessions,
    pulls=PULLS_PER_LEARNER * learners,
    workers=sessions,
    hosts=max(0, update // (PART_BYTES * shards)),
  )


def _fill_quorum(typed: dict[str, object]):
  """A quorum of all follows whatever number of learners there is."""
  if (
    typed.get('protocol.quorum') == ALL_LEARNERS
    and 'protocol.learners' in typed
  ):
    typed['protocol.quorum'] = typed['protocol.learners']


def _parts(typed: Mapping[str, object]) -> tuple[dict, list[str]]:
  """RunConfig's arguments as far as `typed` has them, and broken rules."""
  parts = {key: typed[key] for key in TOP if key in typed}
  built, problems = sections.make_sections(typed, SECTIONS)
  return parts | built, problems


def _broken_between(parts: Mapping) -> Iterator[str]:
  """Rules of the top level and between sections, as far as all are there."""
  yield from sections.broken_top(parts)
  for keys, rule in CROSS_RULES:
    if all(key in parts for key in keys):
      yield from rule(*(parts[key] for key in keys))


def _bytes_fit(model, data) -> Iterator[str]:
  # What other tokenizers need is known when their files are read.
  if own_code.parts(data.source):
    return  # Its tokens are looked at, see `corpus.check_corpus`.
  source = IN_MEMORY.get(data.source)
  needed = source.vocab_min if source else BYTE_VOCAB
  if data.tokenizer == BYTES and model.vocab < needed:
    yield (
      f'model.vocab={model.vocab}: data.source={data.source!r} needs {needed}'
    )


def _warmup_fits(inner, protocol) -> Iterator[str]:
  total_steps = protocol.total_steps
  if inner.warmup_steps >= total_steps:
    yield (
      f'inner.warmup_steps={inner.warmup_steps}: must be less than '
      f'protocol.total_steps={total_steps}'
    )
  elif (
    SCHEDULES[inner.schedule].is_late
    and inner.warmup_steps > (1 - DECAY_FRACTION) * total_steps
  ):
    yield (
      f'inner.warmup_steps={inner.warmup_steps}: schedule {inner.schedule!r} '
      f'falls in the last {DECAY_FRACTION:.0%} of protocol.total_steps='
      f'{total_steps}, warm-up must end before'
    )


def _shards_suffice(data, protocol) -> Iterator[str]:
  if data.shards < protocol.learners:
    yield (
      f'data.shards={data.shards}: must be at least '
      f'protocol.learners={protocol.learners}, one for each'
    )


def _syncer_serves(protocol, syncer) -> Iterator[str]:
  """Yields the rule for what no syncer serves, whose sessions and messages grow
  with M.
  """
  most = SESSIONS_MAX - SPARE_SESSIONS - (syncer.shards - 1)
  if protocol.learners > most:
    yield (
      f'protocol.learners={protocol.learners}: a syncer of '
      f'syncer.shards={syncer.shards} serves at most {most}'
    )
  most = (MESSAGE_BYTES_MAX - MESSAGE_ROOM_BYTES) // FRAGMENT_BYTES
  if protocol.fragments > most:
    yield (
      f'protocol.fragments={protocol.fragments}: at most {most}, or what is '
      'said of all of them would not fit one message'
    )


def _parts_divide(data, inner, mesh) -> Iterator[str]:
  parts = mesh.slices * mesh.fsdp * mesh.expert * inner.accumulate
  if data.batch % parts:
    slices = f'mesh.slices={mesh.slices} * ' if mesh.slices > 1 else ''
    yield (
      f'data.batch={data.batch}: must be a multiple of {slices}'
      f'mesh.fsdp={mesh.fsdp} '
      f'* mesh.expert={mesh.expert} * inner.accumulate={inner.accumulate} = '
      f'{parts}'
    )


def _mesh_divides(model, data, mesh) -> Iterator[str]:
  sizes = (
    ('model.d_model', model.d_model, 'fsdp'),
    ('model.heads', model.heads, 'tensor'),
    ('model.kv_heads', model.kv_heads, 'tensor'),
    ('model.d_ff', model.d_ff, 'tensor'),
    ('model.vocab', model.vocab, 'tensor'),
    ('data.seq_len', data.seq_len, 'context'),
  )
  # What lies where of a model of the user's own, its own table says.
  kind = KINDS.get(model.kind)
  for key, value, axis in sizes if kind else ():
    if value % getattr(mesh, axis):
      yield (
        f'{key}={value}: must be a multiple of '
        f'mesh.{axis}={getattr(mesh, axis)}'
      )
  has_experts = kind is not None and kind.has_experts
  if mesh.expert > 1 and not has_experts:
    yield (
      f'mesh.expert={mesh.expert}: must be 1, model.kind={model.kind!r} has no '
      'experts'
    )
  elif has_experts and model.experts % mesh.expert:
    yield (
      f'model.experts={model.experts}: must be a multiple of '
      f'mesh.expert={mesh.expert}'
    )


def _rda_of_whole_tables(merge, fragments, protocol) -> Iterator[str]:
  """A rule of whole tensors takes a norm; a slice of rows has another."""
  rule = RULES.get(merge.embedding)  # Of the user's own: see `run.choices`.
  if (
    rule is not None
    and rule.of_whole_tensors
    and EMBEDDINGS[fragments.embedding].cuts_rows
    and protocol.fragments > 1
  ):
    yield (
      f'merge.embedding={merge.embedding!r}: fragments.embedding='
      f'{fragments.embedding!r} cuts the tables by rows over '
      f'protocol.fragments={protocol.fragments}, and '
      f'{merge.embedding.upper()} is of a whole tensor; give '
      "fragments.embedding='own', or merge.embedding='mean'"
    )


def _transfers_run(transport, run) -> Iterator[str]:
  """Some planes' transfers need a thread of their own beside the steps."""
  needed = PLANES[transport.data_plane].threads_min
  if 0 < run.cpu_threads < needed:
    yield (
      f'run.cpu_threads={run.cpu_threads}: '
      f'data_plane={transport.data_plane!r} needs {needed} at least (or 0, '
      'as many as there are cores): transfers share the threads of the steps '
      'and would starve on one'
    )


def _one_stays(protocol, lab) -> Iterator[str]:
  """Requires a permanent learner: with none, t would stand still for ever."""
  if lab.visitors >= protocol.learners:
    yield (
      f'lab.visitors={lab.visitors}: must be less than '
      f'protocol.learners={protocol.learners}: one must stay'
    )


# What the arguments of a rule are called in RunConfig, and the rule.
CROSS_RULES = (
  (('model', 'data'), _bytes_fit),
  (('inner', 'protocol'), _warmup_fits),
  (('data', 'protocol'), _shards_suffice),
  (('protocol', 'syncer'), _syncer_serves),
  (('data', 'inner', 'mesh'), _parts_divide),
  (('model', 'data', 'mesh'), _mesh_divides),
  (('merge', 'fragments', 'protocol'), _rda_of_whole_tables),
  (('transport', 'run'), _transfers_run),
  (('protocol', 'lab'), _one_stays),
)


def _shallow(value) -> dict:
  return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
