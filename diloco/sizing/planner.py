# SPDX-License-Identifier: Apache-2.0
"""Plans a run by arithmetic, without simulation, and says it on one screen.

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
import textwrap
from collections.abc import Iterable, Iterator

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
from diloco.fleets import pauses, systems
from diloco.numerics.codec import CODECS, bytes_per_value
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.round_policy import grace_window_s
from diloco.sizing import memory
from diloco.sizing.memory import F32_BYTES, count, in_bytes

STATE_BYTES = 12  # Of a parameter: θ and AdamW's two moments, in f32.
INTERVALS = (24, 30, 36, 48, 60, 72, 96)  # H: the paper's, and larger ones.
LINK_SHARE_MAX = 0.9  # Of the time between rounds; the rest is for jitter.
OVERLAP_LEAST = 2  # The paper's τ.
GRACE_SAFETY = 0.8  # γ
GRACE_CAP_STEPS = 1.0  # The paper's.
LATENCIES = 6  # Of an exchange: two messages of one, two pulls of two.
DAY_S, HOUR_S = 86_400.0, 3600.0
OVERLAP_ADVISED = 5  # Streaming DiLoCo: harmless up to 10, advised up to 5.
MFU = 0.4  # What well-tuned dense training reaches.
HOST_SPEEDS = 'host_speeds.json'  # Written by `diloco.bench`.
STEP_TOKENS = 2**20  # Of a step of a learner on slices, unless given.
# What a text such as '4xv5e-256' says already.
SAID_BY_ON = ('learners', 'chips', 'hosts')
ROW_COLUMNS = 67  # Of what stands beside the name of a row.
UNITS = {'K': 1e3, 'M': 1e6, 'B': 1e9, 'T': 1e12}
A_COUNT = 'a number, such as 12e9 or 12B'
_ON = re.compile(r'(?:(\d+)x)?([a-z]\w*-\d+)')


@dataclasses.dataclass(frozen=True)
class HostSpeeds:
  """The time of hosts for a fragment, in seconds per GB of it in f32.

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
  """The given setup."""

  params: float  # Parameters of the model, N.
  learners: Count  # M.
  bandwidth_gbps: Positive  # Rate of a learner's link, each way.
  step_s: Positive  # T, duration of an inner step.
  chips: Whole = 0  # Chips of all learners; 0: nothing is said of failures.
  mtbi_days: Positive = 365.0  # Mean time between interruptions of a chip.
  # Duration of one reconfiguration of a learner.
  pause_s: NonNegative = pauses.FITTED_S
  repair_s: NonNegative = 66.3  # Until a lost slice, or a spare one, is there.
  codec: one_of(CODECS) = 'int4'  # Both ways.
  latency_s: NonNegative = 0.05  # One way.
  hosts: Count = 1  # Of each slice; they share encoding and taking in.
  # Slices of each learner: groups of hosts that fail together.
  slices: Count = 1
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
    elif 0 < self.chips < self.learners * self.slices:
      yield (
        f'chips={self.chips}: must be at least learners={self.learners} * '
        f'slices={self.slices}'
      )


def parse_count(params: float | str) -> float:
  """Returns the parameters of a model, of a number or of a text such as '12B'.

  Raises:
    ConfigError: it is neither.
  """
  match = re.fullmatch(r'([0-9.]+) ?([KMBT])', str(params), re.IGNORECASE)
  try:
    if match:
      return float(match[1]) * UNITS[match[2].upper()]
    return float(params)
  except ValueError:
    raise ConfigError([f'params={params!r}: must be {A_COUNT}']) from None


# Learners on TPU slices.


def parse_slices(text: str) -> tuple[int, Topology]:
  """Returns the learners and the slice of each of a text such as '4xv5e-256'.

  Raises:
    ConfigError: it is not of that form, or there is no such slice.
  """
  match = _ON.fullmatch(text)
  if not match or match[1] == '0':
    raise ConfigError(
      [f'--on={text}: must be learners x slice, such as 4xv5e-256']
    )
  return int(match[1] or 1), hardware.topology(match[2], '--on')


def step_seconds(topology: Topology, flops: float) -> float:
  """Returns the time of a step of so many FLOPs at `MFU`."""
  return flops / (MFU * topology.chips * topology.chip.bf16_flops)


