# SPDX-License-Identifier: Apache-2.0
"""Plans a run by arithmetic, without simulation.

Stages of an exchange (`diloco/protocol/README.md`, `diloco/learner`): encode at
the learner, offer, pull by the syncer, merge, announce, pull by the learner,
take in. Messages take one latency, pulls two, so six in all. The stages of
successive rounds overlap; a round is on time if no stage takes longer than the
s steps between two rounds.
"""

import dataclasses
import functools
import importlib.resources
import json
import math
import re
from collections.abc import Mapping

from diloco.config import hardware
from diloco.config.hardware import Topology
from diloco.config.sections import (
  ConfigError,
  Count,
  NonNegative,
  Positive,
  Section,
  Whole,
  one_of,
)
from diloco.fleets import systems, traffic
from diloco.models.flops import PER_PARAMETER
from diloco.numerics.codec import CODECS, STORED, bytes_per_value
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.grace import grace_window_s
from diloco.sizing import memory
from diloco.sizing.memory import F32_BYTES, SyncerMachine

THETA_BYTES = 4  # Of a parameter: θ is f32.
BF16_BYTES = 2
BUCKETS = 128  # Of data-parallel, as in `experiments/bandwidth.py`.
INTERVALS = (24, 30, 36, 48, 60, 72, 96)  # H: the paper's, and larger ones.
LINK_SHARE_MAX = 0.9  # Of the time between rounds; the rest is for jitter.
OVERLAP_LEAST = 2  # The paper's τ.
GRACE_SAFETY = 0.8  # γ
GRACE_CAP_STEPS = 1.0  # The paper's.
LATENCIES = 6  # Of an exchange: two messages of one, two pulls of two.
DAY_S = 86_400.0
MFU = 0.4  # What well-tuned dense training reaches.
HOST_SPEEDS = 'host_speeds.json'  # Written by `diloco.bench`.
_ON = re.compile(r'(?:(\d+)x)?([a-z]\w*-\d+)')


@dataclasses.dataclass(frozen=True)
class HostSpeeds:
  """What hosts take for a fragment, in seconds per GB of it in f32.

  `diloco.bench --only=hosts --write_speeds=FILE` measures them on one thread
  per stage, with int4 and blocks of 128.
  """

  machine: str
  date: str
  commit: str
  command: str
  others: float | None  # Share of the CPU time that others used meanwhile.
  encode: float  # Learner: base − θ, and its encoding.
  take_in: float  # Learner: Θ_p from the update, and its CRC.
  round: float  # Syncer: pull, merge, outer step, encoding, CRC …
  round_each: float  # … and of each contribution.

  def round_of(self, learners: int) -> float:
    """Returns what the syncer takes for a round of so many contributions."""
    return self.round + self.round_each * learners


@functools.cache
def host_speeds() -> HostSpeeds:
  """Returns the speeds that come with the package."""
  file = importlib.resources.files('diloco.sizing') / HOST_SPEEDS
  return HostSpeeds(**json.loads(file.read_text()))


# The situation that a plan is made for, checked; fields are flags of
# `plan`.


@dataclasses.dataclass(frozen=True)
class Situation(Section):
  """The given situation."""

  params: float  # Parameters of the model, N.
  learners: Count  # M.
  bandwidth_gbps: Positive  # Rate of a learner's link, each way.
  step_s: Positive  # T, duration of an inner step.
  # D, with a shard of the syncer in each; 1: the syncer is one process
  # elsewhere, as it is built here, and every byte uses the link.
  datacentres: Count = 1
  chips: Whole = 0  # Chips of all learners; 0: nothing is said of failures.
  mtbi_days: Positive = 365.0  # Mean time between interruptions of a chip.
  pause_s: NonNegative = 13.7  # Duration of one reconfiguration of a learner.
  repair_s: NonNegative = 66.3  # Until a lost slice, or a spare one, is there.
  codec: one_of(CODECS) = 'int4'  # Both ways.
  block_size: int = 128  # Values that share a scale.
  scale: one_of(STORED) = 'bf16'  # Type of the scales.
  latency_s: NonNegative = 0.05  # One way.
  # Bytes of θ and the inner optimizer's state.
  state_bytes_per_param: float = 12.0
  host_speed: Positive = 1.0  # Of hosts, relative to `HOST_SPEEDS`.
  hosts: Count = 1  # Hosts of each learner; they share encoding and taking in.
  accelerator: str = ''  # Slice of each learner, of `TOPOLOGIES`; '': any.
  step_tokens: int = 0  # By which `step_s` was computed; 0: it was given.

  def __post_init__(self):
    if broken := [f'--{rule}' for rule in self.broken()]:
      raise ConfigError(broken)

  def broken_rules(self):
    if not 1 <= self.params < math.inf:
      yield f'params={self.params}: must be finite, at least 1, such as 12e9'
    if 0 < self.chips < self.learners:
      yield f'chips={self.chips}: must be at least learners={self.learners}'
    if self.datacentres > max(1, self.learners):
      yield (
        f'datacentres={self.datacentres}: at most one for each of '
        f'learners={self.learners}'
      )
    if not THETA_BYTES <= self.state_bytes_per_param < math.inf:
      yield (
        f'state_bytes_per_param={self.state_bytes_per_param}: must be finite, '
        f'at least {THETA_BYTES}, which θ takes; 12 with AdamW'
      )
    if self.block_size < 1 or self.block_size % 8:
      yield f'block_size={self.block_size}: must be a positive multiple of 8'


