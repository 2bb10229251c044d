# SPDX-License-Identifier: Apache-2.0
"""A plan as text: one screen of 80 columns."""

import math
from collections.abc import Iterator

from diloco.fleets import systems
from diloco.sizing import memory
from diloco.sizing.memory import F32_BYTES, count, in_bytes
from diloco.sizing.planner import (
  INTERVALS,
  LATENCIES,
  LINK_SHARE_MAX,
  MFU,
  ChipShare,
  RunPlan,
  bootstrap_s,
  host_speeds,
)

HOUR_S = 3600.0
OVERLAP_ADVISED = 5  # Streaming DiLoCo: harmless up to 10, advised up to 5.


def lines(plan: RunPlan) -> Iterator[str]:
  """All that is to be said, line by line."""
  yield from _given(plan)
  yield ''
  yield from _settings(plan)
  yield ''
  if plan.chip:
    names = 'a chip', ''
    yield from map(_row, names, chip_lines(plan.chip))
  yield from _traffic(plan)
  yield from _utilisation(plan)
  yield from _failures(plan)
  yield ''
  yield from _memories(plan)


def _given(plan: RunPlan) -> Iterator[str]:
  given = plan.situation
  where = 'the syncer elsewhere'
  if given.datacentres > 1:
    where = f'{given.datacentres} data centres, a shard of the syncer in each'
  yield (
    f'{count(given.params)} parameters; {given.learners} learners, {where};'
  )
  if plan.chip:
    of = plan.chip.of
    yield (
      f'each learner on {of.name}: {of.chips} chips of {of.chip.name}, '
      f'{of.hosts} host{"s" if of.hosts > 1 else ""};'
    )
  if given.step_tokens:
    yield (
      f'T is of {count(given.step_tokens)} tokens at an MFU of '
      f'{100 * MFU:.0f} %;'
    )
  yield (
    f'links of {given.bandwidth_gbps:g} Gbit/s each way and '
    f'{1e3 * given.latency_s:g} ms; T = {given.step_s:.4g} s; '
    f'{given.codec}: b = {plan.value_bytes:.3f} bytes'
  )


def _settings(plan: RunPlan) -> Iterator[str]:
  config = plan.protocol
  yield _row('suggested', 'because')
  yield _row(
    f'P = {config.fragments}',
    'P = H: one fragment a step, the lowest peaks, the shortest exchange',
  )
  yield _row(f'H = {config.sync_every_steps}', _why_interval(plan))
  steps = plan.overlap_s / plan.situation.step_s
  reason = f'an exchange takes {steps:.2g} steps if no stage is late; one more'
  if config.overlap_steps <= steps:
    reason = f'the most with this H; an exchange takes {steps:.2g} steps'
  yield _row(f'τ = {config.overlap_steps}', reason)
  if config.overlap_steps > OVERLAP_ADVISED:
    yield _row('', f'(for quality, at most {OVERLAP_ADVISED} is advised)')
  yield _row(
    'K = 1',
    'nobody waits; K = M repeats synchronous DiLoCo: the slowest leads',
  )
  late = 'no slack for late learners: exchanges take longer than τ steps'
  if plan.grace_s:
    late = f'the slack leaves {plan.grace_s:.2g} s to wait for late learners'
  yield _row(f'grace ≤ {config.grace_cap_steps:g} T', late)


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


def _traffic(plan: RunPlan) -> Iterator[str]:
  given, x = plan.situation, plan.exchange
  rate = plan.link_share * given.bandwidth_gbps
  size = in_bytes(plan.fragment_bytes)
  yield _row(
    'each step',
    f'a fragment of {size} up, one down; a link busy '
    f'{_percent(plan.link_share)} each way;',
  )
  yield _row(
    '',
    f'the syncer {given.learners} times {rate:.3g} = '
    f'{given.learners * rate:.3g} Gbit/s each way',
  )
  if math.isfinite(plan.gbps_needed):
    share = f'{100 * LINK_SHARE_MAX:.0f} %'
    yield _row(
      'bandwidth',
      f"{_up(plan.gbps_needed):g} Gbit/s of a learner's link are needed: busy "
      f'at most {share}',
    )
  yield _row(
    'an exchange',
    f'{_time(x.total_s)} = {x.total_s / given.step_s:.3g} steps: {LATENCIES} '
    f'latencies {_time(x.latency_s)}, encode {_time(x.encode_s)},',
  )
  yield _row(
    '',
    f'up {_time(x.up_s)}, merge {_time(x.merge_s)}, down {_time(x.down_s)}, '
    f'take in {_time(x.take_in_s)}',
  )


