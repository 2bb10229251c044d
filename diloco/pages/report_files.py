# SPDX-License-Identifier: Apache-2.0
"""Writes a report into a folder: CSV, JSON, PNG and one page.

The same report gives the same bytes.
"""

import csv
import dataclasses
import io
import json
import pathlib
import tempfile

from diloco.metrics import files
from diloco.pages import page, pictures
from diloco.pages.parts import (
  Chart,
  Intervals,
  Part,
  ReportPage,
  Table,
  Timeline,
)

PAGE = 'page.html'
DATA = 'report.json'


def write(report: ReportPage, folder: pathlib.Path) -> list[pathlib.Path]:
  """Writes all files of a report; pictures as far as they can be drawn.

  Args:
    report: what is written; `pictures.missing` tells what is left out.
    folder: is made where there is none; files of these names are replaced.

  Returns:
    What was written, the page first.

  Raises:
    OSError: the folder can't be written.
  """
  drawn = pictures.draw(report)
  tables = {
    part.name: as_csv(part) for part in report.parts if isinstance(part, Table)
  }
  text = page.of(report, drawn, tables, pictures.missing(report))
  contents = {PAGE: text.encode(), DATA: as_json(report).encode()}
  contents |= {f'{name}.csv': table.encode() for name, table in tables.items()}
  contents |= {f'{name}.png': image for name, image in drawn.items()}
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in contents.items():
    (folder / name).write_bytes(content)
  return [folder / name for name in contents]


def check_writable(folder: pathlib.Path) -> None:
  """Makes the folder, and a file in it that does not stay.

  Raises:
    OSError: one of them can't be made.
  """
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryFile(dir=folder):
    pass


def as_csv(table: Table) -> str:
  """All columns, the hidden ones too, with all digits; None is empty."""
  text = io.StringIO()
  rows = csv.writer(text, lineterminator='\n')
  rows.writerow([column.name for column in table.columns])
  rows.writerows(table.rows)
  return text.getvalue()


def as_json(report: ReportPage) -> str:
  """The whole report as one object, one line per part.

  What JSON has no number for is written as 'inf', '-inf' or 'nan'.
  """
  head = {
    'name': report.name,
    'title': report.title,
    'command': report.command,
    'paragraphs': report.paragraphs,
  }
  lines = [f'"{key}": {_dumped(value)}' for key, value in sorted(head.items())]
  parts = ',\n'.join(_dumped(_as_data(part)) for part in report.parts)
  lines.append(f'"parts": [\n{parts}\n]')
  return '{\n' + ',\n'.join(lines) + '\n}\n'


def _as_data(part: Part) -> dict:
  match part:
    case Table():
      names = [column.name for column in part.columns]
      data = {
        'columns': names,
        'rows': [dict(zip(names, row)) for row in part.rows],
      }
    case Chart() | Intervals():
      data = dataclasses.asdict(part)
    case Timeline():
      data = {
        'lanes': part.lanes,
        'spans': [
          (s.lane, s.begin_s, s.end_s, s.kind, s.label) for s in part.spans
        ],
        'marks': part.marks,
      }
    case _:
      raise TypeError(f'Not a part of a report: {part!r}.')
  common = {'name': part.name, 'title': part.title, 'notes': part.notes}
  return {'part': type(part).__name__.lower(), **common, **data}


def _dumped(value) -> str:
  return json.dumps(
    files.finite(value, instead=str),
    ensure_ascii=False,
    sort_keys=True,
    allow_nan=False,
  )
