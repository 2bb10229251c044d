# SPDX-License-Identifier: Apache-2.0
"""The page as a file: alone in the world, strict JSON, and needing no extra."""

import csv
import json
import re

import pytest

from diloco.pages import page, parts
from diloco.pages.parts import Chart, Line, ReportPage
from tests.commands import output
from tests.pages import sample_report

WITHOUT = """
import pathlib, sys
sys.modules['matplotlib'] = None  # Importing it raises ImportError.
from diloco.pages import page
from tests.pages import sample_report
page.write(sample_report.report(), pathlib.Path(sys.argv[1]))
"""


def data_of(text: str) -> dict:
  found = re.search(
    r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL
  )
  return json.loads(found[1])


@pytest.fixture(scope='module', name='folder')
def fixture_folder(tmp_path_factory):
  """Written without matplotlib: all charts are drawn by the page."""
  folder = tmp_path_factory.mktemp('report') / 'one'
  output('-c', WITHOUT, folder)
  return folder


def test_without_matplotlib_the_page_has_every_chart(folder):
  assert {path.name for path in folder.iterdir()} == {
    'page.html', 'report.json', 'goodput.csv', 'wide.csv',
  }  # fmt: skip
  found = data_of((folder / 'page.html').read_text())
  drawn = [(x['part'], x['name']) for x in found['parts']]
  assert drawn == [
    ('table', 'goodput'), ('table', 'wide'), ('chart', 'goodput'),
    ('chart', 'utilisation'), ('timeline', 'lanes'),
  ]  # fmt: skip


def test_the_same_report_gives_the_same_bytes(folder, tmp_path):
  for path in page.write(sample_report.report(), tmp_path):
    assert path.read_bytes() == (folder / path.name).read_bytes(), path.name


def test_it_asks_nobody_for_anything(folder):
  text = (folder / 'page.html').read_text()
  addresses = re.findall(r'(?:src|href|action)="([^"]*)"', text)
  assert addresses == ['data:,']
  assert not re.search(r'url\(|@import|{{', text)
  # The only address of the script is that of SVG's namespace, and of its JSON.
  assert set(re.findall(r'https?://[^\s\'"]*', text)) == {
    'http://www.w3.org/2000/svg'
  }


def test_a_name_does_not_end_the_script():
  report = ReportPage('n', '</script><b>', 'c', ('<!--',), ())
  text = page.render(report)
  assert text.count('</script>') == 2
  assert data_of(text)['title'] == '</script><b>'


def test_csv_has_hidden_columns_and_all_digits(folder):
  with (folder / 'goodput.csv').open(newline='') as file:
    rows = list(csv.DictReader(file))
  assert rows[0] == {
    'system': 'data-parallel',
    'learners': '1',
    'chips': '1200000',
    'simulated': '24.712345',
    'simulated spread': '0.3',
    'closed form': '24.7',
    'paper': '27.0',
  }
  assert rows[3]['simulated'] == ''


def test_json_is_strict_and_whole(folder):
  def refuse(word):
    raise AssertionError(word)

  text = (folder / 'report.json').read_text()
  report = json.loads(text, parse_constant=refuse)
  goodput, wide, chart, _, timeline = report['parts']
  assert goodput['rows'][0]['simulated'] == 24.712345
  assert goodput['rows'][3]['paper'] is None
  assert goodput['shown']['rows'][0][3] == '24.7 ± 0.3'
  assert wide['rows'][3]['staleness 3'] == 'inf'
  assert wide['rows'][3]['bytes up 3'] == 'nan'
  assert chart['lines'][0]['xs'][0] == 150000.0
  assert timeline['marks'][-1] == [120.0, -1, 'the syncer dies']
  assert timeline['limits'][0] == 0.0


def test_a_chart_without_a_point_is_left_out():
  nothing = Line('a', 'validation', (1.0,), (float('nan'),))
  charts = (
    Chart('empty', 'E', 'x', 'y', ()),
    Chart('unknown', 'U', 'x', 'y', (nothing,)),
  )
  report = ReportPage('n', 't', 'c', (), (*charts, sample_report.bandwidth()))
  names = [part['name'] for part in page.as_data(report)['parts']]
  assert names == ['utilisation']


def test_two_tables_of_one_name_are_refused():
  table = sample_report.goodput()
  with pytest.raises(AssertionError, match='two of'):
    parts.ReportPage('name', 'title', 'command', (), (table, table))


def test_a_folder_that_can_not_be_written_is_found_beforehand(tmp_path):
  page.check_writable(tmp_path / 'a' / 'b')
  assert list((tmp_path / 'a' / 'b').iterdir()) == []
  (tmp_path / 'file').write_text('')
  with pytest.raises(OSError, match='file'):
    page.check_writable(tmp_path / 'file' / 'below')
