# SPDX-License-Identifier: Apache-2.0
"""Draws charts: simulated points, closed forms, the paper's, measured ones.

How a line is drawn tells its kind, colour and marker tell its group: no two
groups differ in colour alone. Imports matplotlib, which is an extra.
"""

import collections
import itertools
import math

from matplotlib import figure, lines, ticker

from diloco.pages import parts
from diloco.pages.parts import LINE_KINDS, Chart, Line

SIZE_INCHES = (9.0, 5.0)
# Okabe and Ito's palette: safe for colour blindness; markers help in grey.
COLOURS = (
  '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#333333',
)  # fmt: skip
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '<', '>')
DASHES = ('-', '--', ':', '-.')
GREY = '#666666'
MOMENT_ROW = 0.035  # Of the height of the axes.
MOMENT_LINES_MAX = 12  # More of them hide what they mark.
TICKS_MAX = 9  # Of a logarithmic axis, one under each x that there is.


def draw(chart: Chart) -> figure.Figure:
  """A chart with its legends; lines of one group have one colour."""
  page = figure.Figure(figsize=SIZE_INCHES, layout='constrained')
  axes = page.subplots()
  computed = {line.group for line in chart.lines if line.kind == 'closed form'}
  for line, place in _placed(chart):
    _draw_line(axes, line, place, joined=line.group not in computed)
  _draw_moments(axes, chart)
  axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
  axes.set_title(chart.title, loc='left')
  _set_axes(axes, chart)
  _add_legends(page, axes, chart)
  return page


def alternative(chart: Chart) -> str:
  """Returns a description of the picture, as its alternative text."""
  kinds = [k for k in LINE_KINDS if any(x.kind == k for x in chart.lines)]
  labels = dict.fromkeys(line.label for line in chart.lines)
  return (
    f'Chart: {chart.title}. {chart.y_label} over {chart.x_label}; '
    f'{", ".join(kinds)}. Lines: {", ".join(labels)}.'
  )


def _placed(chart: Chart):
  """Each line with its place among those of its group and kind."""
  seen = collections.Counter()
  for line in chart.lines:
    yield line, seen[line.group, line.kind]
    seen[line.group, line.kind] += 1


def _draw_line(axes, line: Line, place: int, joined: bool) -> None:
  style = _style(line, place)
  if line.kind == 'simulated':
    if joined and len(line.xs) > 1:
      axes.plot(line.xs, line.ys, color=style['color'], lw=0.8, alpha=0.4)
    axes.errorbar(
      line.xs,
      line.ys,
      yerr=line.spreads or None,
      capsize=3,
      elinewidth=1,
      zorder=3,
      **style,
    )
  else:
    axes.plot(line.xs, line.ys, zorder=4, **style)
    if line.spreads:
      low, high = (
        [y + sign * spread for y, spread in zip(line.ys, line.spreads)]
        for sign in (-1, 1)
      )
      axes.fill_between(
        line.xs, low, high, color=style['color'], alpha=0.15, lw=0
      )


