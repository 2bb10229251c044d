# SPDX-License-Identifier: Apache-2.0
"""The share of a fleet's time that goes into training when chips fail."""

import dataclasses
import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from diloco.config.sections import ConfigError
from diloco.config.simulation import FailuresConfig, SimulationConfig
from diloco.fleets import failures, pauses, systems
from diloco.fleets.failures import Death, FaultEvents, Interruption
from diloco.fleets.pauses import MeasuredPause
from diloco.fleets.systems import DECOUPLED, RECOVERIES, SYSTEMS
from diloco.metrics.run_progress import counted
from diloco.pages.parts import Chart, Line, ReportPage, Table
from diloco.pages.parts import Column as Heading
from diloco.studies import study as studies
from diloco.studies.study import Field, Record, times

# Data-parallel costs next to nothing, so it runs longer: its means scatter
# less. Its failures begin with those of Decoupled DiLoCo.
LOCKSTEP_LONGER = 24
# A drawn fleet has been at it for so many times the mean repair and pause: at
# the start, slices are away, and some learners stand.
WARM_UP = 5
# Points by which `check` lets the simulator miss the paper's figures.
CHECK_MEAN, CHECK_WORST = 1.5, 4.0


class Row(NamedTuple):
  """A row of the tables: a way to train, and what it does about a failure."""

  system: str
  learners: int
  recovery: str  # A key of RECOVERIES.


# Failures of a fleet in one seed, the same for every system on it.


def drawn(
  config: FailuresConfig, chips: int, seed: int, until_s: float
) -> tuple[Interruption, ...]:
  """A fleet of N chips; a longer time begins with the same failures."""
  return failures.draw(
    failures.rate_per_s(chips, config.mtbi_days),
    until_s,
    failures.make(config.repair, config.repair_s, config.repair_shape),
    random.Random(f'failures of {chips} chips, seed {seed}'),
  )


def fault_events(
  config: SimulationConfig, row: Row, chips: int, seed: int, until_s: float
) -> FaultEvents:
  """Returns the stops of each learner, from the start of the run.

  For learners that restart, each reconfiguration, with fewer slices or with
  more, is a death; the next process bootstraps after the pause.
  """
  recovery, pause_s = RECOVERIES[row.recovery], config.failures.pause_s
  from_s = WARM_UP * (config.failures.repair_s + pause_s)
  every = drawn(config.failures, chips, seed, from_s + until_s)
  slices = chips / row.learners / config.fleet.slice_chips
  suspensions, capacities = {}, {}
  for m in range(row.learners):
    own = failures.of_learner(every, m, row.learners)
    stops, shares = recovery.stops(own, pause_s, from_s + until_s), ()
    if recovery.runs_on:
      shares = failures.capacities(own, stops, 1 / max(slices, 1.0))
    suspensions[m] = failures.stops_from(stops, from_s)
    capacities[m] = failures.capacities_from(shares, from_s)
  if not recovery.dies:
    return FaultEvents(suspensions, capacities)
  deaths = tuple(
    Death(m, stop.begin_s, stop.end_s)
    for m, stops in suspensions.items()
    for stop in stops
  )
  return FaultEvents(capacities=capacities, deaths=deaths)


# The study.


@dataclasses.dataclass(frozen=True)
class Cell:
  """A row on a fleet of N chips."""

  row: Row
  chips: int
  runs: tuple[Record, ...]  # One per seed.
  closed: Record  # By formula.
  paper: float | None  # Percent; None where it gives none.

  def mean(self, name: str) -> float | None:
    return studies.mean(self.runs, name)

  def spread(self, name: str) -> float | None:
    return studies.spread(self.runs, name)


Cells = dict[tuple[Row, int], Cell]  # By row and chips.


def rows(config: SimulationConfig) -> list[Row]:
  """Returns the rows in the order of the tables."""
  result = []
  for system in config.study.systems:
    if recovery := SYSTEMS[system]:
      result.append(Row(system, 1, recovery))
    else:
      pairs = itertools.product(
        config.study.learners, config.failures.recoveries
      )
      result += [Row(system, *pair) for pair in pairs]
  return result


def seconds(config: SimulationConfig, row: Row) -> float:
  """Simulated time of one cell and seed."""
  longer = 1 if row.system == DECOUPLED else LOCKSTEP_LONGER
  return 3600 * config.study.learner_hours / row.learners * longer