def on_slices(on: str, flops: float, step_tokens: int, slices: int = 1) -> dict:
  """Returns the values of a `Situation` that learners on slices have.

  Args:
    on: such as '4xv5e-256'.
    flops: of a step of a learner, which has so many tokens.
    slices: of a learner, each as `on` says.

  Raises:
    ConfigError: as `parse_slices`.
  """
  learners, slice_ = parse_slices(on)
  return {
    'learners': learners,
    'chips': learners * slices * slice_.chips,
    'hosts': slice_.hosts,
    'accelerator': slice_.name,
    'step_s': step_seconds(slice_, flops / slices),
    'step_tokens': step_tokens,
  }


@dataclasses.dataclass(frozen=True)
class ChipShare:
  """Bytes on each chip of a learner whose arrays are all in even shards."""

  topology: Topology
  state: float  # θ and the inner state.
  gradients: float
  exchange: float  # Snapshots of rounds in flight, and what has arrived.

  @property
  def total(self) -> float:
    return self.state + self.gradients + self.exchange

  @property
  def left(self) -> float:
    """Bytes for activations, batch and code; negative if there are none."""
    return self.topology.chip.hbm_bytes - self.total


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


def exchange_times(setup: Situation, fragments: int) -> ExchangeTimes:
  """Returns the stages of a fragment's exchange, of so many equal ones."""
  values, speeds = setup.params / fragments, host_speeds()
  wire_s = _gbit(values * bytes_per_value(setup.codec)) / setup.bandwidth_gbps
  host_s = values * F32_BYTES / 1e9
  return ExchangeTimes(
    latency_s=LATENCIES * setup.latency_s,
    encode_s=host_s * speeds.encode / setup.hosts,
    up_s=wire_s,
    merge_s=host_s * speeds.round_of(setup.learners),
    down_s=wire_s,
    take_in_s=host_s * speeds.take_in / setup.hosts,
  )


