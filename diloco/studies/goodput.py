# SPDX-License-Identifier: Apache-2.0
"""The share of a fleet's time that goes into training when chips fail."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from diloco.config.simulation import SimulationConfig
from diloco.fleets import synchronous, systems
from diloco.fleets.fleet import FleetResult
from diloco.fleets.systems import DECOUPLED, RECOVERIES, SYSTEMS, Recovery
from diloco.metrics.run_progress import count
from diloco.pages.parts import (
  Chart,
  Line,
  Part,
  ReportPage,
  Table,
  Timeline,
  TimelineSpan,
)
from diloco.pages.parts import Column as Heading
from diloco.studies import inputs, lanes, tables, traces
from diloco.studies.tables import Field, Record, times
from diloco.studies.traces import Trace

# Programs in lock-step cost next to nothing, so they run longer: their means
# scatter less. Their failures begin with those of Decoupled DiLoCo.
LOCKSTEP_LONGER = 24


class Row(NamedTuple):
  """A row of the tables: a way to train, and what it does about a failure."""

  system: str
  learners: int
  recovery: str  # A key of RECOVERIES.


@dataclasses.dataclass(frozen=True)
class Cell:
  """A row on a fleet of N chips."""

  system: str
  learners: int
  recovery: str
  chips: int
  runs: tuple[Record, ...]  # One per seed.
  closed: Record  # By formula; {} if there is no sound one.
  paper: float | None  # Percent; None where it gives none.
  # Of the first seed of Decoupled DiLoCo, if a picture is wanted.
  outcome: FleetResult | None = None
  stands: tuple[traces.LearnerTrace, ...] = ()  # By learner, in that seed.

  def mean(self, name: str) -> float | None:
    return tables.mean(self.runs, name)


Cells = dict[tuple[Row, int], Cell]  # By row and chips.


def rows(config: SimulationConfig) -> list[Row]:
  """Returns the rows in the order of the tables."""
  study, found = config.study, []
  for system in study.systems:
    kind = SYSTEMS[system]
    modes = (kind.recovery,) if kind.recovery else config.failures.recoveries
    if kind.is_decoupled:
      found += [Row(system, m, mode) for m in study.learners for mode in modes]
    else:  # A program in lock-step has no peer to start again from.
      learners = max(study.learners) if kind.is_diloco else 1
      modes = [mode for mode in modes if not RECOVERIES[mode].dies]
      found += [Row(system, learners, mode) for mode in modes]
  return found


def seconds(config: SimulationConfig, row: Row) -> float:
  """Simulated time of one cell and seed."""
  longer = 1 if SYSTEMS[row.system].is_decoupled else LOCKSTEP_LONGER
  return 3600 * config.study.learner_hours / row.learners * longer


def chips_of(config: SimulationConfig) -> tuple[int, ...]:
  """Fleet sizes; a record of failures is of one fleet."""
  if config.failures.trace:
    return (config.fleet.chips,)
  return tuple(sorted(config.study.chips))


def simulate(config: SimulationConfig, say: Callable[[str], None]) -> Cells:
  """Simulates every row on every fleet, with the same failures."""
  every, sizes = rows(config), chips_of(config)
  longest_s = max(seconds(config, row) for row in every)
  drawn = next((r for r in reversed(every) if r.system == DECOUPLED), None)
  if drawn:  # The mode that comes first, of the largest M.
    drawn = drawn._replace(recovery=config.failures.recoveries[0])
  cells, began_s = {}, time.monotonic()
  for chips in sizes:
    seeds = range(config.seed, config.seed + config.study.seeds)
    if config.failures.trace:
      fleet_traces = [traces.recorded(config)] * len(seeds)
    else:
      fleet_traces = [
        traces.drawn(config.failures, chips, s, longest_s) for s in seeds
      ]
    for row in every:
      is_drawn = (row, chips) == (drawn, sizes[-1])
      cell = cell_of(config, row, fleet_traces, is_drawn)
      cells[row, chips] = cell
      done = count(len(cells), len(every) * len(sizes), began_s)
      say(
        f'{done}: {row.system}, {row.learners} learners, {row.recovery}, '
        f'{chips} chips: goodput {100 * cell.mean("goodput"):.1f} %, '
        f'uptime {100 * cell.mean("uptime"):.1f} %'
      )
  return cells


def cell_of(
  config: SimulationConfig,
  row: Row,
  fleet_traces: Sequence[Trace],
  is_drawn: bool = False,
) -> Cell:
  """Runs a cell on the traces of a fleet, one of each seed from the first."""
  recovery, kind = RECOVERIES[row.recovery], SYSTEMS[row.system]
  runs, first, stands = [], None, ()
  for i, trace in enumerate(fleet_traces):
    until_s = seconds(config, row)
    if trace.ends_s is not None:
      until_s = min(until_s, trace.ends_s)
    every = traces.standing(trace, recovery, row.learners, config, until_s)
    seed = config.seed + i
    if not kind.is_decoupled:
      runs.append(_in_lockstep(config, row.system, every, seed, until_s))
      continue
    outcome = inputs.decoupled(
      config,
      seed,
      until_s,
      traces.fault_events(every, recovery, config.failures, seed, until_s),
      config.study.timeline_s if is_drawn and not i else 0.0,
      learners=row.learners,
      quorum=min(config.protocol.quorum, row.learners),
    )
    runs.append(outcome.record())
    if is_drawn and not i:
      first, stands = outcome, tuple(every)
  closed, paper, chips = {}, None, fleet_traces[0].chips
  if kind.is_decoupled or not kind.is_diloco:
    goodput = expected_goodput(config, fleet_traces[0], recovery, row.learners)
    closed = {'goodput': goodput}
    if not recovery.dies:  # Then it steps more than what counts in the end.
      closed['uptime'] = systems.uptime(goodput, row.learners)
  if inputs.is_calibration(config.failures) and (
    kind.recovery or row.recovery == systems.PAPERS
  ):
    paper = inputs.GOODPUT.get(row[:2], {}).get(chips)
  return Cell(*row, chips, tuple(runs), closed, paper, first, stands)


def expected_goodput(
  config: SimulationConfig, trace: Trace, recovery: Recovery, learners: int
) -> float:
  """Returns g of one of M learners, by the closed form of its recovery."""
  network, again_s = inputs.network_of(config), 0.0
  if recovery.dies:
    again_s = systems.RESTART_STEPS * config.fleet.step_s
    again_s += 8 * network.state_bytes / network.learner_bps
  return recovery.goodput(
    trace.rate_per_s / learners,
    trace.repair_s,
    config.failures.pause_s,
    again_s,
  )


def exchange_of(
  config: SimulationConfig, system: str
) -> synchronous.GroupExchange:
  """Returns the exchange that groups in lock-step wait for.

  Without a DiLoCo, that is every step of the others.
  """
  if not SYSTEMS[system].is_diloco:
    return synchronous.GroupExchange(1)
  return inputs.exchange_of(
    config, SYSTEMS[system].streams, max(config.study.learners)
  )


def _in_lockstep(
  config: SimulationConfig,
  system: str,
  every: Sequence[traces.LearnerTrace],
  seed: int,
  until_s: float,
) -> Record:
  fleet = config.fleet
  is_even = not (fleet.slow_learners or fleet.jitter)
  if not SYSTEMS[system].is_diloco and not is_even:
    # Parts of unequal speed wait for each other after every step.
    every = list(every) * max(config.study.learners)
  done = synchronous.run(
    [one.stops for one in every],
    inputs.lockstep_speeds(config, len(every), seed),
    until_s,
    exchange_of(config, system),
    [one.capacities for one in every],
  )
  return {'goodput': done.goodput, 'uptime': done.uptime}


def report(config: SimulationConfig, say: Callable[[str], None]) -> ReportPage:
  """Returns tables and pictures of every system on every fleet.

  Raises:
    TraceError: `failures.trace` names a file that can't be used.
  """
  cells = simulate(config, say)
  goodputs = _by_chips(config, cells, 'goodput', 'Goodput, %')
  uptimes = _by_chips(config, cells, 'uptime', 'Uptime, %')
  found: list[Part] = [
    dataclasses.replace(goodputs, notes=tuple(_deviations(cells))),
    dataclasses.replace(
      uptimes,
      notes=(
        'Decoupled DiLoCo is down at the very start, until its first learner '
        'has joined.',
      ),
    ),
    *_charts(config, cells),
  ]
  drawn = [cell for cell in cells.values() if cell.outcome is not None]
  if drawn:
    found += [_rounds(cells), _timeline(config, drawn[0])]
  return ReportPage(
    name=config.name,
    title='Goodput of fleets whose chips fail',
    command='python -m diloco.simulate --config=experiments/goodput.py',
    paragraphs=tuple(_paragraphs(config)),
    parts=tuple(found),
  )


def short(chips: float) -> str:
  """Formats a number of chips, such as 150k or 1.2M."""
  if chips >= 1e6:
    return f'{chips / 1e6:g}M'
  return f'{chips / 1e3:g}k' if chips >= 1e3 else f'{chips:g}'


def _by_chips(
  config: SimulationConfig, cells: Cells, name: str, title: str
) -> Table:
  """Returns a figure in percent: simulated, by formula, of the paper."""
  columns = [Heading(each) for each in ('system', 'learners', 'recovery', 'by')]
  for chips in chips_of(config):
    columns += tables.with_spread(short(chips), 1)
  lines = []
  for row in rows(config):
    own = [cells[row, chips] for chips in chips_of(config)]
    figures = {
      'simulated': [
        (
          times(100, cell.mean(name)),
          times(100, tables.spread(cell.runs, name)),
        )
        for cell in own
      ],
      'closed form': [
        (times(100, cell.closed.get(name)), None) for cell in own
      ],
      'paper': [
        (cell.paper if name == 'goodput' else None, None) for cell in own
      ],
    }
    for by, pairs in figures.items():
      if any(middle is not None for middle, _ in pairs):
        lines.append((*row, by, *(x for pair in pairs for x in pair)))
  return Table(name, title, tuple(columns), tuple(lines))


def _deviations(cells: Cells) -> Iterator[str]:
  """Yields how far simulation and formula are from the paper's numbers."""
  given = [cell for cell in cells.values() if cell.paper is not None]
  if not given:
    return
  for by, share in (
    ('Simulated', lambda cell: cell.mean('goodput')),
    ('Closed form', lambda cell: cell.closed['goodput']),
  ):
    off = [(100 * share(cell) - cell.paper, cell) for cell in given]
    mean = statistics.fmean(abs(points) for points, _ in off)
    worst, cell = max(off, key=lambda pair: abs(pair[0]))
    yield (
      f'{by} against the paper: mean absolute deviation {mean:.1f} points of '
      f'{len(off)} cells, largest {worst:+.1f} ({cell.system}, '
      f'{cell.learners} learners, {short(cell.chips)} chips).'
    )