def simulate(config: SimulationConfig, say: Callable[[str], None]) -> Cells:
  """Simulates every row on every fleet, with the same failures."""
  cells = [(row, chips) for chips in config.study.chips for row in rows(config)]
  return {
    (row, chips): cell_of(config, row, chips)
    for row, chips in counted(
      cells,
      say,
      lambda cell: '{}, {} learners, {}, {} chips'.format(*cell[0], cell[1]),
    )
  }


def cell_of(config: SimulationConfig, row: Row, chips: int) -> Cell:
  """Runs a cell with each seed."""
  recovery, until_s = RECOVERIES[row.recovery], seconds(config, row)
  runs = []
  for seed in range(config.seed, config.seed + config.study.seeds):
    events = fault_events(config, row, chips, seed, until_s)
    if row.system != DECOUPLED:
      runs.append(_as_one(config, events, until_s))
      continue
    outcome = studies.decoupled(
      config,
      seed,
      until_s,
      events,
      learners=row.learners,
      quorum=min(config.protocol.quorum, row.learners),
    )
    runs.append(outcome.record())
  goodput = closed_form(config, row, chips, config.failures.pause_s)
  closed = {'goodput': goodput}
  if not recovery.dies:  # Then it steps more than what counts in the end.
    closed['uptime'] = systems.uptime(goodput, row.learners)
  paper = None
  if studies.is_calibration(config.failures) and (
    SYSTEMS[row.system] or row.recovery == systems.PAPERS
  ):
    paper = studies.GOODPUT.get(row[:2], {}).get(chips)
  return Cell(row, chips, tuple(runs), closed, paper)


def closed_form(
  config: SimulationConfig, row: Row, chips: int, pause_s: float
) -> float:
  """Returns the goodput of a cell by formula, with this pause."""
  recovery, own = RECOVERIES[row.recovery], config.failures
  network = studies.network_of(config)
  again_s = systems.RESTART_STEPS * config.fleet.step_s
  again_s += 8 * network.state_bytes / network.learner_bps
  return recovery.goodput(
    failures.rate_per_s(chips, own.mtbi_days) / row.learners,
    own.repair_s,
    pause_s,
    again_s if recovery.dies else 0.0,
  )


def _as_one(
  config: SimulationConfig, events: FaultEvents, until_s: float
) -> Record:
  """Data-parallel: one group of slices, in steps of the slowest part."""
  useful_s, stepping_s = failures.running_s(
    events.suspensions[0], events.capacities[0], until_s
  )
  steps_s = studies.fleet_of(config, max(config.study.learners)).step_s
  even = statistics.fmean(steps_s) / max(steps_s)
  return {'goodput': even * useful_s / until_s, 'uptime': stepping_s / until_s}


def report(config: SimulationConfig, say: Callable[[str], None]) -> ReportPage:
  """Returns tables and charts of every system on every fleet."""
  cells = simulate(config, say)
  return studies.page(
    config,
    'Goodput of fleets whose chips fail',
    _paragraphs(config),
    (
      _by_chips(
        config, cells, 'goodput', tuple(map(str, _deviations(cells.values())))
      ),
      _by_chips(
        config,
        cells,
        'uptime',
        (
          'Decoupled DiLoCo is down at the very start, until its first learner '
          'has joined.',
        ),
      ),
      *_charts(config, cells),
    ),
  )


# The simulator against the paper.