class RunPlan:
  """Settings for a situation, and what they lead to.

  Attributes:
    situation: what it is made for.
    value_bytes: bytes of a value on the wire.
    exchange: the stages of a fragment's exchange.
    fragment_bytes: bytes of a fragment on the wire.
    protocol: the suggested settings.
    grace_s: the grace window that the syncer will compute for equally fast
      learners.
    link_s: how long a learner's link is busy with a fragment, one way.
    stages_s: what one thread does for each round, by name.
    learner_memory: of each host of a learner.
    syncer: its machine.
    chip: the share of a chip; None: no slice was given.

  As text it is the screen of `diloco plan`.
  """

  def __init__(self, situation: Situation):
    setup = self.situation = situation
    self.value_bytes = bytes_per_value(setup.codec)
    for every in INTERVALS:  # H = P: the least whose fragments links carry.
      self.fragment_bytes = setup.params / every * self.value_bytes
      self.exchange = exchange_times(setup, every)
      # A learner pulls updates one after another: with two latencies each.
      self.link_s = self.exchange.down_s + 2 * setup.latency_s
      if self.link_s <= LINK_SHARE_MAX * setup.step_s:
        break
    self.protocol = self._protocol(every)
    exchange, ahead = self.exchange, self.protocol.inflight_max
    self.grace_s = grace_window_s(
      setup.step_s,
      quorum_s=exchange.encode_s + setup.latency_s,
      sync_s=exchange.total_s - exchange.encode_s - setup.latency_s,
      overlap_steps=self.protocol.overlap_steps,
      safety=GRACE_SAFETY,
      cap_steps=GRACE_CAP_STEPS,
    )
    self.stages_s = {
      'encoding at the learner': exchange.encode_s,
      'merging at the syncer': exchange.merge_s,
      # One thread pulls and takes in.
      'taking in at the learner': exchange.take_in_s + self.link_s,
    }
    n, f = setup.params, setup.params / every
    s = (STATE_BYTES - F32_BYTES) * n
    self.learner_memory = memory.of_learner(
      *(each / setup.hosts for each in (n, f, s)), self.value_bytes, ahead
    )
    self.syncer = memory.machine(n, f, self.value_bytes, ahead, setup.learners)
    self.chip = None
    if setup.accelerator:
      slice_ = hardware.topology(setup.accelerator)
      shares = STATE_BYTES * n, F32_BYTES * n, 2 * ahead * F32_BYTES * f
      self.chip = ChipShare(slice_, *(x / slice_.chips for x in shares))

  def __repr__(self) -> str:
    return '\n'.join(lines(self))

  @property
  def overlap_s(self) -> float:
    """Duration of an exchange whose stages are on time.

    A larger τ does not help a slow stage.
    """
    latency_s, *stages_s = dataclasses.astuple(self.exchange)
    return latency_s + sum(min(s, self.situation.step_s) for s in stages_s)

  def _protocol(self, every: int) -> ProtocolConfig:
    overlap = math.ceil(self.overlap_s / self.situation.step_s) + 1
    return ProtocolConfig(
      learners=self.situation.learners,
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
      blend='replace',
    )

  @property
  def link_share(self) -> float:
    """Share of the time that a learner's link is busy, one way."""
    return self.exchange.up_s / self.situation.step_s

  @property
  def links_on_time(self) -> float:
    """Share of the rounds that links allow."""
    return min(1.0, self.situation.step_s / self.link_s)

  @property
  def hosts_on_time(self) -> float:
    """Share of the rounds that hosts allow."""
    return min(1.0, self.situation.step_s / max(self.stages_s.values()))

  @property
  def gbps_needed(self) -> float:
    """Rate at which fragments take LINK_SHARE_MAX of the time; inf: none."""
    left_s = LINK_SHARE_MAX * self.situation.step_s
    left_s -= 2 * self.situation.latency_s
    return _gbit(self.fragment_bytes) / left_s if left_s > 0 else math.inf

  @property
  def bootstrap_s(self) -> float:
    """Seconds that a learner's state takes over its link."""
    setup = self.situation
    return _gbit(setup.params * STATE_BYTES) / setup.bandwidth_gbps

  @property
  def failures_s(self) -> float:
    """Between two interruptions anywhere in the fleet."""
    return self.situation.mtbi_days * DAY_S / self.situation.chips

  @property
  def goodput(self) -> dict[str, float]:
    """Goodput of a learner by recovery; empty if no chips were given.

    First that of a learner of so many slices in a launch.
    """
    if not self.situation.chips:
      return {}
    names = dict.fromkeys((self.recovery, *systems.RECOVERIES))
    return {name: self.goodput_with(name) for name in names}

  @property
  def recovery(self) -> str:
    """The recovery of a learner that loses a slice, in a launch."""
    return systems.launched(self.situation.slices)

  def goodput_with(self, name: str, pause_s: float | None = None) -> float:
    """Returns the goodput of a learner; of several slices with those that are
    there.

    Args:
      name: of a recovery.
      pause_s: unless it is the situation's.
    """
    setup, recovery = self.situation, systems.RECOVERIES[name]
    rate = 1 / (self.failures_s * setup.learners)
    goodput = recovery.goodput(
      rate,
      setup.repair_s,
      setup.pause_s if pause_s is None else pause_s,
      self.bootstrap_s + systems.RESTART_STEPS * setup.step_s,
    )
    if recovery.runs_on and setup.slices > 1:
      goodput *= systems.slices_there(
        rate, setup.repair_s, goodput, setup.slices
      )
    return goodput


def _gbit(nbytes: float) -> float:
  return 8 * nbytes / 1e9


# A plan as text: one screen of 80 columns.


def lines(plan: RunPlan) -> Iterator[str]:
  """All that is to be said, line by line."""
  yield from _situation(plan)
  yield ''
  for name, text in _rows(plan):
    yield f'{name:13}{text}'.rstrip()
  yield ''
  yield from _memories(plan)