# Learners on TPU slices.


def parse_slices(text: str) -> tuple[int, Topology]:
  """Returns the learners and the slice of each of a text such as '4xv5e-256'.

  Raises:
    ConfigError: it is not of that form, or there is no such slice.
  """
  found = _ON.fullmatch(text)
  if not found or found[1] == '0':
    raise ConfigError(
      [f'--on={text}: must be learners x slice, such as 4xv5e-256']
    )
  return int(found[1] or 1), hardware.topology(found[2], '--on')


def step_seconds(of: Topology, params: float, tokens: float) -> float:
  """Returns the time of a step at `MFU`, by 6ND: attention is left out."""
  peak = of.chips * of.chip.bf16_flops
  return PER_PARAMETER * params * tokens / (MFU * peak)


@dataclasses.dataclass(frozen=True)
class ChipShare:
  """Bytes on each chip of a learner whose arrays are all in even shards."""

  of: Topology
  state: float  # θ and the inner state.
  gradients: float
  exchange: float  # Snapshots of rounds in flight, and what has arrived.

  @property
  def total(self) -> float:
    return self.state + self.gradients + self.exchange

  @property
  def left(self) -> float:
    """Bytes for activations, batch and code; negative if there are none."""
    return self.of.chip.hbm_bytes - self.total


def chip_share(
  of: Topology, n: float, f: float, state_bytes: float, ahead: int
) -> ChipShare:
  """Returns the share of a chip.

  Args:
    n: parameters.
    f: those in the largest fragment.
    state_bytes: bytes of θ and the inner state of a parameter.
    ahead: rounds that may be in flight.
  """
  return ChipShare(
    of,
    state_bytes * n / of.chips,
    F32_BYTES * n / of.chips,
    2 * ahead * F32_BYTES * f / of.chips,
  )


@dataclasses.dataclass(frozen=True)
class ExchangeTimes:
  """The stages of one fragment's exchange, in seconds."""

  latency_s: float  # All of them.
  encode_s: float
  up_s: float
  merge_s: float  # With decoding what was pulled.
  down_s: float
  take_in_s: float

  @property
  def total_s(self) -> float:
    return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class RunPlan:
  """The plan for a situation."""

  situation: Situation  # The given situation.
  protocol: ProtocolConfig  # The suggested settings.
  value_bytes: float  # Bytes of a value on the wire, b.
  fragment_bytes: float  # Bytes of a fragment, one way.
  exchange: ExchangeTimes  # Durations for one fragment.
  overlap_s: float  # Its duration if no stage is late; determines τ.
  grace_s: float  # The window that is left for late learners.
  # Share of the time a learner's link is busy, one way, if every round is
  # on time; may be above 1.
  link_share: float
  links_on_time: float  # Share of the rounds that links let close on time.
  gbps_needed: float  # Rate of a learner's link at which that is all of them.
  hosts_on_time: float  # Share that hosts and links let close on time.
  slowest_host: str  # The stage that takes longest on hosts.
  # Speed of hosts that would be on time; inf: none is.
  host_speed_needed: float
  sites: int  # Number of sites that data-parallel is compared over.
  data_parallel: float  # Its compute utilisation at that bandwidth.
  diloco: float  # Compute utilisation of DiLoCo in lock-step.
  # Memory of each host of a learner.
  learner_memory: tuple[memory.Memory, ...]
  syncer: SyncerMachine
  # Goodput of a learner by recovery, a key of `systems.RECOVERIES`; empty if no
  # chips were given.
  goodput: Mapping[str, float]
  chip: ChipShare | None  # None: no slice was given.

  @property
  def failures_s(self) -> float | None:
    """Between two interruptions anywhere in the fleet."""
    chips = self.situation.chips
    return self.situation.mtbi_days * DAY_S / chips if chips else None


