# SPDX-License-Identifier: Apache-2.0
"""Checks what stands in a report's folder, byte by byte."""

import csv
import json
import pathlib
import subprocess
import sys

import pytest

from diloco.pages import parts, report_files
from tests.pages import sample_report

ROOT = pathlib.Path(__file__).parents[2]
WITHOUT = """
import pathlib, sys
sys.modules['matplotlib'] = None  # Importing it raises ImportError.
from diloco.pages import report_files as files, pictures
from tests.pages import sample_report
report = sample_report.report()
print(pictures.missing(report))
files.write(report, pathlib.Path(sys.argv[1]))
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('report')
  written = report_files.write(sample_report.report(), path / 'one')
  assert written[0] == path / 'one' / 'page.html'
  assert sorted(written) == sorted((path / 'one').iterdir())
  return path / 'one'


def test_each_part_has_its_file(folder):
  assert {path.name for path in folder.iterdir()} == {
    'page.html', 'report.json', 'goodput.csv', 'wide.csv',
    'goodput.png', 'utilisation.png', 'lanes.png',
  }  # fmt: skip


def test_the_same_report_gives_the_same_bytes(folder, tmp_path):
  for path in report_files.write(sample_report.report(), tmp_path):
    assert path.read_bytes() == (folder / path.name).read_bytes(), path.name


def test_pictures_say_neither_when_nor_by_what_they_were_drawn(folder):
  for path in folder.glob('*.png'):
    assert path.read_bytes().startswith(b'\x89PNG')
    assert b'matplotlib' not in path.read_bytes().lower()
    assert b'tIME' not in path.read_bytes()


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
  assert [part['part'] for part in report['parts']] == [
    'table', 'table', 'chart', 'chart', 'timeline',
  ]  # fmt: skip
  assert goodput['rows'][0]['simulated'] == 24.712345
  assert goodput['rows'][3]['paper'] is None
  assert wide['rows'][3]['staleness 3'] == 'inf'
  assert wide['rows'][3]['bytes up 3'] == 'nan'
  assert chart['lines'][0]['xs'][0] == 150000.0
  assert timeline['marks'][-1] == [120.0, -1, 'the syncer dies']
  assert timeline['spans'][0][:1] == [0]


def test_two_tables_of_one_name_are_refused():
  table = sample_report.goodput()
  with pytest.raises(AssertionError, match="two of \\['goodput', 'goodput'\\]"):
    parts.ReportPage('name', 'title', 'command', (), (table, table))


def test_without_matplotlib_all_else_is_written_and_that_is_said(tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', WITHOUT, tmp_path],
    capture_output=True,
    text=True,
    cwd=ROOT,
    timeout=240,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == (
    'not drawn: goodput.png, utilisation.png, lanes.png; matplotlib is not '
    'installed: pip install matplotlib, or this package with its extra '
    "'plot'\n"
  )
  assert {path.name for path in tmp_path.iterdir()} == {
    'page.html', 'report.json', 'goodput.csv', 'wide.csv',
  }  # fmt: skip
  page = (tmp_path / 'page.html').read_text()
  assert 'pip install matplotlib' in page
  assert 'lanes.png was not drawn' in page


def test_a_folder_that_can_not_be_written_is_found_beforehand(tmp_path):
  report_files.check_writable(tmp_path / 'a' / 'b')
  assert list((tmp_path / 'a' / 'b').iterdir()) == []
  (tmp_path / 'file').write_text('')
  with pytest.raises(OSError, match='file'):
    report_files.check_writable(tmp_path / 'file')
  with pytest.raises(OSError, match='file'):
    report_files.check_writable(tmp_path / 'file' / 'below')