def _utilisation(plan: RunPlan) -> Iterator[str]:
  yield _row('chips busy', '100 %: steps never wait')
  yield _row(
    '',
    f'(data-parallel bf16, {plan.sites} sites: '
    f'{_percent(plan.data_parallel)}; DiLoCo bf16: {_percent(plan.diloco)})',
  )
  yield _row(
    'on time',
    f'{_percent(plan.links_on_time)} of the rounds as far as links go, '
    f'{_percent(plan.hosts_on_time)} as hosts do',
  )
  if plan.hosts_on_time < 1:
    hosts = f'({plan.slowest_host} takes longest'
    if math.isfinite(plan.host_speed_needed):
      hosts += f'; all with --host_speed={_up(plan.host_speed_needed):g}'
    yield _row('', hosts)
    speeds = host_speeds()
    yield _row('', f'where 1 is a thread of {speeds.machine}, {speeds.date})')


def _failures(plan: RunPlan) -> Iterator[str]:
  """The goodput by recovery; first what a launch does."""
  if not plan.goodput:
    return
  given = plan.situation
  yield _row(
    'failures',
    f'one each {_time(plan.failures_s)} in {count(given.chips)} chips; of a '
    'learner that loses a slice',
  )
  what = {systems.LAUNCHED: 'what a launch does', systems.PAPERS: 'not built'}
  for name, goodput in plan.goodput.items():
    shown = f'{name:8}{_nines(goodput)}'
    if not systems.RECOVERIES[name].dies:
      up = systems.uptime(goodput, given.learners)
      shown += f', at least one steps {_nines(up)}'
    if name in what:
      shown += f': {what[name]}'
    yield _row('goodput' if name == systems.LAUNCHED else '', shown)
  yield _row(
    '',
    f'(slice back after {_time(given.repair_s)}, pause {given.pause_s:g} s, '
    f'bootstrap {_time(bootstrap_s(given))})',
  )


def _memories(plan: RunPlan) -> Iterator[str]:
  state = plan.situation.state_bytes_per_param - F32_BYTES
  hosts, formulas = plan.situation.hosts, f'(F = N/P, S = {state:g}N)'
  if hosts > 1:
    yield f"memory of each of a learner's {hosts} hosts: of {formulas} the part"
  else:
    yield (f"host memory of a learner, besides the process's own {formulas}")
  yield from memory.lines(plan.learner_memory)
  yield 'of the syncer'
  yield from memory.machine_lines(plan.syncer)


def _row(name: str, text: str) -> str:
  return f'{name:13}{text}'.rstrip()


def _time(seconds: float) -> str:
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


def chip_lines(found: ChipShare) -> Iterator[str]:
  """Yields a chip's memory as text of at most 67 columns."""
  chip = found.of.chip
  percent = 100 * found.total / chip.hbm_bytes
  verdict = 'it fits' if found.left > 0 else 'IT DOES NOT FIT'
  yield (
    f'{verdict}: {in_bytes(found.total)} are {percent:.2g} % of '
    f'{in_bytes(chip.hbm_bytes)}: θ and state {in_bytes(found.state)},'
  )
  left = in_bytes(found.left) if found.left > 0 else 'nothing'
  yield (
    f'gradients {in_bytes(found.gradients)}, exchange '
    f'{in_bytes(found.exchange)}; {left} left for activations'
  )
