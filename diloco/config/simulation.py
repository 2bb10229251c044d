# SPDX-License-Identifier: Apache-2.0
"""The configuration of a simulation as one checked, frozen value.

A key stands here with its type, default and rules. The sections `protocol` and
`codec` are those of a run, with the paper's settings of the protocol.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from diloco.config import parsing, sections
from diloco.config.sections import ConfigError, Section
from diloco.fleets.failures import REPAIRS
from diloco.fleets.systems import RECOVERIES, SYSTEMS
from diloco.protocol.config import ProtocolConfig


@dataclasses.dataclass(frozen=True)
class FleetConfig(Section):
  """The machines: how many, how fast, how even."""

  SECTION = 'fleet'

  chips: int = 1_200_000  # N, of all learners together.
  slice_chips: int = 256  # Of one slice, the unit that is lost and comes back.
  step_s: float = 1.0  # Of an inner step of a whole learner.
  tokens: int = 1 << 20  # Of an inner step of a whole learner.
  slow_learners: int = 0  # How many are slower than the others.
  # A slow learner makes 1 − gap steps while another makes one.
  slow_gap: float = 0.18
  jitter: float = 0.0  # Standard deviation of a step's length, as a share.
  drift: float = 0.0  # The same, per √hour, of a learner's speed.

  def broken_rules(self):
    yield from self._at_least(1, 'chips', 'slice_chips', 'tokens')
    yield from self._positive('step_s')
    yield from self._at_least(0, 'slow_learners', 'jitter', 'drift')
    yield from self._share('slow_gap', one=False)
    if not self.jitter < 1:
      yield f'jitter={self.jitter}: must be below 1'


@dataclasses.dataclass(frozen=True)
class FailuresConfig(Section):
  """Failures and their cost, after the paper's simulated fleets.

  A learner recovers in one of three ways. 'wait': it stands until the slice is
  back, and pauses; a launch of this project does that. 'restart': its process
  dies, starts again without the slice after a pause, and bootstraps through a
  peer. 'elastic', the paper's: it pauses, runs on without the slice, and pauses
  again when that is back.
  """

  SECTION = 'failures'
  INFINITE = frozenset({'mtbi_days', 'syncer_mtbi_hours'})

  mtbi_days: float = 365.0  # Between two interruptions of one chip; inf: none.
  # Keys of RECOVERIES, separated by commas: simulated side by side.
  recovery: str = ','.join(RECOVERIES)
  pause_s: float = 13.7  # Of a reconfiguration: our fit to the paper's Table 1.
  # Distribution of the time until a slice is back: a key of REPAIRS.
  repair: str = 'exponentiated_weibull'
  repair_s: float = 66.3  # Mean; with one pause 80 s, our fit to Table 1.
  # k and a of the exponentiated Weibull, P(x) = (1 − e^−(x/l)^k)^a; the paper
  # names the distribution, not its parameters.
  repair_shape: float = 1.5
  repair_power: float = 1.0  # 1: a plain Weibull.
  # True: an interrupted step is made again; else its loss is part of pause_s.
  redoes_step: bool = False
  syncer_mtbi_hours: float = math.inf  # Between two deaths of the syncer.
  syncer_outage_s: float = 30.0  # Until it listens again.
  trace: str = ''  # CSV of a cluster's failures; '': they are drawn.

  def broken_rules(self):
    for key in ('mtbi_days', 'syncer_mtbi_hours'):
      if not getattr(self, key) > 0:
        yield f'{key}={getattr(self, key)}: must be above 0; inf for never'
    if unknown := [name for name in self.recoveries if name not in RECOVERIES]:
      yield (
        f'recovery={self.recovery!r}: {unknown[0]!r} must be one of '
        f'{", ".join(RECOVERIES)}'
      )
    yield from self._one_of('repair', REPAIRS)
    yield from self._positive('repair_shape', 'repair_power')
    yield from self._finite('pause_s', 'repair_s', 'syncer_outage_s')

  @property
  def recoveries(self) -> tuple[str, ...]:
    return tuple(dict.fromkeys(self.recovery.split(',')))


@dataclasses.dataclass(frozen=True)
class NetworkConfig(Section):
  """Links between data centres, and what travels on them.

  Learners and shards of the syncer are spread over the data centres evenly.
  What stays in one costs nothing; where there is one only, every byte is
  carried by the link between a learner and the syncer.
  """

  SECTION = 'network'
  INFINITE = frozenset({'learner_gbps', 'syncer_gbps'})

  params: float = 5e9  # Of the model.
  datacentres: int = 1  # D, between which links are slow.
  learner_gbps: float = math.inf  # Of a learner's link, each way.
  syncer_gbps: float = math.inf  # Of the syncer's, each way, shared by all.
  latency_s: float = 0.01  # One way.
  encode_s: float = 0.02  # Of a fragment, at the learner.
  merge_s: float = 0.05  # Of a fragment, at the syncer.
  # Of what a joiner gets from a peer: θ and two moments in f32.
  state_bytes_per_param: float = 12.0
  # Of the parameters, in a fragment of their own; 0: all fragments are equal.
  embedding_share: float = 0.0

  def broken_rules(self):
    yield from self._at_least(1, 'params', 'datacentres')
    yield from self._at_least(0, 'latency_s', 'encode_s', 'merge_s')
    yield from self._at_least(0, 'state_bytes_per_param')
    yield from self._share('embedding_share', one=False)
    for key in ('learner_gbps', 'syncer_gbps'):
      if not getattr(self, key) > 0:
        yield f'{key}={getattr(self, key)}: must be above 0; inf for no limit'


@dataclasses.dataclass(frozen=True)
class Study(Section):
  """Fields common to all studies; base of the sections `study`."""

  SECTION = 'study'

  kind: str = ''  # A key of STUDIES.
  seeds: int = 3  # Runs of every cell, from `seed` on.

  def broken_rules(self):
    yield from self._at_least(1, 'seeds')

  def _each(self, key: str, least: float) -> Iterator[str]:
    items = getattr(self, key)
    if not items or not all(item >= least for item in items):
      yield f'{key}={items}: must be some numbers, each at least {least}'


@dataclasses.dataclass(frozen=True)
class GoodputStudy(Study):
  """Systems on fleets of different sizes, on the same failures."""

  systems: tuple[str, ...] = tuple(SYSTEMS)  # Those that are simulated.
  # N, of all learners together; one row each.
  chips: tuple[int, ...] = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
  # M of Decoupled DiLoCo; the DiLoCos in lock-step have the most.
  learners: tuple[int, ...] = (2, 4, 8, 16)
  # Simulated time of one cell and seed, times its learners.
  learner_hours: float = 16.0
  timeline_s: float = 300.0  # Drawn, of the largest fleet.

  def broken_rules(self):
    yield from super().broken_rules()
    yield from self._each('chips', 1)
    yield from self._each('learners', 1)
    yield from self._positive('learner_hours', 'timeline_s')
    for system in self.systems:
      if system not in SYSTEMS:
        yield f'systems: {system!r} must be one of {", ".join(SYSTEMS)}'


@dataclasses.dataclass(frozen=True)
class BandwidthStudy(Study):
  """The bandwidth that a system needs to keep the chips busy."""

  datacentres: tuple[int, ...] = (2, 8)  # D, one table each.
  steps_s: tuple[float, ...] = (1.0,)  # Lengths of a step, one table each.
  # Shares of the time in which chips compute that are aimed at.
  utilisations: tuple[float, ...] = (0.5, 0.75, 0.9, 0.95, 0.99)
  buckets: int = 128  # Of data-parallel's gradients.
  # Bandwidths at which the real machines are simulated.
  gbps: tuple[float, ...] = (0.1, 0.2, 0.43, 0.86, 1.7, 3.4)

  def broken_rules(self):
    yield from super().broken_rules()
    yield from self._each('datacentres', 1)
    yield from self._each('steps_s', 1e-6)
    yield from self._each('gbps', 1e-9)
    yield from self._at_least(1, 'buckets')
    if not all(0 < u < 1 for u in self.utilisations):
      yield f'utilisations={self.utilisations}: each must be in (0, 1)'


@dataclasses.dataclass(frozen=True)
class HeterogeneousStudy(Study):
  """Learners of unequal speed under different quorums."""

  SETTINGS = ('K=M', 'K=1', 'K=1 grace', 'K=1 latest', 'K=1 grace latest')

  settings: tuple[str, ...] = SETTINGS  # The rows of the table.
  steps: int = 2000  # Inner steps of the fastest learner.

  def broken_rules(self):
    yield from super().broken_rules()
    yield from self._at_least(1, 'steps')
    if not self.settings:
      yield f'settings=(): must be some of {self.SETTINGS}'
    for setting in self.settings:
      if setting not in self.SETTINGS:
        yield f'settings: {setting!r} must be one of {self.SETTINGS}'


@dataclasses.dataclass(frozen=True)
class ScavengingStudy(Study):
  """Learners that are there for a part of the work only."""

  # Numbers of extra learners, one row each; times are relative to 0.
  extra: tuple[int, ...] = (0, 1, 2, 4, 12)
  begin: float = 0.25  # Share of the tokens after which they join.
  end: float = 0.75  # Share after which they leave.
  steps: int = 1000  # Inner steps of each learner if there are no extra ones.
  notice_s: float = 5.0  # Within which they leave.

  def broken_rules(self):
    yield from super().broken_rules()
    yield from self._each('extra', 0)
    yield from self._at_least(1, 'steps')
    yield from self._at_least(0, 'notice_s')
    if not 0 <= self.begin < self.end <= 1:
      yield f'begin={self.begin}, end={self.end}: must be 0 ≤ begin < end ≤ 1'


STUDIES = {
  'goodput': GoodputStudy,
  'bandwidth': BandwidthStudy,
  'heterogeneous': HeterogeneousStudy,
  'scavenging': ScavengingStudy,
}
# What differs from a run: the paper's settings.
PROTOCOL = sections.defaults(ProtocolConfig) | {
  'learners': 8,
  'fragments': 24,
  'sync_every_steps': 24,
  'overlap_steps': 2,
  'quorum': 1,
  'grace_cap_steps': 1.0,
  'total_steps': 10**9,  # The study says when it ends.
}


@dataclasses.dataclass(frozen=True)
class SimulationConfig:
  """One validated simulation; made by `build`."""

  name: str
  seed: int
  fleet: FleetConfig
  failures: FailuresConfig
  network: NetworkConfig
  codec: sections.CodecConfig
  protocol: ProtocolConfig
  study: Study


SECTIONS, TOP = parsing.split_fields(SimulationConfig, but=('study',))


def defaults(kind: str) -> dict[str, object]:
  """Returns all keys of a simulation with their defaults.

  Args:
    kind: of the study, a key of STUDIES.
  """
  made = {name: sections.defaults(SECTIONS[name]) for name in SECTIONS}
  study = sections.defaults(STUDIES[kind]) | {'kind': kind}
  return made | {'name': kind, 'seed': 0, 'protocol': PROTOCOL, 'study': study}


def build(config: Mapping) -> SimulationConfig:
  """The checked value of a nested mapping, such as a `ConfigDict`.

  Raises:
    ConfigError: lists unknown keys with the nearest valid one, missing keys,
      wrong types and broken rules, all in one message.
  """
  if 'study' not in config:
    examples = ', '.join(f'experiments/{kind}.py' for kind in STUDIES)
    raise ConfigError(
      [
        'this configuration is of a training run, which launch.local starts; '
        f'a simulation takes one with a section study, such as {examples}'
      ]
    )
  kind = config['study'].get('kind')
  if kind not in STUDIES:
    raise ConfigError(
      [f'study.kind={kind!r}: must be one of {", ".join(STUDIES)}']
    )
  sections = {**SECTIONS, 'study': STUDIES[kind]}
  typed, problems = parsing.typed_values(
    config, parsing.key_types(sections, TOP)
  )
  parts, broken = parsing.make_sections(typed, sections)
  problems += [*broken, *_broken_between(typed, parts)]
  if problems:
    raise ConfigError(problems)
  return SimulationConfig(**{key: typed[key] for key in TOP}, **parts)


def _broken_between(typed: Mapping, parts: Mapping) -> Iterator[str]:
  yield from sections.broken_top(typed)
  fleet, protocol = parts.get('fleet'), parts.get('protocol')
  if fleet and protocol and fleet.slow_learners > protocol.learners:
    yield (
      f'fleet.slow_learners={fleet.slow_learners}: there are '
      f'protocol.learners={protocol.learners}'
    )
