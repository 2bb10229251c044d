# SPDX-License-Identifier: Apache-2.0
"""A browser shows a run with a `kill -9`, while it goes on and afterwards."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from diloco.pages import page as page_lib
from diloco.watch.folders import FollowedFolders
from tests.commands import output
from tests.processes.processes import ENDLESS, START_S, Processes
from tests.waiting import until
from tests.watch.chromium import WHY_NOT, Chromium

pytestmark = pytest.mark.beside
needs_browser = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

TEXT = 'document.body?.innerText'
# Cells of the table of processes, by the name in the row's head.
ROWS = """Object.fromEntries(
  [...document.querySelectorAll('#part-table-processes tbody tr')].map((tr) =>
    [tr.cells[0].innerText, [...tr.cells].map((td) => td.innerText)]))"""
WHAT_HAPPENED = "document.getElementById('part-table-happenings').innerText"
COST = "document.getElementById('part-prose-deaths')?.innerText"
SAID = "document.getElementById('timeline-said').innerText"
CURVES = "document.querySelectorAll('svg .curve').length"
DEATHS = "document.querySelectorAll('svg .death').length"
WIDER = 'document.documentElement.scrollWidth - innerWidth'
CELLS = "document.querySelectorAll('#part-table-sweep td').length"
# Charts and tables beyond the window, but for what scrolls; labels of a chart
# beyond it.
CUT = """[...document.querySelectorAll('svg, table, svg text')].filter((x) => {
  const box = x.closest('.scroll'),
    right = x.ownerSVGElement?.getBoundingClientRect().right ?? innerWidth;
  return box ? box.scrollWidth < x.offsetWidth
    : x.getBoundingClientRect().right > right + 1; }).map((x) => x.outerHTML)"""
PAPER = 'getComputedStyle(document.body).backgroundColor'
PIXELS = """(() => { const c = document.getElementById('timeline');
  const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
  return new Set(new Uint32Array(d.buffer)).size; })()"""
SWEEP = pathlib.Path(__file__).parent / 'tiny_sweep'
SIZES = [(width, dark) for width in (480, 1400) for dark in (False, True)]


def looked_at(browser: Chromium) -> set[str]:
  """Looks at every size and colour scheme; returns the backgrounds."""
  papers = set()
  for width, dark in SIZES:
    browser.show(width, dark)
    until(lambda: browser.of(PIXELS) > 2, START_S, 'the timeline is drawn')
    assert browser.of(WIDER) <= 0, f'wider than {width} pixels'
    papers.add(browser.of(PAPER))
  return papers


@needs_browser
def test_a_run_with_a_kill(tmp_path):
  (tmp_path / 'browser').mkdir()
  with (
    Processes(tmp_path, *ENDLESS, 'run.step_floor_s=0.1') as processes,
    Chromium(tmp_path / 'browser') as browser,
  ):
    launcher = processes.start('launcher', 'launch.local')

    def seen(script: str, what: str, deadline_s: float = START_S):
      until(
        lambda: browser.of(script),
        deadline_s,
        lambda: f'{what}\n{browser.of(TEXT)}\n{processes.tails()}',
      )

    processes.until(
      processes.workdir.config.exists, START_S, 'the run has a folder'
    )
    page = subprocess.Popen(
      [sys.executable, '-m', 'diloco.watch', str(processes.workdir.root)],
      stdout=subprocess.PIPE,
      text=True,
    )
    url = re.search(r'http://\S+', page.stdout.readline())[0]
    browser.ask('Page.navigate', url=url)
    seen(f"({ROWS})['learner-1']?.[1] === 'live'", 'learner 1 is live')
    seen(f'{CURVES} >= 4', 'curves are drawn')
    assert not browser.of(f'/killed|exited/.test({WHAT_HAPPENED})')

    pids = json.loads(processes.workdir.pids.read_text())['processes']
    os.kill(pids['learner-1'], signal.SIGKILL)
    seen(f'/learner-1\\s+exited/.test({WHAT_HAPPENED})', 'the death is shown')
    seen(f"({ROWS})['learner-1'][2] === '2'", 'a second start is counted')
    seen(f"({ROWS})['learner-1'][1] === 'live'", 'it has come back')
    seen(f'{DEATHS} > 0', 'the death is in the curves')
    seen(f'/learner-1 at .* down for .* back at/.test({COST})', 'its cost')
    seen(f'/merged again .* s after its death/.test({COST})', 'it is merged')
    assert len(looked_at(browser)) == 2
    assert browser.errors == []
    launcher.send(signal.SIGINT)
    assert processes.exit_code(launcher) == 130, processes.tails()
    page.terminate()
    page.communicate(timeout=START_S)
    # At the end nothing answers any more, and Chromium says so.
    assert not [each for each in browser.errors if 'net::ERR_' not in each]
    assert {
      address.startswith((url, 'data:')) for address in browser.asked
    } == {True}
    # Its server is gone: the page says so, and shows the last state.
    seen(
      f'/does not answer/.test({TEXT})', 'the page says that nothing answers'
    )
    stopped = processes.workdir.root
    played(browser, stopped, tmp_path / 'page.html', 'stopped')


@needs_browser
def test_a_run_of_the_lab(tmp_path):
  (tmp_path / 'browser').mkdir()
  run = tmp_path / 'run'
  config = '--config=experiments/tests_tiny.py'
  output('-m', 'diloco.lab', config, f'--workdir={run}')
  with Chromium(tmp_path / 'browser') as browser:
    played(browser, run, tmp_path / 'page.html', 'finished')
    tiles = browser.of("document.getElementById('tiles').innerText")
    assert re.search(r'^held-out loss of Θ\s+\d', tiles)
    assert re.search(r'global step\s+60\s+of 60', tiles)
    assert re.search(r'participation\s+100.0%', tiles)
    assert re.search(r'goodput\s+\d', tiles)
    # And of a sweep: its table and its charts were once cut at 1,400 pixels.
    sweep = tmp_path / 'sweep.html'
    sweep.write_text(page_lib.render(FollowedFolders([SWEEP]).page()))
    browser.ask('Page.navigate', url=sweep.as_uri())
    until(lambda: browser.of(CELLS), START_S, 'the sweep is drawn')
    for width, dark in SIZES:
      browser.show(width, dark)
      assert browser.of(WIDER) <= 0, f'wider than {width} pixels'
      assert browser.of(CUT) == []
    assert browser.errors == []


def played(
  browser: Chromium, run: pathlib.Path, page: pathlib.Path, state: str
):
  """The page as one file plays the timeline of a run that has ended so."""
  output('-m', 'diloco.watch', run, f'--write={page}')
  browser.errors.clear()
  browser.asked.clear()
  browser.ask('Page.navigate', url=page.as_uri())
  until(
    lambda: browser.of("document.getElementById('badge')?.innerText") == state,
    START_S,
    f'the file shows a run that is {state}',
  )
  at_end = browser.of(SAID)
  assert ' merged ' in at_end
  browser.of("""(() => { const at = document.getElementById('timeline-at');
    at.value = 500; at.oninput(); })()""")
  in_the_middle = browser.of(SAID)
  assert in_the_middle != at_end
  browser.of("document.getElementById('timeline-play').click()")
  until(lambda: browser.of(SAID) != in_the_middle, START_S, 'it plays')
  assert len(looked_at(browser)) == 2
  assert browser.errors == []
  assert browser.asked == [page.as_uri()]
