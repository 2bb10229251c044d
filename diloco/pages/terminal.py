# SPDX-License-Identifier: Apache-2.0
"""Shows a report in a terminal, of whatever width, without colours."""

import textwrap
from collections.abc import Callable, Iterator, Sequence

import rich.box
import rich.console
import rich.table
import rich.text

from diloco.pages import parts
from diloco.pages.parts import Prose, ReportPage, Table

BETWEEN = 2  # Blanks between two columns.
KEYS_MAX = 0.6  # Of the width, for columns that are repeated.
PROSE_MAX = 100  # Columns; longer lines are hard to read.


def show(
  report: ReportPage, console: rich.console.Console | None = None
) -> None:
  """Prints a report's figures, prose and tables.

  Args:
    console: where; standard output unless given.
  """
  console = console or rich.console.Console(
    color_system=None, highlight=False, markup=False, emoji=False
  )
  _print(console, report.title, 'bold')
  if report.tiles:
    console.print()
  for tile in report.tiles:
    _print(console, f'{tile.value}  {tile.note}', first=f'{tile.name}: ')
  for paragraph in report.paragraphs:
    console.print()
    _print(console, paragraph)
  for part in report.parts:
    if isinstance(part, Table):
      _show_table(part, console)
    elif isinstance(part, Prose):
      console.print()
      _print(console, part.title, 'bold')
      for line in part.lines:
        _print(console, line)
  console.print()
  console.print(rich.text.Text(f'Again: {report.command}'), soft_wrap=True)


def _show_table(table: Table, console: rich.console.Console) -> None:
  console.print()
  _print(console, table.title, 'bold')
  for i, columns in enumerate(blocks(parts.shown(table), console.width)):
    if i:
      console.print()
    view = rich.table.Table(
      box=rich.box.SIMPLE_HEAD,
      padding=(0, BETWEEN - 1, 0, 0),  # The box has a blank of its own.
      pad_edge=False,
      show_edge=False,
      header_style='',
    )
    roomy = _used(columns, _roomy) <= console.width
    for column in columns:
      width = _roomy(column) if roomy else _narrow(column)
      view.add_column(
        rich.text.Text(column.name),
        justify='right' if column.numeric else 'left',
        vertical='bottom',
        width=min(width, console.width),
        overflow='fold',
      )
    for row in zip(*(column.texts for column in columns)):
      view.add_row(*map(rich.text.Text, row))
    console.print(view)
  for note in table.notes:
    _print(console, note, first='- ')


def blocks(
  columns: Sequence[parts.ShownColumn], width: int
) -> Iterator[tuple[parts.ShownColumn, ...]]:
  """A table cut, where it is too wide, into some that begin alike.

  Args:
    columns: of the whole table. As many of the first ones are repeated as it
      takes to tell its rows apart, if those leave room for others.
  """
  keys = next(
    (
      columns[:many]
      for many in range(1, len(columns))
      if _tell_apart(columns[:many])
    ),
    columns[:1],
  )
  if _used(keys, _narrow) > KEYS_MAX * width:
    keys = columns[:1]
  block = [*keys]
  for column in columns[len(keys) :]:
    if len(block) > len(keys) and _used([*block, column], _narrow) > width:
      yield tuple(block)
      block = [*keys]
    block.append(column)
  yield tuple(block)


def _tell_apart(columns: Sequence[parts.ShownColumn]) -> bool:
  rows = list(zip(*(column.texts for column in columns)))
  return len(set(rows)) == len(rows)


def _used(columns: Sequence[parts.ShownColumn], width_of: Callable) -> int:
  return sum(map(width_of, columns)) + BETWEEN * (len(columns) - 1)


def _roomy(column: parts.ShownColumn) -> int:
  """Characters it takes with its heading on one line."""
  return max(map(len, (*column.texts, column.name)))


def _narrow(column: parts.ShownColumn) -> int:
  """Characters it needs, its heading broken at blanks."""
  return max(map(len, (*column.texts, *column.name.split())), default=1)


def _print(
  console: rich.console.Console, text: str, style: str = '', first: str = ''
) -> None:
  """Prose, broken at blanks; `first` stands before it, above blanks."""
  width = max(20, min(console.width, PROSE_MAX))
  rest = ' ' * len(first)
  for line in textwrap.wrap(
    text, width, initial_indent=first, subsequent_indent=rest
  ):
    console.print(rich.text.Text(line, style=style))
