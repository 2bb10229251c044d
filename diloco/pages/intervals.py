# SPDX-License-Identifier: Apache-2.0
"""Draws estimates with their intervals, as medical studies show them."""

from matplotlib import figure

from diloco.pages.parts import Intervals

WIDTH_INCHES = 9.0
ROW_INCHES = 0.32
MARGIN_INCHES = 1.1  # Title, and numbers under the axis.
COLOURS = {'below': '#009E73', 'above': '#D55E00', 'across': '#333333'}


def draw(intervals: Intervals) -> figure.Figure:
  """A row per estimate; its colour tells on which side of zero it lies."""
  height = MARGIN_INCHES + ROW_INCHES * max(2, len(intervals.rows))
  page = figure.Figure(figsize=(WIDTH_INCHES, height), layout='constrained')
  axes = page.subplots()
  axes.axvline(0.0, color='#777777', lw=1)
  for place, (_, middle, half) in enumerate(intervals.rows):
    axes.errorbar(
      [middle],
      [place],
      xerr=None if half is None else [half],
      color=COLOURS[side(middle, half)],
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


def alternative(intervals: Intervals) -> str:
  """Returns a description of the picture, as its alternative text."""
  rows = '; '.join(
    f'{label} {middle:+.2f}' + ('' if half is None else f' ± {half:.2f}')
    for label, middle, half in intervals.rows
  )
  return f'Intervals: {intervals.title}. {intervals.x_label}: {rows}.'
