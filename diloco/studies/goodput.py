# SPDX-License-Identifier: Apache-2.0
"""The share of a fleet's time that goes into training when chips fail."""

import math
import time
from collections.abc import Callable

from diloco.config.simulation import SimulationConfig
from diloco.fleets.systems import RECOVERIES, SYSTEMS
from diloco.metrics.run_progress import count
from diloco.pages import parts
from diloco.pages.parts import Chart, Line, Timeline, TimelineSpan
from diloco.studies import goodput_cells, goodput_tables, inputs, lanes, traces
from diloco.studies.goodput_cells import GoodputCell, recovery_of
from diloco.studies.goodput_tables import Grid, short

CURVE_POINTS = 41  # Of a closed form.
TITLE = 'Goodput of fleets whose chips fail'


# The pictures of the goodput study: goodput against chips, and a timeline.


def chart(config: SimulationConfig, grid: Grid) -> Chart:
  """Goodput against chips, one colour for each system and M."""
  lines = []
  for group, (system, learners) in enumerate(grid.rows):
    cells = [grid.cells[system, learners, chips] for chips in grid.chips]
    label = f'{system}, M = {learners}' if learners > 1 else system
    spreads = [cell.spread('goodput') for cell in cells]
    lines.append(
      Line(
        label,
        'simulated',
        xs=tuple(float(chips) for chips in grid.chips),
        ys=tuple(100 * cell.mean('goodput') for cell in cells),
        spreads=()
        if None in spreads
        else tuple(100 * spread for spread in spreads),
        group=group,
      )
    )
    if cells[0].closed_goodput is not None and len(grid.chips) > 1:
      lines.append(_curve(config, grid, group, system, learners, label))
    known = [
      (float(cell.chips), float(percent))
      for cell in cells
      if (percent := grid.paper_percent(system, learners, cell.chips))
      is not None
    ]
    if known:
      xs, ys = zip(*known)
      lines.append(Line(label, 'paper', xs, ys, group=group))
  return Chart(
    name='goodput_against_chips',
    title='Goodput against chips',
    x_label='chips',
    y_label='goodput, %',
    lines=tuple(lines),
    log_x=True,
    y_range=(0.0, 100.0),
  )


def _curve(
  config: SimulationConfig,
  grid: Grid,
  group: int,
  system: str,
  learners: int,
  label: str,
) -> Line:
  low, high = math.log(grid.chips[0]), math.log(grid.chips[-1])
  xs = [
    math.exp(low + (high - low) * i / (CURVE_POINTS - 1))
    for i in range(CURVE_POINTS)
  ]
  ys = [
    100
    * traces.expected_goodput(
      traces.drawn(config.failures, round(chips), 0, 0.0),
      recovery_of(config, system),
      learners,
      config.failures.pause_s,
    )
    for chips in xs
  ]
  return Line(label, 'closed form', tuple(xs), tuple(ys), group=group)


def timeline(config: SimulationConfig, cell: GoodputCell) -> Timeline:
  """Learners and rounds of the beginning of one run.

  Args:
    cell: one that kept its outcome.
  """
  until_s = config.study.timeline_s
  kind = 'dead' if RECOVERIES[config.failures.recovery].dies else 'pause'
  return lanes.timeline(
    'timeline',
    f'The first {until_s:g} s of {cell.learners} learners on '
    f'{short(cell.chips)} chips, seed {config.seed}',
    cell.outcome,
    [f'learner {m}' for m in range(cell.learners)],
    until_s,
    more=[
      TimelineSpan(learner, stop.begin_s, stop.end_s, kind, stop.reason)
      for learner, one in enumerate(cell.stands)
      for stop in one.stops
    ],
  )


def report(
  config: SimulationConfig, say: Callable[[str], None]
) -> parts.ReportPage:
  """Simulates every system on every fleet, with the same failures.

  Raises:
    TraceError: `failures.trace` names a file that can't be used.
  """
  cells = simulate(config, say)
  grid = goodput_tables.Grid(
    rows=tuple(goodput_cells.rows(config)),
    chips=chips_of(config),
    cells=cells,
    is_paper=inputs.is_calibration(config.failures),
  )
  pages: list[parts.Part] = [
    goodput_tables.goodput_table(grid),
    goodput_tables.uptime_table(grid),
  ]
  same = goodput_tables.same_goodput_table(grid)
  if same.rows:
    pages.append(same)
  pages.append(chart(config, grid))
  drawn = [cell for cell in cells.values() if cell.outcome is not None]
  if drawn:
    pages += [goodput_tables.rounds_table(grid), timeline(config, drawn[0])]
  return parts.ReportPage(
    name=config.name,
    title=TITLE,
    command='python -m diloco.simulate --config=experiments/goodput.py',
    paragraphs=tuple(_paragraphs(config)),
    parts=tuple(pages),
  )


def chips_of(config: SimulationConfig) -> tuple[int, ...]:
  """Fleet sizes; a record of failures is of one fleet."""
  if config.failures.trace:
    return (config.fleet.chips,)
  return tuple(sorted(config.study.chips))


def simulate(
  config: SimulationConfig, say: Callable[[str], None]
) -> dict[tuple[str, int, int], GoodputCell]:
  """All cells, by (system, learners, chips)."""
  rows = goodput_cells.rows(config)
  sizes = chips_of(config)
  longest_s = max(goodput_cells.seconds(config, *row) for row in rows)
  cells, began_s = {}, time.monotonic()
  for chips in sizes:
    fleet_traces = _traces(config, chips, longest_s)
    for system, learners in rows:
      largest = max(config.study.learners), max(sizes)
      is_drawn = SYSTEMS[system].is_decoupled and (learners, chips) == largest
      cell = goodput_cells.simulate(
        config,
        system,
        learners,
        fleet_traces,
        config.study.timeline_s if is_drawn else 0.0,
      )
      cells[system, learners, chips] = cell
      done = count(len(cells), len(rows) * len(sizes), began_s)
      say(
        f'{done}: {system}, {learners} learners, {chips} chips: '
        f'goodput {100 * cell.mean("goodput"):.1f} %, '
        f'uptime {100 * cell.mean("uptime"):.1f} %'
      )
  return cells


def _traces(
  config: SimulationConfig, chips: int, until_s: float
) -> list[traces.Trace]:
  """Returns one trace per seed."""
  seeds = range(config.seed, config.seed + config.study.seeds)
  if config.failures.trace:
    return [traces.recorded(config)] * len(seeds)
  return [traces.drawn(config.failures, chips, s, until_s) for s in seeds]


def _paragraphs(config: SimulationConfig):
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
  yield RECOVERIES[failures.recovery].note
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
      f'τ = {protocol.overlap_steps}, K = {protocol.quorum}. Programs in '
      f'lock-step run {goodput_cells.LOCKSTEP_LONGER} times as long: they '
      'are cheaper.'
    )
  yield (
    'Closed forms (our inference): g + t·λ·g·(1 + g) = 1 for an elastic '
    'learner and g = 1/(1 + λR) for one that waits, λ = N/(M · MTBI); '
    'downtime of the whole (1 - g)^M. The DiLoCos in lock-step have none that '
    'is sound: their goodput is between g^M, where nobody may be ahead, and g.'
  )
  absent = [system for system in SYSTEMS if system not in study.systems]
  if absent:
    yield f'Not simulated: {", ".join(absent)}.'
