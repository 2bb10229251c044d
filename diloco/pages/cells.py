# SPDX-License-Identifier: Apache-2.0
"""A table as text: what terminal and page show of each cell."""

import dataclasses
import math

from diloco.pages.parts import Cell, Table

NOTHING = '—'


@dataclasses.dataclass(frozen=True)
class ShownColumn:
  """A column that is not hidden.

  Attributes:
    name: its heading.
    texts: of each row; floats rounded, a spread behind ±.
    numeric: whether it is aligned to the right.
  """

  name: str
  texts: tuple[str, ...]
  numeric: bool


def shown(table: Table) -> tuple[ShownColumn, ...]:
  """The columns of a table that are looked at, left to right."""
  places = {column.name: i for i, column in enumerate(table.columns)}
  columns = []
  for i, column in enumerate(table.columns):
    if column.hidden:
      continue
    cells = [row[i] for row in table.rows]
    texts = [text_of(cell, column.digits) for cell in cells]
    if column.spread is not None:
      spreads = [row[places[column.spread]] for row in table.rows]
      texts = _with_spreads(texts, cells, spreads, column.digits)
    numeric = not any(isinstance(cell, str) for cell in cells)
    columns.append(ShownColumn(column.name, tuple(texts), numeric))
  return tuple(columns)


def text_of(cell: Cell, digits: int) -> str:
  """A cell as it is shown; thousands are parted by commas.

  Args:
    cell: of a table.
    digits: decimals of a float.
  """
  if cell is None or cell == '':
    return NOTHING
  if isinstance(cell, str):
    return ' '.join(cell.split())  # On one line.
  if isinstance(cell, int):
    return f'{cell:,}'
  if not math.isfinite(cell):
    return str(cell).replace('inf', '∞')
  rounded = f'{cell:,.{digits}f}'
  return rounded if float(rounded.replace(',', '')) else rounded.lstrip('-')


def _with_spreads(texts, cells, spreads, digits):
  """Appends spreads, as in '88.3 ± 0.4', with the ± aligned in one column."""
  behind = [
    ''
    if spread is None
    else f' ± {text_of(spread, digits)}'
    if _is_number(cell)
    else ''
    for cell, spread in zip(cells, spreads)
  ]
  width = max(map(len, behind), default=0)
  return [
    text + (b.ljust(width) if _is_number(cell) else '')
    for text, b, cell in zip(texts, behind, cells)
  ]


def _is_number(cell: Cell) -> bool:
  return isinstance(cell, int | float)