def _situation(plan: RunPlan) -> Iterator[str]:
  setup = plan.situation
  yield (
    f'{count(setup.params)} parameters; {setup.learners} learners, the '
    'syncer elsewhere;'
  )
  several = f'{setup.slices} slices' if setup.slices > 1 else ''
  if plan.chip:
    slice_ = plan.chip.topology
    yield (
      f'each learner on {several + ", each " if several else ""}'
      f'{slice_.name}: {slice_.chips} chips of {slice_.chip.name}, '
      f'{slice_.hosts} host{"s" if slice_.hosts > 1 else ""};'
    )
  elif several:
    yield f'each learner on {several}, groups of hosts that fail together;'
  if setup.step_tokens:
    yield (
      f'T is of {count(setup.step_tokens)} tokens at an MFU of '
      f'{100 * MFU:.0f} %;'
    )
  yield (
    f'links of {setup.bandwidth_gbps:g} Gbit/s each way and '
    f'{1e3 * setup.latency_s:g} ms; T = {setup.step_s:.4g} s; '
    f'{setup.codec}: b = {plan.value_bytes:.3f} bytes'
  )


def _rows(plan: RunPlan) -> Iterator[tuple[str, str]]:
  setup, config, x = plan.situation, plan.protocol, plan.exchange
  yield 'suggested', 'because'
  yield (
    f'P = {config.fragments}',
    'P = H: one fragment a step, the lowest peaks, the shortest exchange',
  )
  yield f'H = {config.sync_every_steps}', _why_interval(plan)
  steps = plan.overlap_s / setup.step_s
  reason = f'an exchange takes {steps:.2g} steps if no stage is late; one more'
  if config.overlap_steps <= steps:
    reason = f'the most with this H; an exchange takes {steps:.2g} steps'
  yield f'τ = {config.overlap_steps}', reason
  if config.overlap_steps > OVERLAP_ADVISED:
    yield '', f'(for quality, at most {OVERLAP_ADVISED} is advised)'
  yield (
    'K = 1',
    'nobody waits; K = M repeats synchronous DiLoCo: the slowest leads',
  )
  late = 'no slack for late learners: exchanges take longer than τ steps'
  if plan.grace_s:
    late = f'the slack leaves {plan.grace_s:.2g} s to wait for late learners'
  yield f'grace ≤ {config.grace_cap_steps:g} T', late
  yield '', ''
  if plan.chip:
    yield from zip(('a chip', ''), _chip_lines(plan.chip))
  rate, busy = plan.link_share * setup.bandwidth_gbps, _percent(plan.link_share)
  size = in_bytes(plan.fragment_bytes)
  yield (
    'each step',
    f'a fragment of {size} up, one down; a link busy {busy} each way;',
  )
  yield (
    '',
    f'the syncer {setup.learners} times {rate:.3g} = '
    f'{setup.learners * rate:.3g} Gbit/s each way',
  )
  if math.isfinite(plan.gbps_needed):
    yield (
      'bandwidth',
      f"{_up(plan.gbps_needed):g} Gbit/s of a learner's link are needed: busy "
      f'at most {100 * LINK_SHARE_MAX:.0f} %',
    )
  yield (
    'an exchange',
    f'{_time(x.total_s)} = {x.total_s / setup.step_s:.3g} steps: '
    f'{LATENCIES} latencies {_time(x.latency_s)}, encode {_time(x.encode_s)},',
  )
  yield (
    '',
    f'up {_time(x.up_s)}, merge {_time(x.merge_s)}, down {_time(x.down_s)}, '
    f'take in {_time(x.take_in_s)}',
  )
  yield 'chips busy', '100 %: steps never wait'
  yield (
    'on time',
    f'{_percent(plan.links_on_time)} of the rounds as far as links go, '
    f'{_percent(plan.hosts_on_time)} as hosts do',
  )
  if plan.hosts_on_time < 1:
    slowest, speeds = max(plan.stages_s, key=plan.stages_s.get), host_speeds()
    yield '', f'({slowest} takes longest, where hosts are as'
    yield '', f'a thread of {speeds.machine}, {speeds.date})'
  yield from failure_rows(plan, plan.goodput)