def _rounds(cells: Cells) -> Table:
  """Returns statistics of the rounds of Decoupled DiLoCo."""
  return tables.table(
    'rounds',
    'Rounds of Decoupled DiLoCo',
    (
      Field('chips'),
      Field('learners'),
      Field('recovery'),
      Field('goodput %', 'goodput', 1, 100, spread=True),
      Field('uptime %', 'uptime', 2, 100, spread=True, hidden=True),
      Field('merges/h', 'merges_per_hour', 0, spread=True),
      Field('participation %', 'participation', 1, 100, spread=True),
      Field('least %', 'participation_least', 1, 100, spread=True),
      Field('staleness', 'staleness', 3, spread=True),
      *(
        Field(f'{name} Gbit/s', key, 2, spread=True, hidden=True)
        for name, key in (
          ('learner out', 'learner_out_gbps'),
          ('learner in', 'learner_in_gbps'),
          ('syncer in, peak', 'syncer_in_peak_gbps'),
          ('syncer out, peak', 'syncer_out_peak_gbps'),
        )
      ),
      Field('learner steps', 'steps', 0, spread=True, hidden=True),
    ),
    [
      (vars(cell), cell.runs)
      for cell in sorted(
        cells.values(), key=lambda cell: (cell.learners, cell.chips)
      )
      if SYSTEMS[cell.system].is_decoupled
    ],
    (
      'Participation: share of the rounds that took a learner in, on average '
      'and of the learner in the fewest. Staleness: versions that the base of '
      'a merged offer was behind.',
    ),
  )


