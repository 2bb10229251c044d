# SPDX-License-Identifier: Apache-2.0
"""A study's page and tables: a row is a cell, a run is a record."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from diloco.config.simulation import SimulationConfig
from diloco.pages.parts import Cell, Column, Part, ReportPage, Table

Record = Mapping[str, float | None]  # The figures of one run, by name.


@dataclasses.dataclass(frozen=True)
class Field:
  """A column: a label of the row, or the mean of a figure over its runs."""

  name: str
  key: str = ''  # Of the records; '': a label, under the column's name.
  digits: int = 1
  factor: float = 1.0
  spread: bool = False  # With the standard deviation over the runs.
  hidden: bool = False  # In files only.

  def columns(self) -> tuple[Column, ...]:
    if not self.spread:
      return (Column(self.name, self.digits, hidden=self.hidden),)
    return with_spread(self.name, self.digits, self.hidden)

  def cells(self, labels: Mapping[str, Cell], runs: Sequence[Record]):
    if not self.key:
      return (labels.get(self.name),)
    middle, off = mean(runs, self.key), spread(runs, self.key)
    pair = (times(self.factor, middle), times(self.factor, off))
    return pair if self.spread else pair[:1]


def table(
  name: str,
  title: str,
  fields: Sequence[Field],
  rows: Iterable[tuple[Mapping[str, Cell], Sequence[Record]]],
  notes: Sequence[str] = (),
) -> Table:
  """Returns a table of rows, each of labels and the records of its runs."""
  return Table(
    name,
    title,
    tuple(column for field in fields for column in field.columns()),
    tuple(
      tuple(cell for field in fields for cell in field.cells(labels, runs))
      for labels, runs in rows
    ),
    tuple(notes),
  )


def with_spread(
  name: str, digits: int, hidden: bool = False
) -> tuple[Column, Column]:
  """Returns a column and that of its standard deviation, in files only."""
  return (
    Column(name, digits, spread=f'{name} ±', hidden=hidden),
    Column(f'{name} ±', digits, hidden=True),
  )


def page(
  config: SimulationConfig,
  title: str,
  paragraphs: Iterable[str],
  parts: Iterable[Part],
) -> ReportPage:
  """Returns the page of a study of this configuration."""
  command = 'python -m diloco.simulate'  # Its arguments are the caller's.
  return ReportPage(
    config.name, title, command, tuple(paragraphs), tuple(parts)
  )


def _values(runs: Sequence[Record], key: str) -> list[float]:
  return [run[key] for run in runs if run.get(key) is not None]


def mean(runs: Sequence[Record], key: str) -> float | None:
  found = _values(runs, key)
  return statistics.fmean(found) if found else None


def spread(runs: Sequence[Record], key: str) -> float | None:
  """Standard deviation over the runs; None of fewer than two."""
  found = _values(runs, key)
  return statistics.stdev(found) if len(found) > 1 else None


def times(factor: float, value: float | None) -> float | None:
  return None if value is None else factor * value


def over(runs: int) -> str:
  """The note that says what mean and spread are of."""
  if runs == 1:
    return 'One run: no spread.'
  return f'Means over {runs} runs (seeds) ± their standard deviation.'
