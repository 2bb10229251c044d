# SPDX-License-Identifier: Apache-2.0
"""Checks what charts and timelines draw, looked at before it becomes pixels."""

import itertools

import numpy as np
import pytest
from matplotlib import colors

from diloco.pages import figures, parts
from diloco.pages.parts import SPAN_KINDS, Chart, Line, Timeline, TimelineSpan
from tests.pages import sample_report


def one_lane(*spans):
  return Timeline(
    't',
    't',
    ('a',),
    tuple(TimelineSpan(0, begin, end, k) for begin, end, k in spans),
  )


def of(timeline, columns, layer):
  found = figures.shares(timeline, columns)
  return found[0, figures.LAYERS.index(layer)].tolist()


def test_a_wide_span_fills_its_columns_and_steps_alternate():
  line = one_lane((0, 2, 'step'), (2, 4, 'step'), (4, 8, 'pause'))
  assert of(line, 4, 'step') == [1, 0, 0, 0]
  assert of(line, 4, 'odd step') == [0, 1, 0, 0]
  assert of(line, 4, 'pause') == [0, 0, 1, 1]


def test_a_border_belongs_to_whoever_has_more_of_its_column():
  line = one_lane((0, 1.6, 'step'), (1.6, 4, 'dead'))
  assert of(line, 4, 'step') == [1, 1, 0, 0]
  assert of(line, 4, 'dead') == [0, 0, 1, 1]


def test_what_is_thinner_than_a_column_keeps_its_share():
  spans = [(i, i + 0.75, 'step') for i in range(100)]
  line = one_lane(*spans, (100, 101, 'pause'), (101, 120, 'waiting'))
  assert of(line, 6, 'pause')[5] == pytest.approx(1 / 20)
  assert of(line, 6, 'step')[0] == pytest.approx(10 * 0.75 / 20)
  assert of(line, 6, 'odd step')[0] == pytest.approx(10 * 0.75 / 20)


def test_overlapping_spans_share_a_column():
  line = one_lane((0, 4, 'round'), (0, 4, 'grace'), (0, 4, 'grace'))
  assert of(line, 2, 'round') == pytest.approx([1 / 3, 1 / 3])
  assert of(line, 2, 'grace') == pytest.approx([2 / 3, 2 / 3])


def test_a_hundred_thousand_spans_are_few_shapes():
  page = figures.draw(sample_report.long_timeline(100_000))
  (axes,) = page.axes
  assert len(axes.get_images()) == 1
  (marks,) = axes.collections
  assert len(marks.get_segments()) <= 4 * (figures.COLUMNS + 1)
  assert len(axes.patches) == 0


def test_empty_timelines_and_charts_are_drawn():
  figures.draw(Timeline('t', 't', (), ()))
  figures.draw(Timeline('t', 't', ('a',), ()))
  figures.draw(Chart('c', 'c', 'x', 'y', ()))
  figures.draw(Chart('c', 'c', 'x', 'y', (Line('l', 'paper', (), ()),), True))


def test_kinds_of_spans_are_told_apart_without_colour_too():
  def lightness(colour):
    return float(np.dot(colors.to_rgb(colour), (0.299, 0.587, 0.114)))

  assert set(SPAN_KINDS) <= figures.SPAN_COLOURS.keys()
  for a, b in itertools.combinations(figures.SPAN_COLOURS, 2):
    x, y = figures.SPAN_COLOURS[a], figures.SPAN_COLOURS[b]
    far = np.linalg.norm(np.subtract(colors.to_rgb(x), colors.to_rgb(y)))
    assert far > 0.2, (a, b)
  for kind in ('pause', 'dead', 'waiting', 'bootstrap'):
    grey = lightness(figures.SPAN_COLOURS[kind])
    assert abs(grey - lightness(figures.SPAN_COLOURS['step'])) > 0.1, kind


def test_each_group_has_one_colour_and_each_kind_its_form():
  page = figures.draw(sample_report.chart())
  drawn = {}
  for line in page.axes[0].get_lines():
    drawn.setdefault(line.get_color(), []).append(line)
  assert list(drawn)[:4] == list(figures.COLOURS[:4])
  forms = [
    (line.get_marker(), line.get_linestyle()) for line in drawn['#0072B2']
  ]
  assert ('o', 'None') in forms  # Simulated and the paper's.
  assert ('None', '-') in forms  # Closed form.
  hollow = [x for x in drawn['#0072B2'] if x.get_markerfacecolor() == 'none']
  assert len(hollow) == 1
  assert [x.get_marker() for x in drawn['#CC79A7']] == ['*']


def test_a_legend_names_labels_once_and_kinds_in_grey():
  page = figures.draw(sample_report.chart())
  texts = [text.get_text() for text in page.legends[0].get_texts()]
  assert texts == [
    'elastic data-parallel', 'M = 4', 'M = 8', 'a real run', '',
    'simulated', 'closed form', 'paper', 'measured',
  ]  # fmt: skip


def test_lines_of_one_group_and_kind_differ():
  lines = tuple(Line(c, 'closed form', (0, 1), (0, 1)) for c in 'abc')
  page = figures.draw(Chart('c', 'c', 'x', 'y', lines))
  dashes = {line.get_linestyle() for line in page.axes[0].get_lines()}
  assert len(dashes) == 3


@pytest.mark.parametrize(
  ('value', 'text'),
  [
    (0.43, '0.43'),
    (0, '0'),
    (2000, '2000'),
    (150_000, '150k'),
    (1_200_000, '1.2M'),
    (5e9, '5G'),
    (3e13, '30T'),
    (-20_000, '-20k'),
  ],
)
def test_numbers_on_axes(value, text):
  assert parts.in_thousands(value) == text


def test_durations():
  assert parts.duration(0.84) == '0.84 s'
  assert parts.duration(200) == '3 min 20 s'
  assert parts.duration(7500) == '2 h 5 min'
