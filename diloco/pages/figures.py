# SPDX-License-Identifier: Apache-2.0
"""Draws charts, intervals and timelines; imports matplotlib, which is an extra.

Charts: how a line is drawn tells its kind, colour and marker tell its group, so
that no two groups differ in colour alone. Timelines: a lane per learner, as
profilers show them; where several spans fall into one pixel column, its height
is divided among them by their time, so that whatever is thin stays visible.
"""

import collections
import itertools
import math
import re

import numpy as np
from matplotlib import colors, figure, lines, patches, ticker
from matplotlib.collections import LineCollection
from matplotlib.legend_handler import HandlerTuple

from diloco.pages import parts
from diloco.pages.colours import COLOURS, SPAN_COLOURS
from diloco.pages.parts import (
  LINE_KINDS,
  SPAN_KINDS,
  SPAN_MEANINGS,
  Chart,
  Intervals,
  Line,
  Picture,
  Timeline,
)

DPI = 150
SIZE_INCHES = (9.0, 5.0)
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '<', '>')
DASHES = ('-', '--', ':', '-.')
GREY = '#666666'
MOMENT_ROW = 0.035  # Of the height of the axes.
MOMENT_LINES_MAX = 12  # More of them hide what they mark.
TICKS_MAX = 9  # Of a logarithmic axis, one under each x that there is.
ROW_INCHES = 0.32  # Of an estimate and its interval.
SIDES = {'below': '#009E73', 'above': '#D55E00', 'across': '#333333'}
COLUMNS = 1400  # Pixels of a timeline's width.
LANES_HIGH = 24  # Up to so many lanes have
LANE_PIXELS = 40  # pixels each; of more, all together have as many, but
LANE_PIXELS_MIN = 8
BAR = (-0.42, 0.22)  # Top and foot of a lane's bar, in lanes, from its middle.
MARK = (0.26, 0.42)  # Those of the marks below it.
LETTER_PIXELS = 12
LEGEND_PIXELS = 28  # Of a row of the legend.
LEGEND_COLUMNS = 6
ROUNDING = 1e-6  # Of sums of shares.
LAYERS = ('step', 'odd step', *SPAN_KINDS[1:])
MARK_COLOURS = ('#555555', '#B00020', '#4B2E83', '#6B5B00')
UNITS_S = {'hours': 3600.0, 'minutes': 60.0, 'seconds': 1.0}


def draw(part: Picture) -> figure.Figure:
  """Returns a figure with axes, title and legends; save it at `DPI`."""
  match part:
    case Chart():
      return _chart(part)
    case Intervals():
      return _intervals(part)
    case Timeline():
      return _timeline(part)
  raise TypeError(f'not a picture: {part!r}')


# Charts -----------------------------------------------------------------------


