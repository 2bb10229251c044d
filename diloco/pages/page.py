# SPDX-License-Identifier: Apache-2.0
"""Renders a report as one HTML file that loads nothing else.

The file has the report as JSON in it, and a script that draws it; the same file
can ask a server for newer JSON again and again. A table is also a CSV file.
"""

import csv
import dataclasses
import html
import io
import json
import pathlib
import re
import tempfile

from diloco.metrics import files
from diloco.pages import parts
from diloco.pages.parts import (
  COLOURS,
  SPAN_COLOURS,
  Chart,
  Part,
  ReportPage,
  Table,
  Timeline,
)

TEMPLATE = pathlib.Path(__file__).with_name('page.html')
PAGE = 'page.html'
DATA = 'report.json'
FRAME_PX = 260  # Of a part of a page in a notebook, which scrolls.


def as_data(report: ReportPage) -> dict:
  """Returns the report as JSON has it: `shown` is the text of a table's cells.

  What JSON has no number for is written as 'inf', '-inf' or 'nan'.
  """
  head = _fields(report)
  head['badge'] = report.badge and _fields(report.badge)
  head['tiles'] = list(map(_fields, report.tiles))
  head['parts'] = [
    _as_data(part)
    for part in report.parts
    if not (isinstance(part, Chart) and part.is_empty)
  ]
  return files.finite(head, instead=str)


def _as_data(part: Part) -> dict:
  data = {'part': type(part).__name__.lower(), **_fields(part)}
  match part:
    case Table():
      names = [column.name for column in part.columns]
      shown = parts.shown(part)
      data['columns'] = names
      data['rows'] = [dict(zip(names, row)) for row in part.rows]
      data['shown'] = {
        'columns': [(column.name, column.numeric) for column in shown],
        'rows': list(zip(*(column.texts for column in shown))),
      }
    case Chart():
      data['lines'] = list(map(_fields, part.lines))
    case Timeline():
      data['limits'] = part.limits
      data['spans'] = [
        (s.lane, s.begin_s, s.end_s, s.kind, s.label) for s in part.spans
      ]
  return data


def _fields(value) -> dict:
  """Returns the fields as they are; `dataclasses.asdict` copies each span."""
  return {
    field.name: getattr(value, field.name)
    for field in dataclasses.fields(value)
  }


def as_json(report: ReportPage) -> str:
  """Returns the report as compact JSON; the same report gives the same text."""
  return json.dumps(
    as_data(report), separators=(',', ':'), ensure_ascii=False, allow_nan=False
  )


def render(report: ReportPage, every_s: float | None = None) -> str:
  """Returns the page.

  Args:
    every_s: how often it asks its server for `data.json`; None: never.
  """
  filled = {
    'title': html.escape(report.title),
    'light': _variables(str),
    'dark': _variables(_lighter),
    'colours': str(len(COLOURS)),
    'meanings': json.dumps(parts.SPAN_MEANINGS),
    'every_ms': str(round(1000 * every_s) if every_s else 0),
    # '</script>' in a name must not end the element.
    'data': as_json(report).replace('<', '\\u003c'),
  }
  text = TEMPLATE.read_text(encoding='utf-8')
  return re.sub(r'{{(\w+)}}', lambda mark: filled[mark[1]], text)


def inline(report: ReportPage) -> str:
  """Returns the page as an element of another one, such as a notebook."""
  text = html.escape(render(report), quote=True)
  high = FRAME_PX * min(len(report.parts) + 1, 3)
  style = f'border: 0; height: {high}px; width: 100%'
  return f'<iframe srcdoc="{text}" style="{style}"></iframe>'


def _variables(shade) -> str:
  """Returns the colours of lines and spans as CSS variables."""
  variables = {f'--c{i}': colour for i, colour in enumerate(COLOURS)}
  variables |= {f'--{kind}': colour for kind, colour in SPAN_COLOURS.items()}
  return ' '.join(f'{name}: {shade(each)};' for name, each in variables.items())


def _lighter(colour: str, share: float = 0.35) -> str:
  """Mixes a colour with white, for a dark page."""
  channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
  mixed = (round(each + share * (255 - each)) for each in channels)
  return '#' + ''.join(f'{each:02x}' for each in mixed)


def as_csv(table: Table) -> str:
  """All columns, the hidden ones too, with all digits; None is empty."""
  text = io.StringIO()
  rows = csv.writer(text, lineterminator='\n')
  rows.writerow([column.name for column in table.columns])
  rows.writerows(table.rows)
  return text.getvalue()


def write(report: ReportPage, folder: pathlib.Path) -> list[pathlib.Path]:
  """Writes the page, its JSON and each table as CSV; returns the page first.

  Raises:
    OSError: the folder can't be written.
  """
  texts = {PAGE: render(report), DATA: as_json(report)}
  for part in report.parts:
    if isinstance(part, Table):
      texts[f'{part.name}.csv'] = as_csv(part)
  folder.mkdir(parents=True, exist_ok=True)
  for name, text in texts.items():
    (folder / name).write_bytes(text.encode())
  return [folder / name for name in texts]


def check_writable(folder: pathlib.Path) -> None:
  """Makes the folder, and a file in it that does not stay.

  Raises:
    OSError: one of them can't be made.
  """
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryFile(dir=folder):
    pass
