# SPDX-License-Identifier: Apache-2.0
"""Tables and charts of a long run, by hand; and a short real run."""

import json
import subprocess
import sys

import pytest

from diloco.bench import long_run
from diloco.bench.measurement import BenchFailed

pytestmark = pytest.mark.beside

FLAT = [5.0] * long_run.WINDOWS
GROWS = [float(i) for i in range(long_run.WINDOWS)]


def test_thirds_are_those_after_the_warm_up():
  # Windows 5 to 22 and 42 to 59.
  assert long_run.thirds('x', GROWS) == (13.5, 50.5)
  assert long_run.thirds('x', [1e6] * long_run.WARM_UP + FLAT[5:]) == (5, 5)
  holes = [None if i % 2 else 5.0 for i in range(long_run.WINDOWS)]
  assert long_run.thirds('x', holes) == (5.0, 5.0)


def test_it_says_how_long_it_takes():
  assert long_run.announcement(10.0).startswith('it runs for 10 minutes')


def test_what_was_not_seen_is_named():
  nothing = [None] * long_run.WINDOWS
  with pytest.raises(BenchFailed, match='median round: too few'):
    long_run.thirds('median round', nothing)


def test_the_page_tells_growth_from_none():
  found = {'syncer, memory': GROWS, 'median round': FLAT}
  page = long_run.report(found, 60.0, 10.0, 'command', 0.0)
  table, chart = page.parts
  grown, flat = table.rows
  assert grown[:2] == ('syncer, memory', 'MB')
  assert grown[-1] == pytest.approx(50.5 / 13.5)
  assert flat[1:] == ('ms', 5.0, 5.0, 1.0)
  assert chart.lines[1].ys == (1.0,) * long_run.WINDOWS
  assert chart.lines[0].xs[0] == 0.5


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_short_run(tmp_path):
  out, picture = tmp_path / 'x.json', tmp_path / 'x.png'
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'diloco.bench.long_run', '--minutes=0.2'),
      *('--millions=0.01', f'--json={out}', f'--picture={picture}'),
    ],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  windows = json.loads(out.read_text())['windows']
  for name in ('syncer, memory', 'learner-1, p99 step', 'median round'):
    assert name in done.stdout and len(windows[name]) == long_run.WINDOWS
  assert picture.read_bytes().startswith(b'\x89PNG')
