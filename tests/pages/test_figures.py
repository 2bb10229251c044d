# SPDX-License-Identifier: Apache-2.0
"""Charts and timelines as notebooks and loss.png show them."""

import pytest

from diloco.pages import figures, parts
from diloco.pages.parts import SPAN_MEANINGS, Chart, Line, Timeline
from tests.pages import sample_report


def test_each_line_of_a_chart_is_drawn_and_named():
  chart = sample_report.chart()
  page = figures.draw(chart)
  (legend,) = page.legends
  texts = {text.get_text() for text in legend.get_texts()}
  assert texts == {f'{line.label}, {line.kind}' for line in chart.lines}
  colours = {line.get_color() for line in page.axes[0].get_lines()}
  assert colours == {*figures.COLOURS[:4]}


def test_the_line_that_matters_most_is_black_and_a_death_is_marked_once():
  line = Line('Θ', 'validation', (0.0, 1.0), (2.0, 1.0), ink=True)
  moments = ((0.2, 1, 'learner-1 dies'), (0.4, 1, 'learner-1 dies'))
  page = figures.draw(Chart('c', 'C', 'x', 'y', (line,), moments=moments))
  assert page.axes[0].get_lines()[0].get_color() == 'black'
  texts = [text.get_text() for text in page.legends[0].get_texts()]
  assert texts == ['Θ, validation', 'learner-1 dies']


def test_every_kind_of_span_has_a_colour_and_a_lane_its_name():
  assert figures.SPAN_COLOURS.keys() == SPAN_MEANINGS.keys()
  timeline = sample_report.timeline()
  page = figures.draw(timeline)
  names = [text.get_text() for text in page.axes[0].get_yticklabels()]
  assert names == list(timeline.lanes)
  kinds = {span.kind for span in timeline.spans}
  texts = {text.get_text() for text in page.legends[0].get_texts()}
  assert texts == {SPAN_MEANINGS[kind] for kind in kinds}


def test_nothing_is_drawn_as_nothing(tmp_path):
  figures.draw(Timeline('t', 't', (), ()))
  figures.save(Chart('c', 'c', 'x', 'y', ()), tmp_path / 'c.png')
  image = (tmp_path / 'c.png').read_bytes()
  assert image.startswith(b'\x89PNG') and b'matplotlib' not in image.lower()


@pytest.mark.parametrize(
  ('value', 'text'),
  [(0.43, '0.43'), (2000, '2000'), (150_000, '150k'), (-20_000, '-20k')],
)
def test_numbers_on_axes(value, text):
  assert parts.in_thousands(value) == text
