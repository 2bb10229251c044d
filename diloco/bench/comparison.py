# SPDX-License-Identifier: Apache-2.0
"""Repetitions of benchmarks as a table, as JSON, as a line of the history."""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterable, Sequence

from diloco.bench import machine_load, rows, syncer_rounds
from diloco.bench.measurement import BenchFigure
from diloco.pages.parts import Column, ReportPage, Table

COLUMNS = (
  'row', 'figure', 'median', 'least … most', 'unit', 'ratio', 'against',
  'others',
)  # fmt: skip
DIGITS = 3  # That are shown; the files have all.
HOW_TO_READ = (
  'A ratio is a cost in units of the cost of what stands behind it, measured '
  'in the same run: 1 is as good, 2 takes twice as long (or as many bytes). '
  "'others' is the share of the machine's CPU time that other processes used "
  'meanwhile.'
)


@dataclasses.dataclass(frozen=True)
class RepeatedFigure:
  """One figure of a row over all repetitions."""

  row: str
  name: str
  unit: str
  against: str
  values: tuple[float, ...]
  ratios: tuple[float, ...]  # Empty if there is no reference.
  others: float | None  # Share of the machine's CPU time, of the whole row.

  @property
  def median(self) -> float:
    return statistics.median(self.values)

  @property
  def ratio(self) -> float | None:
    """Returns the median of the repetitions' ratios."""
    return statistics.median(self.ratios) if self.ratios else None

  def plain(self) -> dict:
    """Returns it as JSON."""
    return {
      **dataclasses.asdict(self),
      'median': self.median,
      'least': min(self.values),
      'most': max(self.values),
      'ratio': self.ratio,
    }


def repeated(
  row: str, repetitions: Sequence[Sequence[BenchFigure]], others: float | None
) -> list[RepeatedFigure]:
  """Gathers the repetitions of a row, figure by figure."""
  found = []
  for first in repetitions[0]:
    same = [f for each in repetitions for f in each if f.name == first.name]
    found.append(
      RepeatedFigure(
        row,
        first.name,
        first.unit,
        first.against,
        tuple(f.value for f in same),
        tuple(f.ratio for f in same if f.ratio is not None),
        others,
      )
    )
  return found


def page(
  figures: Iterable[RepeatedFigure],
  failed: dict[str, str],
  machine: dict,
  others: float | None,
  command: str,
) -> ReportPage:
  """Returns the table with what it was measured on."""
  memory_gb = (machine['memory_bytes'] or 0) / 1e9
  rows = tuple(
    (
      f.row,
      f.name,
      _short(f.median),
      f'{_short(min(f.values))} … {_short(max(f.values))}',
      f.unit,
      _short(f.ratio),
      f.against,
      None if f.others is None else f'{f.others:.0%}',
    )
    for f in figures
  )
  table = Table(
    'benchmarks',
    'Benchmarks',
    tuple(Column(name) for name in COLUMNS),
    rows,
    tuple(f'{row} failed: {why}' for row, why in failed.items()),
  )
  return ReportPage(
    name='bench',
    title=f'diloco {machine["diloco"]}, benchmarks',
    command=command,
    paragraphs=(
      f'{machine["cpu"]}, {machine["cores_allowed"]} of {machine["cores"]} '
      f'cores, {memory_gb:.1f} GB; Python {machine["python"]}, jax '
      f'{machine["versions"]["jax"]}; commit {machine["commit"]}.',
      machine_load.said(others),
      HOW_TO_READ,
    ),
    parts=(table,),
  )


def as_markdown(report: ReportPage) -> str:
  """Returns the table with machine, others' share and command."""
  (table,) = report.parts
  lines = [[column.name for column in table.columns]]
  lines.append(['---'] * len(lines[0]))
  lines += [['' if c is None else str(c) for c in row] for row in table.rows]
  rows = '\n'.join(f'| {" | ".join(line)} |' for line in lines)
  paragraphs = (*report.paragraphs[:-1], f'    {report.command}', rows)
  return '\n\n'.join((*paragraphs, *table.notes)) + '\n'


def record(
  figures: Iterable[RepeatedFigure],
  failed: dict[str, str],
  machine: dict,
  others: float | None,
  command: str,
) -> dict:
  """Returns all that was measured, as JSON."""
  return {
    'machine': machine,
    'command': command,
    'others': others,
    'failed': failed,
    'figures': [figure.plain() for figure in figures],
  }


def append(path: pathlib.Path, found: dict) -> None:
  """Appends one line of JSON to the history."""
  with path.open('a') as file:
    file.write(json.dumps(found, allow_nan=False) + '\n')


def host_speeds(figures: Iterable[RepeatedFigure], machine: dict) -> dict:
  """Returns what `diloco plan` reads of hosts: medians of the row `hosts`."""
  own = [figure for figure in figures if figure.row == rows.HOSTS]
  found = syncer_rounds.host_speeds({f.name: f.median for f in own})
  return {
    'machine': f'{machine["cpu"]}, {machine["cores_allowed"]} cores',
    'date': machine['time'][:10],
    'commit': machine['commit'],
    'command': 'python -m diloco.bench --only=hosts --write_speeds=FILE',
    'others': own[0].others,
    **{name: float(f'{value:.3g}') for name, value in found.items()},
  }


def _short(value: float | None) -> str | None:
  """Returns a number with few digits, never as a power of ten."""
  if value is None:
    return None
  if abs(value) >= 10 ** (DIGITS - 1):
    return f'{value:,.0f}'
  return f'{value:.{DIGITS}g}'