def _style(line: Line, place: int) -> dict:
  """Returns a line's style; `place` separates lines of one group and kind."""
  colour = COLOURS[line.group % len(COLOURS)]
  marker = MARKERS[(line.group + place) % len(MARKERS)]
  return {
    'simulated': {'color': colour, 'marker': marker, 'ls': '', 'ms': 5},
    'closed form': {
      'color': colour,
      'ls': DASHES[(line.group // len(COLOURS) + place) % len(DASHES)],
      'lw': 1.3,
    },
    'paper': {
      'color': colour,
      'marker': marker,
      'ls': '',
      'ms': 10,
      'mfc': 'none',
      'mew': 1.2,
    },
    'measured': {
      'color': colour,
      'marker': '*',
      'ls': '',
      'ms': 13,
      'mec': 'black',
      'mew': 0.6,
    },
    'training': {'color': colour, 'ls': DASHES[place % len(DASHES)], 'lw': 1.0},
    'validation': {
      'color': colour,
      'marker': marker,
      # Begin and end alone say nothing of the way between them.
      'ls': DASHES[(line.group // len(COLOURS) + place) % len(DASHES)]
      if len(line.xs) != 2
      else '',
      'lw': 1.3,
      'ms': 5,
      'mec': 'white',
      'mew': 0.5,
    },
    'course': {
      'color': colour,
      'ls': DASHES[(line.group // len(COLOURS) + place) % len(DASHES)],
      'lw': 1.4,
    },
  }[line.kind]


def _draw_moments(axes, chart: Chart) -> None:
  """Crosses along the top, those of a group at one height.

  Each with a line down to the axis, if there are few.
  """
  across = axes.get_xaxis_transform()  # x of the data, y of the axes.
  groups = sorted({group for _, group, _ in chart.moments})
  for x, group, _ in chart.moments:
    style = _moment_style(group)
    y = 1.0 - MOMENT_ROW * (0.5 + groups.index(group))
    axes.plot([x], [y], transform=across, zorder=5, **style)
    if len(chart.moments) <= MOMENT_LINES_MAX:
      axes.axvline(x, color=style['color'], ls=':', lw=0.9, alpha=0.7)


def _moment_style(group: int) -> dict:
  colour = COLOURS[group % len(COLOURS)]
  return {'color': colour, 'marker': 'x', 'ls': '', 'ms': 5, 'mew': 1.2}


def _set_axes(axes, chart: Chart) -> None:
  axes.grid(alpha=0.25)
  axes.spines[['top', 'right']].set_visible(False)
  if chart.x_range:
    axes.set_xlim(*chart.x_range)
  if chart.y_range:
    axes.set_ylim(*chart.y_range)
  for axis, log, set_scale in (
    (axes.xaxis, chart.log_x, axes.set_xscale),
    (axes.yaxis, chart.log_y, axes.set_yscale),
  ):
    if log:
      set_scale('log')
    axis.set_major_formatter(lambda value, _: parts.in_thousands(value))
    axis.set_minor_formatter(ticker.NullFormatter())
  points = [line for line in chart.lines if line.kind != 'closed form']
  xs = sorted({x for line in points or chart.lines for x in line.xs})
  if chart.log_x and 0 < len(xs) <= TICKS_MAX and _apart(xs):
    axes.xaxis.set_major_locator(ticker.FixedLocator(xs))
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def _apart(xs: list[float]) -> bool:
  """Returns True if numbers fit under all xs of a logarithmic axis."""
  whole = math.log(xs[-1] / xs[0]) or 1.0
  return all(math.log(b / a) > whole / 14 for a, b in itertools.pairwise(xs))


def _add_legends(page, axes, chart: Chart) -> None:
  """Adds one entry per label in its colour; kinds in grey, if several."""
  labels, kinds = {}, {}
  for line, place in _placed(chart):
    labels.setdefault((line.group, line.label), []).append((line, place))
    kinds.setdefault(line.kind, line)
  entries = []
  for (group, label), several in labels.items():
    if len(several) == 1:
      style = _style(*several[0])
    else:
      colour = COLOURS[group % len(COLOURS)]
      marker = MARKERS[group % len(MARKERS)]
      style = {'color': colour, 'marker': marker, 'ms': 5, 'lw': 1.3}
    entries.append(lines.Line2D([], [], label=label, **style))
  moments = {(label, group): None for _, group, label in chart.moments}
  for label, group in moments:
    style = _moment_style(group)
    entries.append(lines.Line2D([], [], label=label, **style))
  if len(kinds) > 1:
    entries.append(lines.Line2D([], [], ls='', label=''))
    for kind in LINE_KINDS:
      if kind in kinds:
        style = _style(Line(kind, kind, (), ()), 0) | {'color': GREY}
        entries.append(lines.Line2D([], [], label=kind, **style))
  if entries:
    page.legend(
      handles=entries, loc='outside right upper', frameon=False, fontsize=8.5
    )
