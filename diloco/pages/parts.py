# SPDX-License-Identifier: Apache-2.0
"""The parts of a report as values; its cells and numbers as text."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

Cell = str | int | float | None  # None: nothing to say, shown as a dash.

# What a lane of a timeline can show, in words. What comes later is drawn above
# what comes earlier.
SPAN_MEANINGS = {
  'step': 'inner steps',
  'waiting': 'waiting',
  'bootstrap': 'start until first step',
  'pause': 'paused to reconfigure',
  'dead': 'dead',
  'round': 'round, from due to its update',
  'grace': 'its grace window',
}
# Okabe and Ito's palette, safe for colour blindness, without its green: on a
# page that says that all is well, and nothing else.
COLOURS = (
  '#0072B2', '#D55E00', '#CC79A7', '#E69F00', '#56B4E9', '#7B61C4', '#8C564B',
)  # fmt: skip
# By the kind of a span.
SPAN_COLOURS = {
  'step': '#3B8BC9',
  'waiting': '#D7D7D7',
  'bootstrap': '#8E3575',
  'pause': '#E69F00',
  'dead': '#B00020',
  'round': '#C9B77D',
  'grace': '#7A6A2F',
}
NOTHING = '—'
ROUND_LANES_MAX = 4  # Of a timeline; more of its rounds overlap.
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
  # Makes the displayed text of a known value, instead of `digits`.
  format: Callable[[float], str] | None = None


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
  # 'simulated', 'closed form', 'paper', 'measured'; 'training' of a loss,
  # 'validation' of one on held-out text; 'course' of what changes over time.
  kind: str
  xs: tuple[float, ...]
  ys: tuple[float, ...]
  spreads: tuple[float, ...] = ()
  group: int = 0  # Lines of one group have one colour.
  ink: bool = False  # Drawn in the colour of text instead: what matters most.
  dashed: bool = False


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

  @property
  def is_empty(self) -> bool:
    """True if there is nothing to draw: a page leaves such a chart out."""
    return not any(
      math.isfinite(x) and math.isfinite(y)
      for line in self.lines
      for x, y in zip(line.xs, line.ys)
    )


@dataclasses.dataclass(frozen=True)
class TimelineSpan:
  """A state of one lane for a span of time."""

  lane: int
  begin_s: float
  end_s: float
  kind: str  # Of `SPAN_MEANINGS`.
  label: str = ''


@dataclasses.dataclass(frozen=True)
class Timeline:
  """Lanes over time, as in a profiler.

  Attributes:
    marks: (time, lane, label): a moment, such as a merge that took this lane
      in; lane -1 is all of them.
    groups: of each lane, whose colour its steps have, as lines of charts do;
      below 0: grey; empty: all lanes have one colour.
  """

  name: str
  title: str
  lanes: tuple[str, ...]
  spans: tuple[TimelineSpan, ...]
  marks: tuple[tuple[float, int, str], ...] = ()
  notes: tuple[str, ...] = ()
  groups: tuple[int, ...] = ()

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


@dataclasses.dataclass(frozen=True)
class Prose:
  """Paragraphs under a heading of their own."""

  name: str
  title: str
  lines: tuple[str, ...]
  notes: tuple[str, ...] = ()


Part = Table | Chart | Timeline | Intervals | Prose


@dataclasses.dataclass(frozen=True)
class Tile:
  """A figure that is seen first, as text."""

  name: str
  value: str
  note: str = ''
  large: bool = False


@dataclasses.dataclass(frozen=True)
class Badge:
  """The state of a run in a word or two."""

  text: str
  tone: str  # 'good', 'wait' or 'bad': green, amber, red.


@dataclasses.dataclass(frozen=True)
class ReportPage:
  """One page: what was measured, how to repeat it, and the results.

  Attributes:
    where: the folder that it is about.
    problem: what is wrong with what was read, in sentences.
    progress: (done, all) of what is going on; None: no bar.
  """

  name: str  # Of the configuration.
  title: str
  command: str
  paragraphs: tuple[str, ...]  # What is assumed; how to read it.
  parts: tuple[Part, ...]
  where: str = ''
  badge: Badge | None = None
  problem: str = ''
  progress: tuple[float, float] | None = None
  tiles: tuple[Tile, ...] = ()

  def __post_init__(self):
    names = [(type(part), part.name) for part in self.parts]
    assert len(names) == len(set(names)), f'{self.name}: two of {names}'

  def _repr_html_(self) -> str:
    from diloco.pages import page  # It imports this module.

    return page.inline(self)


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
    texts = [_text_of(cell, column) for cell in cells]
    if column.spread is not None:
      spreads = [row[places[column.spread]] for row in table.rows]
      texts = _with_spreads(texts, cells, spreads, column.digits)
    numeric = not any(isinstance(cell, str) for cell in cells)
    columns.append(ShownColumn(column.name, tuple(texts), numeric))
  return tuple(columns)


def _text_of(cell: Cell, column: Column) -> str:
  if column.format is not None and _is_number(cell):
    return column.format(cell)
  return text_of(cell, column.digits)


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


def rounds_of(
  rounds: Iterable[tuple[str, float, float, float, float]], first: int
) -> tuple[int, list[TimelineSpan]]:
  """Returns the number of lanes of the rounds, and their spans.

  Each round takes the first free lane, of at most ROUND_LANES_MAX.

  Args:
    rounds: label, such as 'round 7', then seconds: due, quorum, end of the
      window, update.
    first: the first of their lanes.
  """
  free_s, spans = [], []
  for label, due_s, quorum_s, window_s, update_s in rounds:
    free = (i for i, at_s in enumerate(free_s) if at_s <= due_s)
    lane = next(free, min(len(free_s), ROUND_LANES_MAX - 1))
    free_s[lane : lane + 1] = [update_s]
    place = first + lane
    spans.append(TimelineSpan(place, due_s, quorum_s, 'round', label))
    spans.append(TimelineSpan(place, quorum_s, window_s, 'grace', label))
    spans.append(TimelineSpan(place, window_s, update_s, 'round', label))
  return len(free_s), spans


def in_thousands(value: float) -> str:
  """A number in at most four digits, with k, M, G or T.

  From 10⁴ on: 2000 stays 2000, as years and steps are written.
  """
  if abs(value) >= 1e4:
    for size, unit in UNITS:
      if abs(value) >= size:
        return f'{value / size:.4g}{unit}'
  return f'{value:.4g}'
