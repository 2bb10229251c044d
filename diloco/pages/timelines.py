# SPDX-License-Identifier: Apache-2.0
"""Draws timelines as profilers do: a lane per learner, a block per step.

Where several spans fall into one pixel column, its height is divided among
them by their time: whatever is thin stays visible, in its true share.
"""

import re

import numpy as np
from matplotlib import collections, colors, figure, lines, patches, ticker
from matplotlib.legend_handler import HandlerTuple

from diloco.pages import parts as pages_parts
from diloco.pages import shares
from diloco.pages.parts import Timeline

DPI = 150
COLUMNS = 1400  # Pixels of the lanes' width.
LANE_PIXELS = 40  # From one lane to the next, of up to LANES_HIGH lanes.
LANES_HIGH = 24
LANE_PIXELS_MIN = 8
BAR = (-0.42, 0.22)  # Top and foot of a lane's bar, in lanes, from its middle.
MARK = (0.26, 0.42)  # Those of the marks below it.
LETTER_PIXELS = 12
MARGINS_PIXELS = {'top': 60, 'bottom': 90, 'right': 30}
LEGEND_PIXELS = 28  # Of a row of the legend.
LEGEND_COLUMNS = 6
# Close to Okabe and Ito's palette, which is safe for colour blindness.
COLOURS = {
  'step': '#3B8BC9',
  'odd step': '#86C1EA',
  'pause': '#E69F00',
  'dead': '#2B2B2B',
  'waiting': '#D7D7D7',
  'bootstrap': '#8E3575',
  'round': '#B9A66A',
  'grace': '#009E73',
}
MEANINGS = {
  'step': 'inner steps',
  'pause': 'paused to reconfigure',
  'dead': 'dead',
  'waiting': 'waiting',
  'bootstrap': 'bootstrap',
  'round': 'round',
  'grace': 'grace window',
}
UNITS_S = {'hours': 3600.0, 'minutes': 60.0, 'seconds': 1.0}
MARK_COLOURS = ('#555555', '#B00020', '#4B2E83', '#6B5B00')


def draw(timeline: Timeline) -> figure.Figure:
  """The lanes, first on top, with marks and a legend; save it at `DPI`."""
  lanes = max(1, len(timeline.lanes))
  lane_pixels = max(
    LANE_PIXELS_MIN, LANE_PIXELS * min(lanes, LANES_HIGH) // lanes
  )
  left = 30 + LETTER_PIXELS * max(map(len, timeline.lanes), default=0)
  width = left + COLUMNS + MARGINS_PIXELS['right']
  words_of_legend = len(shares.of_kinds(timeline)) + len(_marks(timeline))
  bottom = MARGINS_PIXELS['bottom'] + LEGEND_PIXELS * -(
    -words_of_legend // LEGEND_COLUMNS
  )
  height = lanes * lane_pixels + MARGINS_PIXELS['top'] + bottom
  page = figure.Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
  axes = page.add_axes(
    (
      left / width,
      bottom / height,
      COLUMNS / width,
      lanes * lane_pixels / height,
    )
  )
  begin_s, end_s = shares.limits(timeline)
  axes.imshow(
    _pixels(timeline, lane_pixels),
    extent=(begin_s, end_s, lanes - 0.5, -0.5),
    aspect='auto',
    interpolation='nearest',
  )
  marks = _draw_marks(axes, timeline)
  _set_axes(axes, timeline, lane_pixels)
  axes.set_title(timeline.title, loc='left', pad=12)
  _add_legend(page, timeline, marks)
  return page


def alternative(timeline: Timeline) -> str:
  """Returns a description of the picture, as its alternative text."""
  begin_s, end_s = shares.limits(timeline)
  parts = [
    f'{MEANINGS[kind]} {share:.1%}'
    for kind, share in shares.of_kinds(timeline).items()
  ]
  return (
    f'Timeline: {timeline.title}. {len(timeline.lanes)} lanes over '
    f'{pages_parts.duration(end_s - begin_s)}, {len(timeline.spans)} spans. '
    'Of the '
    f'time of all lanes: {", ".join(parts) or "nothing"}.'
  )


def _pixels(timeline: Timeline, lane_pixels: int) -> np.ndarray:
  """The lanes as a picture [height, width, rgb], one pixel per column."""
  spent = shares.per_column(timeline, COLUMNS)
  top = round((BAR[0] + 0.5) * lane_pixels)
  bar = max(1, round((BAR[1] - BAR[0]) * lane_pixels))
  picture = np.ones((len(timeline.lanes) or 1, lane_pixels, COLUMNS, 3))
  for lane, of_layers in enumerate(spent):
    picture[lane, top : top + bar] = _bar(of_layers, bar)
  return picture.reshape(-1, COLUMNS, 3)