def plan(situation: Situation) -> RunPlan:
  """Settings for a situation, and what they lead to."""
  value_bytes = bytes_per_value(
    situation.codec, situation.block_size, situation.scale
  )
  every = _interval(situation, value_bytes)
  fragment_bytes = situation.params / every * value_bytes
  exchange = _exchange(situation, every, fragment_bytes)
  protocol = _protocol(situation, every, exchange)
  spacing_s = protocol.spacing_steps * situation.step_s
  stages = _host_stages(situation, exchange)
  slowest = max(stages, key=stages.get)
  sites = _sites(situation)
  all_reduced = _gbit(
    situation.params * BF16_BYTES * traffic.all_reduce_share(sites)
  )
  bursts = [
    traffic.Bursts(all_reduced, situation.step_s, BUCKETS, h)
    for h in (1, every)
  ]
  n, f = situation.params, situation.params / every
  s = (situation.state_bytes_per_param - F32_BYTES) * n
  b, ahead = value_bytes, protocol.inflight_max
  return RunPlan(
    situation=situation,
    protocol=protocol,
    value_bytes=value_bytes,
    fragment_bytes=fragment_bytes,
    exchange=exchange,
    overlap_s=_overlap_s(situation, exchange),
    grace_s=_grace_s(situation, protocol, exchange),
    link_share=_crossing(situation) * exchange.up_s / spacing_s,
    links_on_time=min(1.0, spacing_s / _link_stage_s(situation, exchange)),
    gbps_needed=_gbps_needed(situation, fragment_bytes, spacing_s),
    hosts_on_time=min(1.0, spacing_s / stages[slowest]),
    slowest_host=slowest,
    host_speed_needed=_speed_needed(situation, exchange, spacing_s),
    sites=sites,
    data_parallel=bursts[0].utilisation(situation.bandwidth_gbps),
    diloco=bursts[1].utilisation(situation.bandwidth_gbps),
    learner_memory=memory.of_learner(
      *(each / situation.hosts for each in (n, f, s)), b, ahead
    ),
    syncer=memory.machine(n, f, b, ahead, situation.learners),
    goodput=_goodput(situation),
    chip=_chip(situation, f, ahead),
  )


def _chip(situation: Situation, f: float, ahead: int) -> ChipShare | None:
  if not situation.accelerator:
    return None
  return chip_share(
    hardware.topology(situation.accelerator),
    situation.params,
    f,
    situation.state_bytes_per_param,
    ahead,
  )


# Settings --------------------------------------------------------------------


def _interval(situation: Situation, value_bytes: float) -> int:
  """H = P: the least with which links have their fragments through in time."""
  for every in INTERVALS:
    fragment_bytes = situation.params / every * value_bytes
    exchange = _exchange(situation, every, fragment_bytes)
    needed_s = _link_stage_s(situation, exchange)
    if needed_s <= LINK_SHARE_MAX * situation.step_s:
      return every
  return INTERVALS[-1]


def _overlap_s(situation: Situation, exchange: ExchangeTimes) -> float:
  """Returns the duration of an exchange whose stages are on time.

  A larger τ does not help a slow stage.
  """
  stages_s = dataclasses.astuple(exchange)[1:]
  return exchange.latency_s + sum(min(s, situation.step_s) for s in stages_s)


def _protocol(
  situation: Situation, every: int, exchange: ExchangeTimes
) -> ProtocolConfig:
  needed_s = _overlap_s(situation, exchange)
  overlap = math.ceil(needed_s / situation.step_s) + 1
  return ProtocolConfig(
    learners=situation.learners,
    fragments=every,
    sync_every_steps=every,
    overlap_steps=min(max(overlap, OVERLAP_LEAST), every - 1),
    quorum=1,
    grace_safety=GRACE_SAFETY,
    grace_cap_steps=GRACE_CAP_STEPS,
    admission='latest',
    max_staleness_versions=4,
    weighting='tokens',
    patience=1.0,
    total_steps=1,
    blend='overwrite',
  )


