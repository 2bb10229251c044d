# SPDX-License-Identifier: Apache-2.0
"""The tables of the goodput study: goodput, uptime, the rule, the rounds."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping

from diloco.fleets.systems import DECOUPLED, ELASTIC, SYSTEMS
from diloco.pages.parts import Column, Table
from diloco.studies import inputs
from diloco.studies.goodput_cells import GoodputCell


@dataclasses.dataclass(frozen=True)
class Grid:
  """All cells and what the tables are made of."""

  rows: tuple[tuple[str, int], ...]  # (system, M), in order.
  chips: tuple[int, ...]  # N, in order.
  cells: Mapping[tuple[str, int, int], GoodputCell]  # By (system, M, N).
  is_paper: bool  # Whether the paper's table is of this setting.

  def paper_percent(self, system: str, learners: int, chips: int):
    """The paper's figure; None where it gives none, or of something else."""
    if not self.is_paper:
      return None
    return inputs.GOODPUT.get((system, learners), {}).get(chips)


def short(chips: float) -> str:
  """Formats a number of chips, such as 150k or 1.2M."""
  if chips >= 1e6:
    return f'{chips / 1e6:g}M'
  return f'{chips / 1e3:g}k' if chips >= 1e3 else f'{chips:g}'


def goodput_table(grid: Grid) -> Table:
  """Goodput in percent: simulated, by formula, of the paper."""
  rows = []
  for system, learners in grid.rows:
    rows.append(_simulated(grid, system, learners, 'goodput'))
    rows += _if_any(
      grid,
      system,
      learners,
      'closed form',
      lambda c: _percent(c.closed_goodput),
    )
    rows += _if_any(
      grid,
      system,
      learners,
      'paper',
      lambda cell: grid.paper_percent(cell.system, cell.learners, cell.chips),
    )
  return Table(
    name='goodput',
    title='Goodput, %',
    columns=_columns(grid, digits=1),
    rows=tuple(rows),
    notes=tuple(_deviations(grid)),
  )


def uptime_table(grid: Grid) -> Table:
  """Uptime in percent: simulated and by formula."""
  rows = []
  for system, learners in grid.rows:
    rows.append(_simulated(grid, system, learners, 'uptime'))
    rows += _if_any(
      grid, system, learners, 'closed form', lambda c: _percent(c.closed_uptime)
    )
  return Table(
    name='uptime',
    title='Uptime, %',
    columns=_columns(grid, digits=1),
    rows=tuple(rows),
    notes=(
      'Decoupled DiLoCo is down at the very start, until its first learner '
      'has joined.',
    ),
  )


def same_goodput_table(grid: Grid) -> Table:
  """M learners have about the goodput of one on M times fewer chips."""
  learners = sorted({m for name, m in grid.rows if SYSTEMS[name].is_decoupled})
  if (ELASTIC, 1) in grid.rows:
    learners = [1, *(m for m in learners if m > 1)]
  sizes = sorted({n / m for n in grid.chips for m in learners})
  rows = []
  for size in sizes:
    cells = [_of_size(grid, size, m) for m in learners]
    there = [cell for cell in cells if cell is not None]
    if len(there) < 2:
      continue
    means = [_percent(cell and cell.mean('goodput')) for cell in cells]
    spreads = [_percent(cell and cell.spread('goodput')) for cell in cells]
    known = [mean for mean in means if mean is not None]
    rows.append(
      (
        short(size),
        *_alternating(means, spreads),
        max(known) - min(known),
        _percent(there[0].closed_goodput),
      )
    )
  columns = [Column('chips of a learner')]
  for m in learners:
    columns += _with_spread(f'M = {m}', digits=1)
  columns += [Column('widest gap'), Column('closed form')]
  return Table(
    name='same_goodput',
    title='M learners ≈ one learner on M times fewer chips: goodput, %',
    columns=tuple(columns),
    rows=tuple(rows),
    notes=('M = 1 is elastic data-parallel, the others Decoupled DiLoCo.',),
  )


