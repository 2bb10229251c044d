# SPDX-License-Identifier: Apache-2.0
"""The parts of a report as values; its cells and numbers as text."""

import dataclasses
import math
from collections.abc import Iterable, Iterator

Cell = str | int | float | None  # None: nothing to say, shown as a dash.

# What a lane of a timeline can show, in words,
SPAN_MEANINGS = {
  'step': 'inner steps',
  'pause': 'paused to reconfigure',
  'dead': 'dead',
  'waiting': 'waiting',
  'bootstrap': 'bootstrap',
  'round': 'round',
  'grace': 'grace window',
}
SPAN_KINDS = tuple(SPAN_MEANINGS)
# and what a line of a chart can be.
LINE_KINDS = (
  'simulated',
  'closed form',
  'paper',
  'measured',
  'training',  # A loss, and
  'validation',  # one on held-out text.
  'course',  # What changes over time.
)
NOTHING = '—'
UNITS = ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k'))


@dataclasses.dataclass(frozen=True)
class Column:
  """One column of a table."""

  name: str  # Its heading; also the key in CSV and JSON.
  digits: int = 1  # Decimals of displayed floats; files have all of them.
  # Names the column that is displayed after a ± with this one.
  spread: str | None = None
  # True for a column that is only in files (as spreads usually are).
  hidden: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows of cells under columns."""

  name: str  # Of its CSV file, such as 'goodput'.
  title: str
  columns: tuple[Column, ...]
  rows: tuple[tuple[Cell, ...], ...]
  notes: tuple[str, ...] = ()

  def __post_init__(self):
    for row in self.rows:
      assert len(row) == len(self.columns), f'{self.name}: {row}'


@dataclasses.dataclass(frozen=True)
class Line:
  """Points of one line of a chart; `spreads` are standard deviations."""

  label: str
  kind: str  # One of LINE_KINDS.
  xs: tuple[float, ...]
  ys: tuple[float, ...]
  spreads: tuple[float, ...] = ()
  group: int = 0  # Lines of one group have one colour.


@dataclasses.dataclass(frozen=True)
class Chart:
  """Lines over one pair of axes.

  Attributes:
    moments: (x, group, label): what happened there, in that group's colour.
  """

  name: str  # Of its PNG file.
  title: str
  x_label: str
  y_label: str
  lines: tuple[Line, ...]
  log_x: bool = False
  log_y: bool = False
  x_range: tuple[float, float] | None = None
  y_range: tuple[float, float] | None = None
  moments: tuple[tuple[float, int, str], ...] = ()
  notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TimelineSpan:
  """A state of one lane for a span of time."""

  lane: int
  begin_s: float
  end_s: float
  kind: str  # One of SPAN_KINDS.
  label: str = ''


@dataclasses.dataclass(frozen=True)
class Timeline:
  """Lanes over time, as in a profiler.

  Attributes:
    marks: (time, lane, label): a moment, such as a merge that took this lane
      in; lane -1 is all of them.
  """

  name: str
  title: str
  lanes: tuple[str, ...]
  spans: tuple[TimelineSpan, ...]
  marks: tuple[tuple[float, int, str], ...] = ()
  notes: tuple[str, ...] = ()

  @property
  def limits(self) -> tuple[float, float]:
    """The earliest and the latest time of spans and marks, in seconds."""
    times_s = [s.begin_s for s in self.spans] + [s.end_s for s in self.spans]
    times_s += [at_s for at_s, _, _ in self.marks]
    begin_s, end_s = min(times_s, default=0.0), max(times_s, default=1.0)
    return begin_s, end_s if end_s > begin_s else begin_s + 1.0


@dataclasses.dataclass(frozen=True)
class Intervals:
  """Estimates below each other, each with its interval, and a line at zero.

  Attributes:
    rows: (label, estimate, half of its interval), first on top; None where
      the interval is not known.
  """

  name: str  # Of its PNG file.
  title: str
  x_label: str
  rows: tuple[tuple[str, float, float | None], ...]
  notes: tuple[str, ...] = ()


Picture = Chart | Timeline | Intervals
Part = Table | Picture


@dataclasses.dataclass(frozen=True)
class ReportPage:
  """One page: what was measured, how to repeat it, and the results."""

  name: str  # Of the configuration.
  title: str
  command: str
  paragraphs: tuple[str, ...]  # What is assumed; how to read it.
  parts: tuple[Part, ...]

  def __post_init__(self):
    for kinds in (Table, Picture):  # CSV files, PNG files.
      names = [part.name for part in self.parts if isinstance(part, kinds)]
      assert len(names) == len(set(names)), f'{self.name}: two of {names}'


@dataclasses.dataclass(frozen=True)
class ShownColumn:
  """A column that is not hidden."""

  name: str  # Its heading.
  texts: tuple[str, ...]  # Of each row; floats rounded, a spread behind ±.
  numeric: bool  # Whether it is aligned to the right.


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
  """A cell as it is shown; thousands are parted by commas."""
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


def within(
  spans: Iterable[TimelineSpan], until_s: float
) -> Iterator[TimelineSpan]:
  """Yields the parts of the spans that lie in [0, until_s]."""
  for span in spans:
    begin_s, end_s = max(span.begin_s, 0.0), min(span.end_s, until_s)
    if begin_s < end_s:
      yield dataclasses.replace(span, begin_s=begin_s, end_s=end_s)


def shares_of_kinds(timeline: Timeline) -> dict[str, float]:
  """Each kind's share of all lanes' time, in SPAN_KINDS' order; no zeros."""
  begin_s, end_s = timeline.limits
  whole_s = (end_s - begin_s) * max(1, len(timeline.lanes))
  spent_s = dict.fromkeys(SPAN_KINDS, 0.0)
  for span in timeline.spans:
    spent_s[span.kind] += span.end_s - span.begin_s
  return {kind: s / whole_s for kind, s in spent_s.items() if s}


