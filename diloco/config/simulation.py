# SPDX-License-Identifier: Apache-2.0
"""The configuration of a simulation as one checked, frozen value.

A key stands here with its type, default and rules. The sections `protocol` and
`codec` are those of a run, with the paper's settings of the protocol.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from diloco.config import sections
from diloco.config.sections import (
  ConfigError,
  Count,
  NonNegative,
  Positive,
  Section,
  ShareBelow1,
  Unlimited,
  Whole,
  at_least,
  each_at_least,
  one_of,
  some_of,
)
from diloco.fleets import pauses
from diloco.fleets.failures import REPAIRS
from diloco.fleets.systems import RECOVERIES, SYSTEMS
from diloco.protocol.config import ProtocolConfig


@dataclasses.dataclass(frozen=True)
class FleetConfig(Section, section='fleet'):
  """The machines: how many, how fast, how even."""

  chips: Count = 1_200_000  # N, of all learners together.
  # Of one slice, the unit that is lost and comes back.
  slice_chips: Count = 256
  step_s: Positive = 1.0  # Of an inner step of a whole learner.
  tokens: Count = 1 << 20  # Of an inner step of a whole learner.
  slow_learners: Whole = 0  # How many are slower than the others.
  # A slow learner makes 1 − gap steps while another makes one.
  slow_gap: ShareBelow1 = 0.18
  # Standard deviation of a step's length, as a share.
  jitter: ShareBelow1 = 0.0


@dataclasses.dataclass(frozen=True)
class FailuresConfig(Section, section='failures'):
  """Failures and their cost, after the paper's simulated fleets.

  A learner recovers in one of three ways. 'wait': it stands until the slice is
  back, and pauses; one of a single slice does that. 'restart': its process
  dies, starts again without the slice after a pause, and bootstraps through a
  peer. 'elastic', the paper's, and that of a learner of several slices: it
  pauses, runs on without the slice, and pauses again when that is back.
  """

  # Between two interruptions of one chip; inf: none.
  mtbi_days: Unlimited = 365.0
  # Keys of RECOVERIES, separated by commas: simulated side by side.
  recovery: str = ','.join(RECOVERIES)
  # Of a reconfiguration: our fit to the paper's Table 1. Reports have what was
  # measured next to it.
  pause_s: NonNegative = pauses.FITTED_S
  # Distribution of the time until a slice is back.
  repair: one_of(REPAIRS) = 'exponentiated_weibull'
  repair_s: NonNegative = 66.3  # Mean; with one pause 80 s, our fit to Table 1.
  # k of the exponentiated Weibull, P(x) = 1 − e^−(x/l)^k; the paper names the
  # distribution, not its parameters: here its power is 1.
  repair_shape: Positive = 1.5

  def broken_rules(self):
    if unknown := [name for name in self.recoveries if name not in RECOVERIES]:
      yield (
        f'recovery={self.recovery!r}: {unknown[0]!r} must be one of '
        f'{", ".join(RECOVERIES)}'
      )

  @property
  def recoveries(self) -> tuple[str, ...]:
    return tuple(dict.fromkeys(self.recovery.split(',')))


@dataclasses.dataclass(frozen=True)
class NetworkConfig(Section, section='network'):
  """Links between data centres, and what travels on them.

  Learners and shards of the syncer are spread over the data centres evenly.
  What stays in one costs nothing; where there is one only, every byte is
  carried by the link between a learner and the syncer.
  """

  params: at_least(1, float) = 5e9  # Of the model.
  datacentres: Count = 1  # D, between which links are slow.
  learner_gbps: Unlimited = math.inf  # Of a learner's link, each way.
  syncer_gbps: Unlimited = math.inf  # Of the syncer's, each way, shared by all.
  latency_s: NonNegative = 0.01  # One way.
  encode_s: NonNegative = 0.02  # Of a fragment, at the learner.
  merge_s: NonNegative = 0.05  # Of a fragment, at the syncer.
  # Of what a joiner gets from a peer: θ and two moments in f32.
  state_bytes_per_param: NonNegative = 12.0
  # Of the parameters, in a fragment of their own; 0: all fragments are equal.
  embedding_share: ShareBelow1 = 0.0


@dataclasses.dataclass(frozen=True)
class Study(Section, section='study'):
  """Fields common to all studies; base of the sections `study`."""

  kind: str = ''  # Of the study, a key of STUDIES.
  seeds: Count = 3  # Runs of every cell, from `seed` on.


@dataclasses.dataclass(frozen=True)
class GoodputStudy(Study):
  """Systems on fleets of different sizes, on the same failures."""

  systems: some_of(SYSTEMS) = tuple(SYSTEMS)  # Those that are simulated.
  # N, of all learners together; one row each.
  chips: each_at_least(1) = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
  # M of Decoupled DiLoCo.
  learners: each_at_least(1) = (2, 4, 8, 16)
  # Simulated time of one cell and seed, times its learners.
  learner_hours: Positive = 16.0


@dataclasses.dataclass(frozen=True)
class BandwidthStudy(Study):
  """The bandwidth that a system needs to keep the chips busy."""

  datacentres: each_at_least(1) = (2, 8)  # D, one table each.
  # Lengths of a step, one table each.
  steps_s: each_at_least(1e-06, float) = (1.0,)
  # Shares of the time in which chips compute that are aimed at.
  utilisations: tuple[float, ...] = (0.5, 0.75, 0.9, 0.95, 0.99)
  buckets: Count = 128  # Of data-parallel's gradients.
  # Bandwidths at which the real machines are simulated.
  gbps: each_at_least(1e-09, float) = (0.1, 0.2, 0.43, 0.86, 1.7, 3.4)

  def broken_rules(self):
    if not all(0 < u < 1 for u in self.utilisations):
      yield f'utilisations={self.utilisations}: each must be in (0, 1)'


@dataclasses.dataclass(frozen=True)
class HeterogeneousStudy(Study):
  """Learners of unequal speed under different quorums."""

  SETTINGS = ('K=M', 'K=1', 'K=1 grace', 'K=1 latest', 'K=1 grace latest')

  settings: some_of(SETTINGS) = SETTINGS  # The rows of the table.
  steps: Count = 2000  # Inner steps of the fastest learner.


@dataclasses.dataclass(frozen=True)
class ScavengingStudy(Study):
  """Learners that are there for a part of the work only."""

  # Numbers of extra learners, one row each; times are relative to 0.
  extra: each_at_least(0) = (0, 1, 2, 4, 12)
  begin: float = 0.25  # Share of the tokens after which they join.
  end: float = 0.75  # Share after which they leave.
  steps: Count = 1000  # Inner steps of each learner if there are no extra ones.
  notice_s: NonNegative = 5.0  # Within which they leave.
  # Inner steps that a newcomer's copy of a state takes, one row each.
  copy_steps: each_at_least(0) = (1, 3, 6, 12, 24)

  def broken_rules(self):
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


SECTIONS, TOP = sections.split_fields(SimulationConfig, but=('study',))


def defaults(kind: str) -> dict[str, object]:
  """Returns all keys of a simulation with their defaults.

  Args:
    kind: of the study, a key of STUDIES.
  """
  keys = {name: sections.defaults(SECTIONS[name]) for name in SECTIONS}
  study = sections.defaults(STUDIES[kind]) | {'kind': kind}
  return keys | {'name': kind, 'seed': 0, 'protocol': PROTOCOL, 'study': study}


def build(config: Mapping) -> SimulationConfig:
  """The checked value of a nested mapping, such as a `ConfigDict`.

  Raises:
    ConfigError: lists unknown keys with the nearest valid one, missing keys,
      wrong types and broken rules, all in one message.
  """
  if 'study' not in config:
    examples = ', '.join(f'experiments/{kind}.py' for kind in STUDIES)
    raise ConfigError(
      'this configuration is of a training run, which launch.local starts; '
      f'a simulation takes one with a section study, such as {examples}'
    )
  kind = config['study'].get('kind')
  if kind not in STUDIES:
    raise ConfigError(
      f'study.kind={kind!r}: must be one of {", ".join(STUDIES)}'
    )
  parts_of = {**SECTIONS, 'study': STUDIES[kind]}
  typed, problems = sections.typed_values(
    config, sections.key_types(parts_of, TOP)
  )
  parts, broken = sections.make_sections(typed, parts_of)
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