def rounds_table(grid: Grid) -> Table:
  """Returns statistics of the rounds of Decoupled DiLoCo."""
  figures = (
    # Column, attribute, factor, digits, hidden.
    ('goodput %', 'goodput', 100, 1, False),
    ('uptime %', 'uptime', 100, 2, True),
    ('merges/h', 'merges_per_hour', 1, 0, False),
    ('participation %', 'participation', 100, 1, False),
    ('least %', 'participation_least', 100, 1, False),
    ('staleness', 'staleness', 1, 3, False),
    ('learner out Gbit/s', 'learner_out_gbps', 1, 2, True),
    ('learner in Gbit/s', 'learner_in_gbps', 1, 2, True),
    ('syncer in, peak Gbit/s', 'syncer_in_peak_gbps', 1, 2, True),
    ('syncer out, peak Gbit/s', 'syncer_out_peak_gbps', 1, 2, True),
    ('learner steps', 'learner_steps', 1, 0, True),
  )
  columns = [Column('chips'), Column('learners')]
  for name, _, _, digits, hidden in figures:
    columns += _with_spread(name, digits, hidden)
  rows = []
  for system, learners in grid.rows:
    if not SYSTEMS[system].is_decoupled:
      continue
    for chips in grid.chips:
      cell = grid.cells[system, learners, chips]
      values: list[float | int | None] = []
      for _, attribute, factor, _, _ in figures:
        values += [
          _times(factor, cell.mean(attribute)),
          _times(factor, cell.spread(attribute)),
        ]
      rows.append((chips, learners, *values))
  return Table(
    name='rounds',
    title='Rounds of Decoupled DiLoCo',
    columns=tuple(columns),
    rows=tuple(rows),
    notes=(
      'Participation: share of the rounds that took a learner in, on average '
      'and of the learner in the fewest. Staleness: versions that the base of '
      'a merged offer was behind.',
    ),
  )


def _columns(grid: Grid, digits: int) -> tuple[Column, ...]:
  columns = [Column('system'), Column('learners'), Column('by')]
  for chips in grid.chips:
    columns += _with_spread(short(chips), digits)
  return tuple(columns)


def _with_spread(
  name: str, digits: int, hidden: bool = False
) -> tuple[Column, Column]:
  spread = f'{name} ±'
  return (
    Column(name, digits, spread=spread, hidden=hidden),
    Column(spread, digits, hidden=True),
  )


def _simulated(grid: Grid, system: str, learners: int, name: str) -> tuple:
  cells = [grid.cells[system, learners, chips] for chips in grid.chips]
  means = [_percent(cell.mean(name)) for cell in cells]
  spreads = [_percent(cell.spread(name)) for cell in cells]
  return system, learners, 'simulated', *_alternating(means, spreads)


def _if_any(
  grid: Grid,
  system: str,
  learners: int,
  by: str,
  figure: Callable[[GoodputCell], float | None],
) -> Iterator[tuple]:
  """The row of a reference, unless all of it is missing."""
  figures = [
    figure(grid.cells[system, learners, chips]) for chips in grid.chips
  ]
  if any(value is not None for value in figures):
    yield system, learners, by, *_alternating(figures, [None] * len(figures))


def _alternating(means: list, spreads: list) -> list:
  return [value for pair in zip(means, spreads) for value in pair]


def _of_size(grid: Grid, size: float, learners: int) -> GoodputCell | None:
  is_program = learners == 1 and (ELASTIC, 1) in grid.rows
  system = ELASTIC if is_program else DECOUPLED
  return grid.cells.get((system, learners, round(size * learners)))


def _percent(share: float | None) -> float | None:
  return _times(100, share)


def _times(factor: float, value: float | None) -> float | None:
  return None if value is None else factor * value


def _deviations(grid: Grid) -> Iterator[str]:
  """Yields how far simulation and formula are from the paper's numbers."""
  given = [
    (cell, figure)
    for cell in grid.cells.values()
    if (figure := grid.paper_percent(cell.system, cell.learners, cell.chips))
    is not None
  ]
  if not given:
    return
  for by, share in (
    ('Simulated', lambda cell: cell.mean('goodput')),
    ('Closed form', lambda cell: cell.closed_goodput),
  ):
    off = [(100 * share(cell) - figure, cell) for cell, figure in given]
    mean = statistics.fmean(abs(points) for points, _ in off)
    worst, cell = max(off, key=lambda pair: abs(pair[0]))
    yield (
      f'{by} against the paper: mean absolute deviation {mean:.1f} points of '
      f'{len(off)} cells, largest {worst:+.1f} ({cell.system}, '
      f'{cell.learners} learners, {short(cell.chips)} chips).'
    )
