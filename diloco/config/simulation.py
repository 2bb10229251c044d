# SPDX-License-Identifier: Apache-2.0
"""The configuration of a simulation as one checked, frozen value.

Defaults stand in `experiments/simulated.py`. The sections `protocol` and
`codec` are those of a run.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from diloco.config import parsing, sections
from diloco.config.sections import ConfigError, Section
from diloco.fleets.failures import REPAIRS
from diloco.protocol.config import ProtocolConfig

SEED_MAX = 2**32 - 1
RECOVERIES = ('elastic', 'wait', 'restart')
SYSTEMS = (
  'data-parallel',
  'elastic data-parallel',
  'synchronous DiLoCo',
  'streaming DiLoCo',
  'Decoupled DiLoCo',
)


@dataclasses.dataclass(frozen=True)
class FleetConfig(Section):
  """The machines: how many, how fast, how even.

  Attributes:
    chips: N, of all learners together.
    slice_chips: of one slice, the unit that is lost and comes back.
    step_s: of an inner step of a learner with all its slices.
    tokens: of an inner step of a learner with all its slices.
    slow_learners: how many of the learners are slower than the others.
    slow_gap: a slow learner makes 1 − gap steps while another makes one.
    jitter: standard deviation of a step's length, as a share of it.
    drift: standard deviation, per √hour, of a learner's speed as a share.
  """

  SECTION = 'fleet'

  chips: int
  slice_chips: int
  step_s: float
  tokens: int
  slow_learners: int
  slow_gap: float
  jitter: float
  drift: float

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

  Attributes:
    mtbi_days: mean time between interruptions of one chip; inf: none.
    recovery: how a learner recovers. 'elastic': pauses, runs on without the
      slice, and pauses again when it is back. 'wait': stands until the slice is
      back, and pauses. 'restart': its process dies, and starts again, without
      the slice, after a pause; it bootstraps through a peer.
    pause_s: duration of one reconfiguration, down or up.
    repair: distribution of the time until a slice is back.
    repair_s: its mean.
    repair_shape: k of the exponentiated Weibull, P(x) = (1 − e^−(x/l)^k)^a.
    repair_power: a.
    redoes_step: True if an interrupted step is made again; otherwise its loss
      is part of `pause_s`.
    syncer_mtbi_hours: mean time between two deaths of the syncer; inf: none.
    syncer_outage_s: from its death until it listens again.
    trace: CSV of a cluster's failures instead of drawn ones; '': drawn.
  """

  SECTION = 'failures'

  mtbi_days: float
  recovery: str
  pause_s: float
  repair: str
  repair_s: float
  repair_shape: float
  repair_power: float
  redoes_step: bool
  syncer_mtbi_hours: float
  syncer_outage_s: float
  trace: str

  def broken_rules(self):
    for key in ('mtbi_days', 'syncer_mtbi_hours'):
      if not getattr(self, key) > 0:
        yield f'{key}={getattr(self, key)}: must be above 0; inf for never'
    yield from self._one_of('recovery', RECOVERIES)
    yield from self._one_of('repair', REPAIRS)
    yield from self._positive('repair_shape', 'repair_power')
    for key in ('pause_s', 'repair_s', 'syncer_outage_s'):
      if not 0 <= getattr(self, key) < float('inf'):
        yield f'{key}={getattr(self, key)}: must be finite, at least 0'


@dataclasses.dataclass(frozen=True)
class NetworkConfig(Section):
  """Links between data centres, and what travels on them.

  Attributes:
    params: of the model.
    datacentres: D; learners and shards of the syncer are spread over them
      evenly. What stays in a data centre costs nothing. 1: every byte is
      carried by the link between a learner and the syncer.
    learner_gbps: of a learner's link, each way; inf: no limit.
    syncer_gbps: of the syncer's link, each way, shared by all; inf: no limit.
    latency_s: one way.
    encode_s: of a fragment, at the learner.
    merge_s: of a fragment, at the syncer.
    state_bytes_per_param: of what a joiner gets from a peer.
    embedding_share: of the parameters, in a fragment of their own; 0: all
      fragments are equal.
  """

  SECTION = 'network'

  params: float
  datacentres: int
  learner_gbps: float
  syncer_gbps: float
  latency_s: float
  encode_s: float
  merge_s: float
  state_bytes_per_param: float
  embedding_share: float

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

  kind: str
  seeds: int  # Runs of every cell, from `seed` on.

  def broken_rules(self):
    yield from self._at_least(1, 'seeds')

  def _each(self, key: str, least: float) -> Iterator[str]:
    items = getattr(self, key)
    if not items or not all(item >= least for item in items):
      yield f'{key}={items}: must be some numbers, each at least {least}'


