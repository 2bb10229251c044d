# SPDX-License-Identifier: Apache-2.0
"""Draws charts and timelines by matplotlib, an extra, for notebooks and PNG.

Pages draw their own. How a line is drawn tells its kind, colour and marker tell
its group, so that no two groups differ in colour alone.
"""

import collections
import pathlib

from matplotlib import figure, ticker

from diloco.pages import parts
from diloco.pages.parts import (
  COLOURS,
  SPAN_COLOURS,
  SPAN_MEANINGS,
  Chart,
  Line,
  Timeline,
)

DPI = 150
SIZE_INCHES = (9.0, 5.0)
LANE_INCHES = 0.3
MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X')
MARKED_MAX = 60  # More points than these hide their line.
# How a line of each kind looks, but for colour and marker.
STYLES = {
  'simulated': {'lw': 0.8, 'ms': 5},
  'closed form': {'lw': 1.3, 'marker': ''},
  'paper': {'ls': '', 'ms': 10, 'mfc': 'none', 'mew': 1.2},
  'measured': {'ls': '', 'ms': 13, 'marker': '*', 'mec': 'black', 'mew': 0.6},
  'training': {'lw': 0.9, 'alpha': 0.45, 'marker': ''},
  'validation': {'lw': 1.6, 'ms': 4},
  'course': {'lw': 1.4, 'marker': ''},
}


def draw(part: Chart | Timeline) -> figure.Figure:
  """Returns a figure with axes, title and legend; save it at `DPI`."""
  return _timeline(part) if isinstance(part, Timeline) else _chart(part)


def save(part: Chart | Timeline, path: pathlib.Path) -> None:
  """Writes a PNG that says neither when nor by what it was drawn."""
  draw(part).savefig(path, dpi=DPI, metadata={'Software': None})


def _chart(chart: Chart) -> figure.Figure:
  page = figure.Figure(figsize=SIZE_INCHES, layout='constrained')
  axes = page.subplots()
  for line in chart.lines:
    _draw_line(axes, line)
  for label, at in _moments(chart).items():
    for i, (x, group) in enumerate(at):
      axes.axvline(
        x,
        color=COLOURS[group % len(COLOURS)],
        ls=':',
        lw=1,
        label=label if i == 0 else None,
      )
  for axis, log, limits, set_scale, set_limits in (
    (axes.xaxis, chart.log_x, chart.x_range, axes.set_xscale, axes.set_xlim),
    (axes.yaxis, chart.log_y, chart.y_range, axes.set_yscale, axes.set_ylim),
  ):
    if log:
      set_scale('log')
    if limits:
      set_limits(*limits)
    axis.set_major_formatter(lambda value, _: parts.in_thousands(value))
    axis.set_minor_formatter(ticker.NullFormatter())
  axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
  axes.set_title(chart.title, loc='left', weight='bold')
  axes.grid(alpha=0.25)
  axes.spines[['top', 'right']].set_visible(False)
  if axes.get_legend_handles_labels()[0]:
    page.legend(loc='outside right upper', frameon=False, fontsize=8.5)
  return page


def _draw_line(axes, line: Line) -> None:
  colour = 'black' if line.ink else COLOURS[line.group % len(COLOURS)]
  style = {'marker': MARKERS[line.group % len(MARKERS)], 'color': colour}
  style |= STYLES[line.kind] | {'label': f'{line.label}, {line.kind}'}
  if line.kind == 'course':
    style['label'] = line.label
  if line.dashed:
    style['ls'] = '--'
  if len(line.xs) > MARKED_MAX:
    style['marker'] = ''
  if line.kind == 'simulated' and line.spreads:
    axes.errorbar(line.xs, line.ys, yerr=line.spreads, capsize=3, **style)
    return
  axes.plot(line.xs, line.ys, zorder=5 if line.ink else 3, **style)
  if line.spreads:
    low, high = (
      [y + sign * spread for y, spread in zip(line.ys, line.spreads)]
      for sign in (-1, 1)
    )
    axes.fill_between(line.xs, low, high, color=colour, alpha=0.15, lw=0)


def _moments(chart: Chart) -> dict[str, list[tuple[float, int]]]:
  moments = collections.defaultdict(list)
  for x, group, label in chart.moments:
    moments[label].append((x, group))
  return moments


def _timeline(timeline: Timeline) -> figure.Figure:
  """A lane per learner, as in a profiler; what is short stays visible."""
  lanes = max(1, len(timeline.lanes))
  height = 1.4 + LANE_INCHES * lanes
  page = figure.Figure(figsize=(SIZE_INCHES[0], height), layout='constrained')
  axes = page.subplots()
  places = collections.defaultdict(list)
  for span in timeline.spans:
    places[span.kind, span.lane].append((span.begin_s, span.end_s))
  labelled = set()
  for kind, meaning in SPAN_MEANINGS.items():
    for (owner, lane), spans in sorted(places.items()):
      if owner == kind:
        axes.broken_barh(
          [(begin_s, end_s - begin_s) for begin_s, end_s in spans],
          (lane - 0.35, 0.6),
          facecolor=SPAN_COLOURS[kind],
          edgecolor='white' if kind == 'step' else SPAN_COLOURS[kind],
          linewidth=0.4,
          label=None if kind in labelled else meaning,
        )
        labelled.add(kind)
  for at_s, lane, _ in timeline.marks:
    low, high = (-0.5, lanes - 0.5) if lane < 0 else (lane + 0.28, lane + 0.45)
    axes.plot([at_s, at_s], [low, high], color='#333333', lw=0.8)
  axes.set(xlim=timeline.limits, ylim=(lanes - 0.4, -0.6), xlabel='seconds')
  axes.set_yticks(range(len(timeline.lanes)), timeline.lanes)
  axes.set_title(timeline.title, loc='left', weight='bold')
  axes.spines[['top', 'right', 'left']].set_visible(False)
  if labelled:
    page.legend(loc='outside lower center', ncols=4, frameon=False, fontsize=8)
  return page