def _charts(config: SimulationConfig, cells: Cells) -> Iterator[Chart]:
  """Goodput against chips, a chart for each recovery of Decoupled DiLoCo."""
  groups = list(dict.fromkeys(row[:2] for row in rows(config)))
  for recovery in config.failures.recoveries:
    lines = []
    for row in rows(config):
      if row.recovery == recovery or SYSTEMS[row.system].recovery:
        lines += _lines(config, cells, row, groups.index(row[:2]))
    yield Chart(
      name=f'goodput_{recovery}',
      title=f'Goodput against chips, recovery: {recovery}',
      x_label='chips',
      y_label='goodput, %',
      lines=tuple(lines),
      log_x=True,
      y_range=(0.0, 100.0),
    )


def _lines(
  config: SimulationConfig, cells: Cells, row: Row, group: int
) -> Iterator[Line]:
  own = [cells[row, chips] for chips in chips_of(config)]
  label = row.system
  if row.learners > 1:
    label += f', M = {row.learners}'
  xs = tuple(float(cell.chips) for cell in own)
  spreads = [tables.spread(cell.runs, 'goodput') for cell in own]
  yield Line(
    label,
    'simulated',
    xs,
    tuple(100 * cell.mean('goodput') for cell in own),
    () if None in spreads else tuple(100 * spread for spread in spreads),
    group,
  )
  if own[0].closed and len(own) > 1:
    exact = tuple(100 * cell.closed['goodput'] for cell in own)
    yield Line(label, 'closed form', xs, exact, group=group)
  known = [(x, float(c.paper)) for x, c in zip(xs, own) if c.paper is not None]
  if known:
    yield Line(label, 'paper', *zip(*known), group=group)


