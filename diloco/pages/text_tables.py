# SPDX-License-Identifier: Apache-2.0
"""Tables of text, all of one look."""

import io
from collections.abc import Iterable, Sequence

import rich.box
import rich.console
import rich.table
import rich.text

from diloco.metrics.status import Evaluation, loss_rows

WIDTH = 400  # Columns of text that goes to no terminal: nothing is folded.


def table(
  title: str | None,
  columns: Sequence[str],
  rows: Iterable[Sequence[object]],
  left: int = 1,
  header: bool = True,
  padding: int | tuple[int, ...] = (0, 1, 0, 0),
) -> rich.table.Table:
  """Makes a table, whose first column is never broken into lines.

  Args:
    rows: texts, in which brackets are no markup.
    left: so many columns, the first ones, are flush left, the others right.
    padding: blanks around a cell, besides the box's own.
  """
  view = rich.table.Table(
    title=None if title is None else rich.text.Text(title, style='bold'),
    title_justify='left',
    show_header=header,
    box=rich.box.SIMPLE_HEAD,
    padding=padding,
    show_edge=False,
  )
  for i, name in enumerate(columns):
    view.add_column(
      name,
      justify='left' if i < left else 'right',
      no_wrap=i == 0,
      overflow='ellipsis' if i == 0 else 'fold',
    )
  for row in rows:
    view.add_row(
      *(
        x if isinstance(x, rich.text.Text) else rich.text.Text(str(x))
        for x in row
      )
    )
  return view


def losses(evaluation: Evaluation) -> rich.table.Table:
  """Returns the losses of a model, in nats and bits."""
  token = 'byte' if evaluation.bytes_per_token == 1 else 'token'
  return table(
    'Validation loss of the global model',
    ('', f'nats/{token}', 'bits/byte'),
    [
      (name, f'{nats:.3f}', f'{per_byte:.3f}')
      for name, nats, per_byte in loss_rows(evaluation)
    ],
  )


def plain(view: rich.table.Table) -> str:
  """Returns the table as lines without colours, for files and pipes."""
  out = io.StringIO()
  rich.console.Console(file=out, width=WIDTH, color_system=None).print(view)
  return '\n'.join(line.rstrip() for line in out.getvalue().splitlines())
