# SPDX-License-Identifier: Apache-2.0
"""The pictures of the goodput study: goodput against chips, and a timeline."""

import math

from diloco.pages.parts import Chart, Line, Span, Timeline
from diloco.simulation_config import SimulationConfig
from diloco.studies import lanes, traces
from diloco.studies.goodput_cells import Cell, recovery_of
from diloco.studies.goodput_tables import Grid, short

CURVE_POINTS = 41  # Of a closed form.


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


def timeline(config: SimulationConfig, cell: Cell) -> Timeline:
  """Learners and rounds of the beginning of one run.

  Args:
    config: that the cell was simulated by.
    cell: one that kept its outcome.
  """
  until_s = config.study.timeline_s
  kind = 'dead' if config.failures.recovery == 'restart' else 'pause'
  return lanes.timeline(
    'timeline',
    f'The first {until_s:g} s of {cell.learners} learners on '
    f'{short(cell.chips)} chips, seed {config.seed}',
    cell.outcome,
    [f'learner {m}' for m in range(cell.learners)],
    until_s,
    more=[
      Span(learner, stop.begin_s, stop.end_s, kind, stop.reason)
      for learner, one in enumerate(cell.stands)
      for stop in one.stops
    ],
  )
