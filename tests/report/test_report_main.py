# SPDX-License-Identifier: Apache-2.0
"""`python -m diloco.report`, in processes of its own as users start it."""

import json

import pytest

from tests.commands import ROOT, python
from tests.prediction import recorded

SWEEP = ROOT / 'tests' / 'watch' / 'tiny_sweep'


def start(*argv):
  return python('-m', 'diloco.report', *argv)


@pytest.fixture(scope='module', name='outdir')
def fixture_outdir(tmp_path_factory):
  return tmp_path_factory.mktemp('report') / 'page'


@pytest.fixture(scope='module', name='done')
def fixture_done(tmp_path_factory, outdir):
  """Makes one page of a run and a sweep together."""
  run = tmp_path_factory.mktemp('runs') / 'run'
  recorded.write(run, 10.0, {})
  return start(run, SWEEP, f'--outdir={outdir}')


def test_it_writes_a_page_and_tables(done, outdir):
  assert done.returncode == 0, done.stderr
  assert {path.name for path in outdir.iterdir()} == {
    'page.html', 'report.json', 'figures.csv', 'processes.csv', 'sweep.csv',
    'happenings.csv',
  }  # fmt: skip
  assert f'page: {outdir / "page.html"}' in done.stderr


def test_the_json_is_one_of_the_same_parts(done, outdir):
  parts = json.loads((outdir / 'report.json').read_text())['parts']
  drawn = {(each['part'], each['name']) for each in parts}
  assert drawn >= {
    ('chart', 'loss'), ('chart', 'participation'), ('chart', 'sweep-loss'),
    ('chart', 'sweep-gap-0'), ('intervals', 'sweep-differences-0'),
    ('timeline', 'timeline'), ('table', 'sweep'),
  }  # fmt: skip


@pytest.mark.parametrize(
  ('argv', 'reason'),
  [
    ((), 'error: RUN: is missing'),
    (('/nowhere',), 'error: /nowhere: is no folder'),
    (('--workdir=/nowhere',), 'note: --workdir=/nowhere is now /nowhere by'),
    ((ROOT / 'diloco',), 'holds neither a run'),
    (('--workdr=x',), 'workdr'),
    ((SWEEP, '--outdir=/proc/no'), 'error: --outdir=/proc/no'),
  ],
)
def test_what_can_not_be_shown_is_refused(argv, reason):
  done = start(*argv)
  assert done.returncode == 78, done.stderr
  assert reason in done.stderr
  assert done.stdout == ''