@dataclasses.dataclass(frozen=True)
class GoodputStudy(Study):
  """Systems on fleets of different sizes, on the same failures.

  Attributes:
    systems: of SYSTEMS.
    chips: fleet sizes.
    learners: M of Decoupled DiLoCo; the DiLoCos in lock-step have the most.
    learner_hours: simulated time of one cell and seed, times its learners.
    timeline_s: how much of the largest fleet's run is drawn.
  """

  systems: tuple[str, ...]
  chips: tuple[int, ...]
  learners: tuple[int, ...]
  learner_hours: float
  timeline_s: float

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
  """The bandwidth that a system needs to keep the chips busy.

  Attributes:
    datacentres: D, one table each.
    steps_s: lengths of a step, one table each.
    utilisations: target compute utilisations, as shares.
    buckets: number of buckets of data-parallel's gradients.
    steps: steps simulated for one utilisation.
    gbps: bandwidths at which the real machines are simulated.
  """

  datacentres: tuple[int, ...]
  steps_s: tuple[float, ...]
  utilisations: tuple[float, ...]
  buckets: int
  steps: int
  gbps: tuple[float, ...]

  def broken_rules(self):
    yield from super().broken_rules()
    yield from self._each('datacentres', 1)
    yield from self._each('steps_s', 1e-6)
    yield from self._each('gbps', 1e-9)
    yield from self._at_least(1, 'buckets', 'steps')
    if not all(0 < u < 1 for u in self.utilisations):
      yield f'utilisations={self.utilisations}: each must be in (0, 1)'


@dataclasses.dataclass(frozen=True)
class HeterogeneousStudy(Study):
  """Learners of unequal speed under different quorums.

  Attributes:
    settings: of SETTINGS, the rows of the table.
    steps: inner steps of the fastest learner.
    timeline_s: how much of each run is drawn.
  """

  SETTINGS = ('K=M', 'K=1', 'K=1 grace', 'K=1 latest', 'K=1 grace latest')

  settings: tuple[str, ...]
  steps: int
  timeline_s: float

  def broken_rules(self):
    yield from super().broken_rules()
    yield from self._at_least(1, 'steps')
    yield from self._positive('timeline_s')
    if not self.settings:
      yield f'settings=(): must be some of {self.SETTINGS}'
    for setting in self.settings:
      if setting not in self.SETTINGS:
        yield f'settings: {setting!r} must be one of {self.SETTINGS}'


@dataclasses.dataclass(frozen=True)
class ScavengingStudy(Study):
  """Learners that are there for a part of the work only.

  Attributes:
    extra: numbers of extra learners, one row each; times are relative to 0.
    begin: share of the tokens after which they join.
    end: share of the tokens after which they leave.
    steps: inner steps of each learner if there are no extra ones.
    notice_s: their notice time.
  """

  extra: tuple[int, ...]
  begin: float
  end: float
  steps: int
  notice_s: float

  def broken_rules(self):
    yield from super().broken_rules()
    yield from self._each('extra', 0)
    yield from self._at_least(1, 'steps')
    yield from self._at_least(0, 'notice_s')
    if not 0 <= self.begin < self.end <= 1:
      yield f'begin={self.begin}, end={self.end}: must be 0 ≤ begin < end ≤ 1'


@dataclasses.dataclass(frozen=True)
class OfferAgeStudy(Study):
  """The age of what a round merges.

  Attributes:
    learners: M; each with K = 1 and K = M/2.
    fragments: P.
    overlaps: τ over the near link, which is that of `network`.
    far_steps: latency of the far link, one way, in inner steps.
    far_overlap: τ over it.
    steps: inner steps of a run.
  """

  learners: tuple[int, ...]
  fragments: tuple[int, ...]
  overlaps: tuple[int, ...]
  far_steps: float
  far_overlap: int
  steps: int

  def broken_rules(self):
    yield from super().broken_rules()
    yield from self._each('learners', 1)
    yield from self._each('fragments', 1)
    yield from self._each('overlaps', 0)
    yield from self._at_least(0, 'far_steps', 'far_overlap')
    yield from self._at_least(1, 'steps')


STUDIES = {
  'goodput': GoodputStudy,
  'bandwidth': BandwidthStudy,
  'heterogeneous': HeterogeneousStudy,
  'scavenging': ScavengingStudy,
  'offer_age': OfferAgeStudy,
}
SECTIONS = {
  'fleet': FleetConfig,
  'failures': FailuresConfig,
  'network': NetworkConfig,
  'codec': sections.CodecConfig,
  'protocol': ProtocolConfig,
}
TOP = {'name': str, 'seed': int}


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
  if 'name' in typed:
    yield from sections.broken_name(typed['name'])
  if 'seed' in typed and not 0 <= typed['seed'] <= SEED_MAX:
    yield f'seed={typed["seed"]}: must be in 0 … {SEED_MAX}'
  fleet, protocol = parts.get('fleet'), parts.get('protocol')
  if fleet and protocol and fleet.slow_learners > protocol.learners:
    yield (
      f'fleet.slow_learners={fleet.slow_learners}: there are '
      f'protocol.learners={protocol.learners}'
    )