def failure_rows(
  plan: RunPlan, names: Iterable[str]
) -> Iterator[tuple[str, str]]:
  """Yields what failures cost, as rows of at most 67 columns.

  Args:
    names: of the recoveries that are shown; none: nothing is said.
  """
  setup, names = plan.situation, [*names]
  if not names:
    return
  of = f'{count(setup.chips)} chips; of a learner that loses a slice'
  if setup.slices > 1:
    of = f'{count(setup.chips)} chips; of a learner without 1 of {setup.slices}'
  yield 'failures', f'one each {_time(plan.failures_s)} in {of}'
  what = {plan.recovery: 'what a launch does'}
  if systems.PAPERS not in what:
    what[systems.PAPERS] = 'takes several slices'
  for name in names:
    goodput = plan.goodput_with(name)
    shown = f'{name:8}{_nines(goodput)}'
    if not systems.RECOVERIES[name].dies:
      up = systems.uptime(goodput, setup.learners)
      shown += f', at least one steps {_nines(up)}'
    if name in what:
      shown += f': {what[name]}'
    yield 'goodput' if name == names[0] else '', shown
  yield from _row_lines(
    f'(slice back after {_time(setup.repair_s)}, pause of '
    f'{pauses.in_words(setup.pause_s)}, bootstrap {_time(plan.bootstrap_s)})'
  )
  if systems.PAPERS not in names:
    return
  for entry in pauses.nearest(setup.params, pauses.measured()):
    goodput = _nines(plan.goodput_with(systems.PAPERS, entry.pause_s))
    yield from _row_lines(
      f'{systems.PAPERS:8}{goodput} with a pause of {entry.pause_s:.3g} s '
      f'({entry})'
    )


def _row_lines(text: str) -> Iterator[tuple[str, str]]:
  return (('', line) for line in textwrap.wrap(text, ROW_COLUMNS))


def _why_interval(plan: RunPlan) -> str:
  every = plan.protocol.sync_every_steps
  if plan.links_on_time < 1:
    needed = _up(plan.gbps_needed) if plan.gbps_needed < math.inf else None
    remedy = f'{needed:g} Gbit/s would do' if needed else 'by latency alone'
    return f'the most that is advised; links are too slow: {remedy}'
  if every > INTERVALS[0]:
    busy = plan.link_share * every / INTERVALS[0]
    return (
      f'at {INTERVALS[0]} links would be busy {_percent(busy)}; a longer one '
      'costs quality'
    )
  return "the paper's; raise it only for links that are busy more than 90 %"


def _memories(plan: RunPlan) -> Iterator[str]:
  state = STATE_BYTES - F32_BYTES
  hosts, formulas = plan.situation.hosts, f'(F = N/P, S = {state}N)'
  if hosts > 1:
    whose = 'learner' if plan.situation.slices == 1 else 'slice'
    yield f"memory of each of a {whose}'s {hosts} hosts: of {formulas} the part"
  else:
    yield (f"host memory of a learner, besides the process's own {formulas}")
  yield from memory.lines(plan.learner_memory)
  yield 'of the syncer'
  yield from memory.machine_lines(plan.syncer)


def _time(seconds: float) -> str:
  if seconds >= 1000 * HOUR_S:
    return f'{seconds / HOUR_S:,.0f} h'
  if seconds >= HOUR_S:
    return f'{seconds / HOUR_S:.3g} h'
  return f'{seconds:.0f} s' if seconds >= 100 else f'{seconds:.2g} s'


def _nines(share: float) -> str:
  return f'{100 * share:.4g} %' if share >= 0.001 else '<0.1 %'


def _percent(share: float) -> str:
  percent = 100 * share
  if percent < 0.1:
    return '<0.1 %'
  if 10 <= percent < 1000:
    return f'{percent:.0f} %'
  return f'{percent:.2g} %'


def _up(number: float) -> float:
  """Rounded up to two digits."""
  scale = 10.0 ** (math.floor(math.log10(number)) - 1)
  return round(math.ceil(number / scale) * scale, 12)


def _chip_lines(share: ChipShare) -> Iterator[str]:
  """Yields a chip's memory as text of at most 67 columns."""
  chip = share.topology.chip
  percent = 100 * share.total / chip.hbm_bytes
  verdict = 'it fits' if share.left > 0 else 'IT DOES NOT FIT'
  yield (
    f'{verdict}: {in_bytes(share.total)} are {percent:.2g} % of '
    f'{in_bytes(chip.hbm_bytes)}: θ and state {in_bytes(share.state)},'
  )
  left = in_bytes(share.left) if share.left > 0 else 'nothing'
  yield (
    f'gradients {in_bytes(share.gradients)}, exchange '
    f'{in_bytes(share.exchange)}; {left} left for activations'
  )
