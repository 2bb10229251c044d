# SPDX-License-Identifier: Apache-2.0
"""The parts of a report as values; their appearance is decided elsewhere."""

import dataclasses

Cell = str | int | float | None  # None: nothing to say, shown as a dash.

# What a lane of a timeline can show, and a line of a chart can be.
SPAN_KINDS = ('step', 'pause', 'dead', 'waiting', 'bootstrap', 'round', 'grace')
LINE_KINDS = (
  'simulated',
  'closed form',
  'paper',
  'measured',
  'training',  # A loss, and
  'validation',  # one on held-out text.
  'course',  # What changes over time.
)


@dataclasses.dataclass(frozen=True)
class Column:
  """One column of a table.

  Attributes:
    name: its heading; also the key in CSV and JSON.
    digits: decimals of displayed floats; files have all of them.
    spread: names the column that is displayed after a ± with this one.
    hidden: True for a column that is only in files (as spreads usually are).
  """

  name: str
  digits: int = 1
  spread: str | None = None
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
class Span:
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
  spans: tuple[Span, ...]
  marks: tuple[tuple[float, int, str], ...] = ()
  notes: tuple[str, ...] = ()


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
class Report:
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