def alternative(part: Picture) -> str:
  """Returns a description of a picture, as its alternative text."""
  match part:
    case Chart():
      kinds = [k for k in LINE_KINDS if any(x.kind == k for x in part.lines)]
      labels = dict.fromkeys(line.label for line in part.lines)
      said = (
        f'{part.y_label} over {part.x_label}; {", ".join(kinds)}. '
        f'Lines: {", ".join(labels)}.'
      )
    case Intervals():
      rows = '; '.join(
        f'{label} {middle:+.2f}' + ('' if half is None else f' ± {half:.2f}')
        for label, middle, half in part.rows
      )
      said = f'{part.x_label}: {rows}.'
    case Timeline():
      begin_s, end_s = part.limits
      shares = ', '.join(
        f'{SPAN_MEANINGS[kind]} {share:.1%}'
        for kind, share in shares_of_kinds(part).items()
      )
      said = (
        f'{len(part.lanes)} lanes over {duration(end_s - begin_s)}, '
        f'{len(part.spans)} spans. Of the time of all lanes: '
        f'{shares or "nothing"}.'
      )
  return f'{type(part).__name__}: {part.title}. {said}'


def in_thousands(value: float) -> str:
  """A number in at most four digits, with k, M, G or T.

  From 10⁴ on: 2000 stays 2000, as years and steps are written.
  """
  if abs(value) >= 1e4:
    for size, unit in UNITS:
      if abs(value) >= size:
        return f'{value / size:.4g}{unit}'
  return f'{value:.4g}'


def duration(time_s: float) -> str:
  """Seconds as '0.8 s', '3 min 20 s', '2 h 5 min'."""
  if time_s < 120:
    return f'{time_s:.3g} s'
  minutes, seconds = divmod(round(time_s), 60)
  if minutes < 120:
    return f'{minutes} min {seconds} s'
  return f'{minutes // 60} h {minutes % 60} min'
