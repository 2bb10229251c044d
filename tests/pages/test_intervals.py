# SPDX-License-Identifier: Apache-2.0
"""Intervals below each other; moments, bands and courses of figures."""

import pytest

from diloco.pages import figures, parts, report_files
from diloco.pages.parts import Chart, Intervals, Line, ReportPage

ROWS = (('worse', 2.0, 0.5), ('nobody knows', 1.0, 1.5), ('once', -0.5, None))
PART = Intervals('i', 'Losses', 'difference, %', ROWS)


def chart(moments=(), **line):
  lines = (Line('a', xs=(0.0, 1.0, 2.0), ys=(1.0, 2.0, 3.0), **line),)
  return Chart('c', 'C', 'x', 'y', lines, moments=tuple(moments))


@pytest.mark.parametrize(
  ('middle', 'half', 'side'),
  [
    (2.0, 0.5, 'above'),
    (-2.0, 0.5, 'below'),
    (1.0, 1.5, 'across'),
    (1.0, 1.0, 'across'),
    (-0.5, None, 'across'),
  ],
)
def test_the_side_of_zero_takes_the_whole_interval(middle, half, side):
  assert figures.side(middle, half) == side


def test_the_first_row_is_on_top():
  (axes,) = figures.draw(PART).axes
  assert [t.get_text() for t in axes.get_yticklabels()] == [r[0] for r in ROWS]
  bottom, top = axes.get_ylim()
  assert top < 0 < len(ROWS) - 1 < bottom


def test_its_words_have_its_numbers():
  words = parts.alternative(PART)
  assert 'worse +2.00 ± 0.50' in words
  assert words.endswith('once -0.50.')


def test_intervals_get_a_file_and_stand_in_the_page(tmp_path):
  page, *_ = report_files.write(
    ReportPage('r', 'R', 'again', (), (PART,)), tmp_path
  )
  assert (tmp_path / 'i.png').stat().st_size > 0
  assert 'Intervals: Losses' in page.read_text()


def test_few_moments_have_lines_and_many_only_crosses():
  few = [(0.5, 0, 'dies')]
  many = [(i / 50, 0, 'dies') for i in range(figures.MOMENT_LINES_MAX + 1)]
  (axes,) = figures.draw(chart(few, kind='course')).axes
  assert len(axes.lines) == 1 + 2
  (axes,) = figures.draw(chart(many, kind='course')).axes
  assert len(axes.lines) == 1 + len(many)


def test_moments_of_one_kind_have_one_entry_of_the_legend():
  page = figures.draw(
    chart([(0.5, 0, 'dies'), (0.7, 0, 'dies')], kind='course')
  )
  (legend,) = page.legends
  assert [text.get_text() for text in legend.get_texts()] == ['a', 'dies']


def test_spreads_of_a_validation_are_a_band():
  (axes,) = figures.draw(chart(kind='validation', spreads=(0.1, 0.2, 0.3))).axes
  (band,) = axes.collections
  corners = band.get_paths()[0].vertices
  assert corners[:, 1].min() == pytest.approx(0.9)
  assert corners[:, 1].max() == pytest.approx(3.3)