def check(
  config: SimulationConfig, say: Callable[[str], None]
) -> tuple[ReportPage, bool]:
  """Simulates the cells of elastic learners that the paper's Table 1 has.

  Returns:
    Each cell with the paper's figure, and whether the simulator holds: on
    average within `CHECK_MEAN` points, and nowhere off by more than
    `CHECK_WORST`.

  Raises:
    ConfigError: the study has none of these cells.
  """
  own = dataclasses.replace(config.failures, recovery=systems.PAPERS)
  config = dataclasses.replace(config, failures=own)
  asked = [
    (row, chips)
    for row in rows(config)
    if row.recovery == systems.PAPERS
    for chips in config.study.chips
    if chips in studies.GOODPUT.get(row[:2], {})
  ]
  if not asked:
    raise ConfigError(
      [
        "--check: the paper's Table 1 has none of study.systems="
        f'{config.study.systems}, study.learners={config.study.learners}, '
        f'study.chips={config.study.chips}; it has learners 4 and 8, chips '
        f'{", ".join(map(str, studies.CHIPS))}'
      ]
    )
  cells = [
    dataclasses.replace(
      cell_of(config, row, chips), paper=studies.GOODPUT[row[:2]][chips]
    )
    for row, chips in counted(
      asked, say, lambda each: f'{each[0].system}, {short(each[1])} chips'
    )
  ]
  found, by_formula = _deviations(cells)
  holds = found.mean <= CHECK_MEAN and abs(found.worst) <= CHECK_WORST
  verdict = (
    f'{"It holds" if holds else "IT DOES NOT HOLD"}: the simulator may be off '
    f'by {CHECK_MEAN:g} points on average, and by {CHECK_WORST:g} anywhere.'
  )
  table = studies.table(
    'check',
    'Goodput of elastic learners, %',
    (
      *(Field(name) for name in ('system', 'learners', 'chips')),
      Field('simulated', 'goodput', factor=100, spread=True),
      *(Field(name) for name in ('closed form', 'paper', 'difference')),
    ),
    (
      (
        {
          'system': cell.row.system,
          'learners': cell.row.learners,
          'chips': short(cell.chips),
          'closed form': 100 * cell.closed['goodput'],
          'paper': cell.paper,
          'difference': 100 * cell.mean('goodput') - cell.paper,
        },
        cell.runs,
      )
      for cell in cells
    ),
    (str(found), str(by_formula), verdict),
  )
  text = (
    f'An interruption per chip in {own.mtbi_days:g} days, a slice back after '
    f'{own.repair_s:g} s on average, a pause of {pauses.in_words(own.pause_s)}.'
  )
  title = 'The simulator against the paper'
  page = studies.page(config, title, (text,), (table,))
  return page, holds


def short(chips: float) -> str:
  """Formats a number of chips, such as 150k or 1.2M."""
  if chips >= 1e6:
    return f'{chips / 1e6:g}M'
  return f'{chips / 1e3:g}k' if chips >= 1e3 else f'{chips:g}'


def _by_chips(
  config: SimulationConfig, cells: Cells, name: str, notes: tuple[str, ...]
) -> Table:
  """Returns a figure in percent: simulated, by formula, of the paper."""
  columns = [Heading(each) for each in ('system', 'learners', 'recovery', 'by')]
  for chips in config.study.chips:
    columns += studies.with_spread(short(chips), 1)
  lines = []
  for row in rows(config):
    own = [cells[row, chips] for chips in config.study.chips]
    figures = {
      'simulated': [
        [times(100, x) for x in (cell.mean(name), cell.spread(name))]
        for cell in own
      ],
      'closed form': [
        (times(100, cell.closed.get(name)), None) for cell in own
      ],
    }
    if name == 'goodput':
      figures |= _with_measured(config, row)
      figures['paper'] = [(cell.paper, None) for cell in own]
    for by, pairs in figures.items():
      if any(middle is not None for middle, _ in pairs):
        lines.append((*row, by, *itertools.chain(*pairs)))
  title = f'{name.capitalize()}, %'
  return Table(name, title, tuple(columns), tuple(lines), notes)


def _with_measured(config: SimulationConfig, row: Row) -> dict[str, list]:
  """Returns a row of the table for each pause that was measured."""
  if row.recovery != systems.PAPERS:
    return {}
  return {
    f'closed form, pause {entry.pause_s:.3g} s': [
      (100 * closed_form(config, row, chips, entry.pause_s), None)
      for chips in config.study.chips
    ]
    for entry in measured(config)
  }


def measured(config: SimulationConfig) -> tuple[MeasuredPause, ...]:
  """Returns the measured pauses whose models are the nearest in size."""
  return pauses.nearest(config.network.params, pauses.measured())


@dataclasses.dataclass(frozen=True)
class Deviation:
  """How far a figure of some cells is from the paper's, in points."""

  by: str  # What gave the figure.
  cells: int
  mean: float  # Of the absolute values.
  worst: float  # With its sign,
  worst_cell: Cell  # and where it is.

  def __str__(self) -> str:
    row, chips = self.worst_cell.row, self.worst_cell.chips
    return (
      f'{self.by} against the paper: mean absolute deviation {self.mean:.1f} '
      f'points of {self.cells} cells, largest {self.worst:+.1f} ({row.system}, '
      f'{row.learners} learners, {short(chips)} chips).'
    )