def _grace_s(
  situation: Situation, protocol: ProtocolConfig, exchange: ExchangeTimes
) -> float:
  """Returns the grace window the syncer will compute for equally fast
  learners.
  """
  return grace_window_s(
    situation.step_s,
    quorum_s=exchange.encode_s + situation.latency_s,
    sync_s=exchange.total_s - exchange.encode_s - situation.latency_s,
    overlap_steps=protocol.overlap_steps,
    safety=protocol.grace_safety,
    cap_steps=protocol.grace_cap_steps,
  )


# Times -----------------------------------------------------------------------


def _exchange(
  situation: Situation, fragments: int, fragment_bytes: float
) -> ExchangeTimes:
  wire_s = _gbit(fragment_bytes) / situation.bandwidth_gbps
  f32_gb = situation.params / fragments * F32_BYTES / 1e9
  host_s, speeds = f32_gb / situation.host_speed, host_speeds()
  return ExchangeTimes(
    latency_s=LATENCIES * situation.latency_s,
    encode_s=host_s * speeds.encode / situation.hosts,
    up_s=wire_s,
    merge_s=host_s * speeds.round_of(situation.learners),
    down_s=wire_s,
    take_in_s=host_s * speeds.take_in / situation.hosts,
  )


def _link_stage_s(situation: Situation, exchange: ExchangeTimes) -> float:
  """A learner pulls updates one after another: with two latencies each."""
  down_s = exchange.down_s + 2 * situation.latency_s
  return _crossing(situation) * max(exchange.up_s, down_s)


def _host_stages(
  situation: Situation, exchange: ExchangeTimes
) -> dict[str, float]:
  """Returns what one thread does for each round."""
  return {
    'encoding at the learner': exchange.encode_s,
    'merging at the syncer': exchange.merge_s,
    # One thread pulls and takes in.
    'taking in at the learner': exchange.take_in_s
    + _link_stage_s(situation, exchange),
  }


def _speed_needed(
  situation: Situation, exchange: ExchangeTimes, spacing_s: float
) -> float:
  """Host speed with which no stage takes longer than the time for it."""
  left_s = spacing_s - _link_stage_s(situation, exchange)
  if left_s <= 0:
    return math.inf
  return situation.host_speed * max(
    exchange.encode_s / spacing_s,
    exchange.merge_s / spacing_s,
    exchange.take_in_s / left_s,
  )


def _gbps_needed(
  situation: Situation, fragment_bytes: float, spacing_s: float
) -> float:
  """Returns the rate at which fragments take LINK_SHARE_MAX of the time.

  inf means that no rate suffices.
  """
  left_s = LINK_SHARE_MAX * spacing_s / _crossing(situation)
  left_s -= 2 * situation.latency_s
  return _gbit(fragment_bytes) / left_s if left_s > 0 else math.inf


def _crossing(situation: Situation) -> float:
  """Share of the fragments that use a learner's link."""
  if situation.datacentres == 1:
    return 1.0
  return traffic.one_way_share(situation.datacentres)


def _sites(situation: Situation) -> int:
  """D of the others; where none is given, each learner is a site."""
  if situation.datacentres > 1:
    return situation.datacentres
  return situation.learners


def _gbit(nbytes: float) -> float:
  return 8 * nbytes / 1e9


# Failures --------------------------------------------------------------------


def bootstrap_s(situation: Situation) -> float:
  """Returns how long a learner's state takes over its link."""
  state = situation.params * situation.state_bytes_per_param
  return _gbit(state) / situation.bandwidth_gbps


def _goodput(situation: Situation) -> dict[str, float]:
  if not situation.chips:
    return {}
  chips = situation.chips / situation.learners
  rate_per_s = chips / (situation.mtbi_days * DAY_S)
  again_s = bootstrap_s(situation) + systems.RESTART_STEPS * situation.step_s
  return {
    name: recovery.goodput(
      rate_per_s, situation.repair_s, situation.pause_s, again_s
    )
    for name, recovery in systems.RECOVERIES.items()
  }