def _bar(of_layers: np.ndarray, height: int) -> np.ndarray:
  """Returns one lane [height, column, rgb] of stacked shares [layer, column].

  The tints of steps are mixed instead of stacked: otherwise the border between
  two steps would look like a share of something.
  """
  tints = len(shares.TINTS)
  rgb = np.array([colors.to_rgb(COLOURS[layer]) for layer in shares.LAYERS])
  steps = of_layers[:tints].sum(axis=0)
  mixed = of_layers[:tints].T @ rgb[:tints] / np.maximum(steps, 1e-12)[:, None]
  tops = np.cumsum(np.vstack([steps, of_layers[tints:]]), axis=0)
  # The layer in whose part of the stack the middle of each pixel lies.
  middles = (np.arange(height) + 0.5)[::-1, None, None] / height
  layer = (middles > tops[None]).sum(axis=1)  # [height, column]
  palette = np.vstack([rgb[:1], rgb[tints:], [[1.0, 1.0, 1.0]]])
  picture = palette[layer]
  return np.where((layer == 0)[..., None], mixed[None], picture)


def _marks(timeline: Timeline) -> dict[str, set[tuple[int, int]]]:
  """Returns (pixel column, lane) of the marks by kind, one per pixel.

  'merged 17' and 'merged 18' are both 'merged'.
  """
  begin_s, end_s = shares.limits(timeline)
  places = {}
  for at_s, lane, label in timeline.marks:
    word = re.sub(r'[\s\d#]+$', '', label) or 'mark'
    column = round((at_s - begin_s) / (end_s - begin_s) * COLUMNS)
    places.setdefault(word, set()).add((column, lane))
  return places


def _draw_marks(axes, timeline: Timeline) -> dict[str, str]:
  """The colour of each kind of mark."""
  begin_s, end_s = shares.limits(timeline)
  pixel_s = (end_s - begin_s) / COLUMNS
  chosen = {}
  for i, (word, places) in enumerate(_marks(timeline).items()):
    chosen[word] = MARK_COLOURS[i % len(MARK_COLOURS)]
    segments = []
    for column, lane in sorted(places):
      low, high = _extent(lane, len(timeline.lanes))
      at_s = begin_s + column * pixel_s
      segments.append([(at_s, low), (at_s, high)])
    axes.add_collection(
      collections.LineCollection(
        segments, colors=chosen[word], linewidths=0.8, zorder=3
      ),
      autolim=False,
    )
  return chosen


def _extent(lane: int, lanes: int) -> tuple[float, float]:
  """Returns the vertical extent of a mark; lane -1 means all lanes."""
  if lane == -1:
    return -0.5, lanes - 0.5
  return lane + MARK[0], lane + MARK[1]


def _set_axes(axes, timeline: Timeline, lane_pixels: int) -> None:
  begin_s, end_s = shares.limits(timeline)
  unit, size_s = next(
    (unit, size_s)
    for unit, size_s in UNITS_S.items()
    if end_s - begin_s >= 10 * size_s or unit == 'seconds'
  )
  steps = ticker.MaxNLocator(10).tick_values(begin_s / size_s, end_s / size_s)
  ticks = [x for x in steps if begin_s <= x * size_s <= end_s]
  axes.set_xticks([x * size_s for x in ticks], [f'{x:.6g}' for x in ticks])
  axes.set_xlabel(unit)
  every = max(1, -(-20 // lane_pixels))  # A name needs about 20 pixels.
  named = range(0, len(timeline.lanes), every)
  axes.set_yticks(named, [timeline.lanes[i] for i in named])
  axes.tick_params(axis='y', length=0)
  axes.spines[['top', 'right', 'left']].set_visible(False)


def _add_legend(page, timeline: Timeline, marks: dict[str, str]) -> None:
  entries = []
  for kind in shares.of_kinds(timeline):
    patch = patches.Patch(color=COLOURS[kind], label=MEANINGS[kind])
    if kind == 'step':
      odd = patches.Patch(color=COLOURS['odd step'])
      patch = (patch, odd)
    entries.append((patch, MEANINGS[kind]))
  for word, colour in marks.items():
    tick = lines.Line2D(
      [], [], color=colour, marker='|', ls='', markersize=7, mew=1.2
    )
    entries.append((tick, word))
  if entries:
    page.legend(
      [shape for shape, _ in entries],
      [text for _, text in entries],
      handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
      loc='lower center',
      ncols=min(LEGEND_COLUMNS, len(entries)),
      frameon=False,
      fontsize=8.5,
    )
