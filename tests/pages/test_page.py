# SPDX-License-Identifier: Apache-2.0
"""The HTML page: alone in the world, escaped, and with words for pictures."""

import html.parser
import re

import pytest

from diloco.pages import page, report_files
from tests.pages import sample_report

VOID = {'meta', 'img', 'br', 'link', 'input', 'hr'}


class Parsed(html.parser.HTMLParser):
  """Elements with their attributes, and all text."""

  def __init__(self, text):
    super().__init__()
    self.elements = []
    self.texts = []
    self._open = []
    self.feed(text)
    self.close()
    assert self._open == [], 'not closed'

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))
    if tag not in VOID:
      self._open.append(tag)

  def handle_endtag(self, tag):
    assert self._open.pop() == tag

  def handle_data(self, data):
    self.texts.append(data)

  def all(self, wanted):
    return [attrs for tag, attrs in self.elements if tag == wanted]


@pytest.fixture(scope='module')
def parsed(tmp_path_factory):
  written = report_files.write(
    sample_report.report(), tmp_path_factory.mktemp('page') / 'report'
  )
  return Parsed(written[0].read_text())


def test_it_asks_nobody_for_anything(parsed):
  addresses = [
    value
    for _, attrs in parsed.elements
    for key, value in attrs.items()
    if key in ('src', 'href', 'srcset', 'action', 'data', 'poster')
  ]
  assert len(addresses) > 8
  assert all(a.startswith(('#', 'data:')) for a in addresses)
  assert not parsed.all('script') + parsed.all('link') + parsed.all('iframe')
  assert not re.search(r'url\(|@import|//', page.STYLE)


def test_a_dark_page_has_dark_charts(parsed):
  style = next(text for text in parsed.texts if '@media' in text)
  dark = re.findall(
    r'@media \(prefers-color-scheme: dark\) \{(.*?)\n\}', style, re.DOTALL
  )
  assert any('figure img' in rules and 'invert' in rules for rules in dark)


def test_every_entry_of_the_contents_leads_to_a_section(parsed):
  targets = [a['href'] for a in parsed.all('a') if a['href'].startswith('#')]
  assert targets == ['#' + section['id'] for section in parsed.all('section')]
  assert len(set(targets)) == 5


def test_pictures_have_words(parsed):
  chart, _, timeline = (image['alt'] for image in parsed.all('img'))
  assert chart == (
    'Chart: Goodput against chips. goodput (%) over chips; simulated, closed '
    'form, paper, measured. Lines: elastic data-parallel, M = 4, M = 8, a real '
    'run.'
  )
  assert timeline.startswith('Timeline: The first five minutes of 1.2 M chips.')
  assert 'inner steps' in timeline


def test_text_is_text(parsed):
  whole = ''.join(parsed.texts)
  assert 'Goodput of <fleets> & friends' in whole
  assert '"quotes" & <tags> are text.' in whole
  assert 'a <system> & more' in whole
  assert '89.0 ± 0.1' in whole
  assert 'python -m diloco.simulate --config=experiments/goodput.py' in whole


def test_tables_scroll_and_can_be_saved(parsed):
  scrolled = [d for d in parsed.all('div') if d.get('class') == 'scroll']
  assert len(scrolled) == len(parsed.all('table')) == 2
  assert all(d['tabindex'] == '0' for d in scrolled)
  saved = [a for a in parsed.all('a') if 'download' in a]
  assert [a['download'] for a in saved] == ['goodput.csv', 'wide.csv']


def test_an_attribute_can_not_be_left():
  assert page.of(
    sample_report.report(), {}, {'goodput': '', 'wide': ''}, '"><script>'
  ).count('<script') == 0  # fmt: skip
