# SPDX-License-Identifier: Apache-2.0
"""Renders a report as one self-contained HTML file.

Pictures and CSV are embedded; there is no script, and nothing is loaded. All
text of the report is escaped.
"""

import base64
import html
from collections.abc import Iterator, Mapping

from diloco.pages import parts
from diloco.pages.parts import Part, Picture, ReportPage, Table

STYLE = """
:root {
  --paper: #ffffff; --ink: #1d2127; --faint: #5d6672; --line: #d8dce2;
  --stripe: #f5f6f8; --link: #0b5cad; --warn: #fff3d6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --ink: #e4e7eb; --faint: #9aa4b1; --line: #363c45;
    --stripe: #1c2026; --link: #7ab8f5; --warn: #43350c;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body {
  margin: 0 auto; max-width: 72rem; padding: 1.5rem clamp(0.8rem, 3vw, 2rem);
  background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 0.8rem; }
h2 { font-size: 1.15rem; margin: 0 0 0.7rem; }
header p { max-width: 46rem; margin: 0.5rem 0; }
a { color: var(--link); }
pre {
  background: var(--stripe); border: 1px solid var(--line);
  border-radius: 6px; margin: 0.4rem 0; overflow-x: auto;
  padding: 0.6rem 0.8rem;
}
code { font: 0.88rem/1.5 ui-monospace, monospace; }
nav { border-bottom: 1px solid var(--line); margin: 1.2rem 0 0; }
nav ol { columns: 22rem; margin: 0 0 1rem; padding-left: 1.4rem; }
section { margin: 2.2rem 0; scroll-margin-top: 1rem; }
.scroll { border: 1px solid var(--line); border-radius: 6px; overflow-x: auto; }
table {
  border-collapse: collapse; font-variant-numeric: tabular-nums;
  font-size: 0.92rem; width: 100%;
}
th, td { padding: 0.35rem 0.55rem; text-align: left; white-space: nowrap; }
thead th {
  border-bottom: 2px solid var(--line); color: var(--faint);
  font-weight: 600; vertical-align: bottom; white-space: normal;
}
tbody th { font-weight: 500; }
tbody tr:nth-child(even) { background: var(--stripe); }
.number { text-align: right; white-space: pre; }
thead .number { white-space: normal; }
figure {
  background: #ffffff; border: 1px solid var(--line); border-radius: 6px;
  margin: 0; overflow-x: auto; padding: 0.5rem;
}
img { display: block; height: auto; margin: 0 auto; max-width: 100%; }
figure.chart img, figure.intervals img {
  max-width: none; min-width: 34rem; width: min(100%, 48rem);
}
@media (prefers-color-scheme: dark) { /* Ink on paper, with its hues. */
  figure { background: var(--paper); }
  figure img { filter: invert(0.92) hue-rotate(180deg); }
}
figure.timeline img { max-width: none; min-width: 44rem; width: 100%; }
.notes { color: var(--faint); font-size: 0.9rem; margin: 0.7rem 0 0; }
.save { font-size: 0.85rem; margin: 0.4rem 0 0; }
.missing { background: var(--warn); border-radius: 6px; padding: 0.6rem; }
@media print { nav, .save { display: none; } section { break-inside: avoid; } }
"""


def of(
  report: ReportPage,
  pictures: Mapping[str, bytes],
  tables: Mapping[str, str],
  missing: str | None,
) -> str:
  """The page.

  Args:
    pictures: PNG by the name of a part; those that are not there are named.
    tables: CSV by the name of a part, to be saved from the page.
  """
  return '\n'.join(
    [
      '<!doctype html>',
      '<html lang="en">',
      '<head>',
      '<meta charset="utf-8">',
      '<meta name="viewport" content="width=device-width, initial-scale=1">',
      '<meta name="color-scheme" content="light dark">',
      f'<title>{_text(report.title)}</title>',
      f'<style>{STYLE}</style>',
      '</head>',
      '<body>',
      '<header>',
      f'<h1>{_text(report.title)}</h1>',
      *(f'<p>{_text(paragraph)}</p>' for paragraph in report.paragraphs),
      '<p>To get this page again:</p>',
      f'<pre><code>{_text(report.command)}</code></pre>',
      *([f'<p class="missing">{_text(missing)}</p>'] if missing else []),
      '</header>',
      *_contents(report),
      '<main>',
      *(
        line
        for part in report.parts
        for line in _section(part, pictures, tables)
      ),
      '</main>',
      '</body>',
      '</html>',
      '',
    ]
  )


def _contents(report: ReportPage) -> Iterator[str]:
  yield '<nav aria-label="Contents">'
  yield '<ol>'
  for part in report.parts:
    yield f'<li><a href="#{_anchor(part)}">{_text(part.title)}</a></li>'
  yield '</ol>'
  yield '</nav>'


def _section(
  part: Part, pictures: Mapping[str, bytes], tables: Mapping[str, str]
) -> Iterator[str]:
  yield f'<section id="{_anchor(part)}">'
  yield f'<h2>{_text(part.title)}</h2>'
  if isinstance(part, Table):
    yield from _table(part, tables[part.name])
  elif part.name in pictures:
    yield from _picture(part, pictures[part.name])
  else:
    yield f'<p class="missing">{_text(part.name)}.png was not drawn.</p>'
  if part.notes:
    yield '<ul class="notes">'
    yield from (f'<li>{_text(note)}</li>' for note in part.notes)
    yield '</ul>'
  yield '</section>'


def _table(table: Table, csv: str) -> Iterator[str]:
  columns = parts.shown(table)
  kinds = [' class="number"' if column.numeric else '' for column in columns]
  title = _text(table.title)
  # Reached by the keyboard too, where it has to be scrolled.
  yield f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">'
  yield '<table>'
  yield (
    '<thead><tr>'
    + ''.join(
      f'<th scope="col"{kind}>{_text(column.name)}</th>'
      for column, kind in zip(columns, kinds)
    )
    + '</tr></thead>'
  )
  yield '<tbody>'
  for first, *others in zip(*(column.texts for column in columns)):
    yield (
      f'<tr><th scope="row"{kinds[0]}>{_text(first)}</th>'
      + ''.join(
        f'<td{kind}>{_text(text)}</td>' for text, kind in zip(others, kinds[1:])
      )
      + '</tr>'
    )
  yield '</tbody>'
  yield '</table>'
  yield '</div>'
  yield (
    f'<p class="save"><a download="{_text(table.name)}.csv" '
    f'href="data:text/csv;base64,{base64.b64encode(csv.encode()).decode()}">'
    f'{_text(table.name)}.csv</a>, with all digits</p>'
  )


def _picture(part: Picture, image: bytes) -> Iterator[str]:
  yield f'<figure class="{type(part).__name__.lower()}">'
  yield (
    f'<img alt="{_text(parts.alternative(part))}" '
    f'src="data:image/png;base64,{base64.b64encode(image).decode()}">'
  )
  yield '</figure>'


def _anchor(part: Part) -> str:
  return f'{type(part).__name__.lower()}-{_text(part.name)}'


def _text(text: str) -> str:
  return html.escape(text, quote=True)