def _deviations(cells: Iterable[Cell]) -> Iterator[Deviation]:
  """Yields how far simulation and formula are from the paper's numbers."""
  known = [cell for cell in cells if cell.paper is not None]
  if not known:
    return
  for by, share in (
    ('Simulated', lambda cell: cell.mean('goodput')),
    ('Closed form', lambda cell: cell.closed['goodput']),
  ):
    off = [(100 * share(cell) - cell.paper, cell) for cell in known]
    mean = statistics.fmean(abs(points) for points, _ in off)
    worst, cell = max(off, key=lambda pair: abs(pair[0]))
    yield Deviation(by, len(off), mean, worst, cell)


def _charts(config: SimulationConfig, cells: Cells) -> Iterator[Chart]:
  """Goodput against chips, a chart for each recovery of Decoupled DiLoCo."""
  groups = list(dict.fromkeys(row[:2] for row in rows(config)))
  for recovery in config.failures.recoveries:
    lines = []
    for row in rows(config):
      if row.recovery == recovery or SYSTEMS[row.system]:
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
  own = [cells[row, chips] for chips in config.study.chips]
  label = row.system
  if row.learners > 1:
    label += f', M = {row.learners}'
  xs = tuple(float(cell.chips) for cell in own)
  spreads = [cell.spread('goodput') for cell in own]
  yield Line(
    label,
    'simulated',
    xs,
    tuple(100 * cell.mean('goodput') for cell in own),
    () if None in spreads else tuple(100 * spread for spread in spreads),
    group,
  )
  if len(own) > 1:
    exact = tuple(100 * cell.closed['goodput'] for cell in own)
    yield Line(label, 'closed form', xs, exact, group=group)
  known = [(x, float(c.paper)) for x, c in zip(xs, own) if c.paper is not None]
  if known:
    yield Line(label, 'paper', *zip(*known), group=group)


def _paragraphs(config: SimulationConfig) -> Iterator[str]:
  failures, study, protocol = config.failures, config.study, config.protocol
  yield (
    f'Each chip is interrupted once in {failures.mtbi_days:g} days, at random. '
    f'Its slice is back after {failures.repair_s:g} s on average '
    f'({failures.repair}); a reconfiguration takes '
    f'{pauses.in_words(failures.pause_s)}. '
    'Fleets have been at it for a while when a run begins.'
  )
  if measured(config):
    own = '; '.join(f'{x.pause_s:.3g} s, {x}' for x in measured(config))
    yield f'The closed form of `{systems.PAPERS}` is given for {own}, too.'
  modes = ' '.join(
    f'`{name}`: {RECOVERIES[name].note}' for name in failures.recoveries
  )
  yield f'When a slice is lost, by recovery. {modes}'
  yield systems.WHAT_A_LAUNCH_DOES
  yield (
    'Goodput is that of real runs: the share of the allocated time, and of '
    'slices, that went into steps whose work no death took. Uptime is the '
    'share of the time in which somebody was stepping. All systems of one '
    f'fleet and seed have the same failures. {studies.over(study.seeds)}'
  )
  if DECOUPLED in study.systems:
    yield (
      'Decoupled DiLoCo runs the protocol code of real runs, '
      f'{study.learner_hours:g} learner-hours per cell and seed, with '
      f'P = {protocol.fragments}, H = {protocol.sync_every_steps}, '
      f'τ = {protocol.overlap_steps}, K = {protocol.quorum}, steps of '
      f'{config.fleet.step_s:g} s. Data-parallel has {LOCKSTEP_LONGER} times '
      'that: it is cheaper.'
    )
  yield (
    'Closed forms (our inference): g + t·λ·g·(1 + g) = 1 for an elastic '
    'learner and g = 1/(1 + λR) for one that waits, λ = N/(M · MTBI); one that '
    'restarts has the former times e^(-λ(1 + g)a), where a is its bootstrap '
    f'and {systems.RESTART_STEPS:g} steps; downtime of the whole (1 - g)^M.'
  )