def _chart(chart: Chart) -> figure.Figure:
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
  points = {
    'marker': MARKERS[(line.group + place) % len(MARKERS)],
    'ls': '',
    'ms': 5,
  }
  dashes = DASHES[(line.group // len(COLOURS) + place) % len(DASHES)]
  styles = {
    'simulated': points,
    'closed form': {'ls': dashes, 'lw': 1.3},
    'paper': points | {'ms': 10, 'mfc': 'none', 'mew': 1.2},
    'measured': points | {'marker': '*', 'ms': 13, 'mec': 'black', 'mew': 0.6},
    'training': {'ls': DASHES[place % len(DASHES)], 'lw': 1.0},
    'validation': points
    | {'ls': dashes, 'lw': 1.3, 'mec': 'white', 'mew': 0.5},
    'course': {'ls': dashes, 'lw': 1.4},
  }
  found = styles[line.kind] | {'color': COLOURS[line.group % len(COLOURS)]}
  if line.kind == 'validation' and len(line.xs) == 2:
    found['ls'] = ''  # Begin and end alone say nothing of the way between them.
  return found


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


# Intervals --------------------------------------------------------------------


def _intervals(intervals: Intervals) -> figure.Figure:
  """A row per estimate; its colour tells on which side of zero it lies."""
  height = 1.1 + ROW_INCHES * max(2, len(intervals.rows))
  page = figure.Figure(figsize=(SIZE_INCHES[0], height), layout='constrained')
  axes = page.subplots()
  axes.axvline(0.0, color='#777777', lw=1)
  for place, (_, middle, half) in enumerate(intervals.rows):
    axes.errorbar(
      [middle],
      [place],
      xerr=None if half is None else [half],
      color=SIDES[side(middle, half)],
      marker='o' if half is not None else 'x',
      ms=6,
      capsize=4,
      elinewidth=1.6,
    )
  axes.set_yticks(
    range(len(intervals.rows)), [label for label, *_ in intervals.rows]
  )
  axes.set_ylim(max(1, len(intervals.rows) - 1) + 0.6, -0.6)
  axes.set_xlabel(intervals.x_label)
  axes.set_title(intervals.title, loc='left')
  axes.grid(axis='x', alpha=0.25)
  axes.tick_params(axis='y', length=0)
  axes.spines[['top', 'right', 'left']].set_visible(False)
  return page


def side(middle: float, half: float | None) -> str:
  """Returns the side of zero of the interval: 'below', 'above' or 'across'."""
  if half is None or middle - half <= 0.0 <= middle + half:
    return 'across'
  return 'below' if middle < 0 else 'above'


# Timelines --------------------------------------------------------------------


def _timeline(timeline: Timeline) -> figure.Figure:
  lanes = max(1, len(timeline.lanes))
  high = max(LANE_PIXELS_MIN, LANE_PIXELS * min(lanes, LANES_HIGH) // lanes)
  marks, kinds = _marks(timeline), parts.shares_of_kinds(timeline)
  left = 30 + LETTER_PIXELS * max(map(len, timeline.lanes), default=0)
  foot = 90 + LEGEND_PIXELS * -(-(len(kinds) + len(marks)) // LEGEND_COLUMNS)
  width, height = left + COLUMNS + 30, lanes * high + 60 + foot
  page = figure.Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
  axes = page.add_axes(
    (left / width, foot / height, COLUMNS / width, lanes * high / height)
  )
  axes.imshow(
    _pixels(timeline, high),
    extent=(*timeline.limits, lanes - 0.5, -0.5),
    aspect='auto',
    interpolation='nearest',
  )
  begin_s, end_s = timeline.limits
  for colour, places in zip(itertools.cycle(MARK_COLOURS), marks.values()):
    segments = []
    for column, lane in sorted(places):
      at_s = begin_s + column / COLUMNS * (end_s - begin_s)
      low, top = lane + MARK[0], lane + MARK[1]
      if lane == -1:  # All of them.
        low, top = -0.5, lanes - 0.5
      segments.append([(at_s, low), (at_s, top)])
    axes.add_collection(
      LineCollection(segments, colors=colour, linewidths=0.8, zorder=3),
      autolim=False,
    )
  _set_time_axes(axes, timeline, high)
  axes.set_title(timeline.title, loc='left', pad=12)
  _add_span_legend(page, kinds, marks)
  return page


def shares(timeline: Timeline, columns: int) -> np.ndarray:
  """Returns the share of each column's time that a lane spends on each layer.

  Args:
    timeline: with spans in any order; those of a lane may overlap.
    columns: number of columns of equal width, over the whole timeline.

  Returns:
    Shares [lane, layer, column] in LAYERS' order; for a lane and column they
    sum to at most 1, even if spans overlap. A column with one border, or none,
    belongs to one layer, or to none.
  """
  spans = collections.defaultdict(list)
  steps = collections.Counter()
  for span in sorted(timeline.spans, key=lambda s: (s.lane, s.begin_s)):
    layer = LAYERS.index(span.kind)
    if span.kind == 'step':
      layer = steps[span.lane] % 2
      steps[span.lane] += 1
    spans[span.lane, layer].append((span.begin_s, span.end_s))
  edges_s = np.linspace(*timeline.limits, columns + 1)
  found = np.zeros((len(timeline.lanes), len(LAYERS), columns))
  for place, each in spans.items():
    # The integral of the number of open spans, up to each edge.
    times_s = np.ravel(each)
    order = np.argsort(times_s, kind='stable')
    times_s = times_s[order]
    still_open = np.cumsum(np.tile([1.0, -1.0], len(each))[order])
    covered_s = np.cumsum(still_open[:-1] * np.diff(times_s))
    covered_s = np.interp(edges_s, times_s, np.append(0.0, covered_s))
    found[place] = np.diff(covered_s) / np.diff(edges_s)
  crowded = found.sum(axis=1)  # [lane, column]
  found /= np.maximum(crowded[:, None], 1.0)
  for lane, of_layers in enumerate(found):
    own = [each for (place, _), each in spans.items() if place == lane]
    borders_s = np.unique(np.concatenate([[], *map(np.ravel, own)]))
    plain = np.histogram(borders_s, edges_s)[0] <= 1
    plain &= crowded[lane] < 1.0 + ROUNDING
    blank = 1.0 - of_layers.sum(axis=0, keepdims=True)
    most = np.vstack([of_layers, blank])[:, plain].argmax(axis=0)
    of_layers[:, plain] = np.arange(len(LAYERS))[:, None] == most
  return found


def _pixels(timeline: Timeline, high: int) -> np.ndarray:
  """The lanes as a picture [height, width, rgb], one pixel per column.

  The tints of steps are mixed instead of stacked: otherwise the border between
  two steps would look like a share of something.
  """
  top = round((BAR[0] + 0.5) * high)
  bar = max(1, round((BAR[1] - BAR[0]) * high))
  picture = np.ones((max(1, len(timeline.lanes)), high, COLUMNS, 3))
  rgb = np.array([colors.to_rgb(SPAN_COLOURS[layer]) for layer in LAYERS])
  palette = np.vstack([rgb[1:], [[1.0, 1.0, 1.0]]])
  middles = (np.arange(bar) + 0.5)[::-1, None, None] / bar
  for lane, spent in enumerate(shares(timeline, COLUMNS)):  # [layer, column]
    steps = spent[:2].sum(axis=0)
    mixed = spent[:2].T @ rgb[:2] / np.maximum(steps, 1e-12)[:, None]
    tops = np.cumsum(np.vstack([steps, spent[2:]]), axis=0)
    # The layer in whose part of the stack the middle of each pixel lies.
    layer = (middles > tops).sum(axis=1)  # [height, column]
    picture[lane, top : top + bar] = np.where(
      (layer == 0)[..., None], mixed, palette[layer]
    )
  return picture.reshape(-1, COLUMNS, 3)


def _marks(timeline: Timeline) -> dict[str, set[tuple[int, int]]]:
  """Returns (pixel column, lane) of the marks by kind, one per pixel.

  'merged 17' and 'merged 18' are both 'merged'.
  """
  begin_s, end_s = timeline.limits
  places = {}
  for at_s, lane, label in timeline.marks:
    word = re.sub(r'[\s\d#]+$', '', label) or 'mark'
    column = round((at_s - begin_s) / (end_s - begin_s) * COLUMNS)
    places.setdefault(word, set()).add((column, lane))
  return places


def _set_time_axes(axes, timeline: Timeline, high: int) -> None:
  begin_s, end_s = timeline.limits
  unit, size_s = next(
    (unit, size_s)
    for unit, size_s in UNITS_S.items()
    if end_s - begin_s >= 10 * size_s or unit == 'seconds'
  )
  steps = ticker.MaxNLocator(10).tick_values(begin_s / size_s, end_s / size_s)
  ticks = [x for x in steps if begin_s <= x * size_s <= end_s]
  axes.set_xticks([x * size_s for x in ticks], [f'{x:.6g}' for x in ticks])
  axes.set_xlabel(unit)
  every = max(1, -(-20 // high))  # A name needs about 20 pixels.
  named = range(0, len(timeline.lanes), every)
  axes.set_yticks(named, [timeline.lanes[i] for i in named])
  axes.tick_params(axis='y', length=0)
  axes.spines[['top', 'right', 'left']].set_visible(False)


def _add_span_legend(page, kinds, marks) -> None:
  entries = {}
  for kind in kinds:
    layers = LAYERS[:2] if kind == 'step' else (kind,)
    entries[SPAN_MEANINGS[kind]] = tuple(
      patches.Patch(color=SPAN_COLOURS[layer]) for layer in layers
    )
  for word, colour in zip(marks, itertools.cycle(MARK_COLOURS)):
    entries[word] = lines.Line2D(
      [], [], color=colour, marker='|', ls='', markersize=7, mew=1.2
    )
  if entries:
    page.legend(
      [*entries.values()],
      [*entries],
      handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
      loc='lower center',
      ncols=min(LEGEND_COLUMNS, len(entries)),
      frameon=False,
      fontsize=8.5,
    )