def _timeline(config: SimulationConfig, cell: Cell) -> Timeline:
  """Learners and rounds of the beginning of one run."""
  until_s = config.study.timeline_s
  kind = 'dead' if RECOVERIES[cell.recovery].dies else 'pause'
  return lanes.timeline(
    'timeline',
    f'The first {until_s:g} s of {cell.learners} learners on '
    f'{short(cell.chips)} chips, recovery: {cell.recovery}, seed {config.seed}',
    cell.outcome,
    [f'learner {m}' for m in range(cell.learners)],
    until_s,
    more=[
      TimelineSpan(learner, stop.begin_s, stop.end_s, kind, stop.reason)
      for learner, one in enumerate(cell.stands)
      for stop in one.stops
    ],
  )


def _paragraphs(config: SimulationConfig) -> Iterator[str]:
  failures, study, protocol = config.failures, config.study, config.protocol
  if failures.trace:
    yield (
      f'Failures are those of {failures.trace}, a cluster of '
      f'{config.fleet.chips:,} chips. No run is longer than the record.'
    )
  else:
    yield (
      f'Each chip is interrupted once in {failures.mtbi_days:g} days, at '
      'random. Its slice is back after '
      f'{failures.repair_s:g} s on average ({failures.repair}); a '
      f'reconfiguration takes {failures.pause_s:g} s. Fleets have been at it '
      'for a while when a run begins.'
    )
  modes = ' '.join(
    f'`{name}`: {RECOVERIES[name].note}' for name in failures.recoveries
  )
  yield f'When a slice is lost, by recovery. {modes}'
  yield systems.WHAT_A_LAUNCH_DOES
  yield (
    'Goodput is the share of the allocated time, and slices, that went into '
    'training steps whose work no death took, as of real runs: a slice that '
    'is away makes the learner so much less useful, and a step made again '
    'counts once. Uptime is the share of the time in which somebody was '
    'stepping. All systems of one fleet and seed have the same failures. '
    f'± is the standard deviation over {study.seeds} seeds.'
  )
  if any(SYSTEMS[system].is_decoupled for system in study.systems):
    yield (
      'Decoupled DiLoCo runs the protocol code of real runs, '
      f'{study.learner_hours:g} learner-hours per cell and seed, with '
      f'P = {protocol.fragments}, H = {protocol.sync_every_steps}, '
      f'τ = {protocol.overlap_steps}, K = {protocol.quorum}, steps of '
      f'{config.fleet.step_s:g} s. Programs in lock-step run '
      f'{LOCKSTEP_LONGER} times as long: they are cheaper.'
    )
  yield (
    'Closed forms (our inference): g + t·λ·g·(1 + g) = 1 for an elastic '
    'learner and g = 1/(1 + λR) for one that waits, λ = N/(M · MTBI); one that '
    'restarts has the former times e^(-λ(1 + g)a), where a is its bootstrap '
    f'and {systems.RESTART_STEPS:g} steps, so it hangs on how long a step is; '
    'downtime of the whole (1 - g)^M. The DiLoCos in lock-step have none that '
    'is sound: their goodput is between g^M, where nobody may be ahead, and g.'
  )
  absent = [system for system in SYSTEMS if system not in study.systems]
  if absent:
    yield f'Not simulated: {", ".join(absent)}.'
