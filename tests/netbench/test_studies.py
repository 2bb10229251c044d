# SPDX-License-Identifier: Apache-2.0
"""Studies on processes and in the simulator, each at its smallest."""

import json
import subprocess
import sys

import pytest

from tests.netbench import links, studies
from tests.netbench.links import Loopback, SiteLinks
from tests.netbench.net_systems import Setting
from tests.netbench.stages import MachineStage
from tests.netbench.studies import MERGING, STUDIES

pytestmark = pytest.mark.alone

SMALL = Setting(1, 0.4, 0.05)
SECONDS = 2.0
WHY_NOT = links.why_not_here()
needs_links = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def runs(name, setting=SMALL, rates=()):
  study = STUDIES[name]
  return list(study.runs(setting, study.systems, rates))


def test_slow_learners_are_predicted_to_count_by_latest_alone():
  found = {}
  for merging, run in zip(MERGING, runs('unequal', Setting(2, 0.4, 0.25))):
    stage = MachineStage(run.system, run.setting)
    for (_, group), figures in studies.follow(stage, run, 120).items():
      found[merging, group] = figures
  for merging in MERGING:
    slow = found[merging, '5 times']
    waits, latest = merging == 'K=M', 'latest' in merging
    assert slow.participation == float(waits or latest)
    assert slow.gone > 0.9 or waits or latest
    pace = found[merging, 'fast'].pace
    assert pace == pytest.approx(0.2 if waits else 1.0, abs=0.04)
    assert found[merging, 'fast'].steps == pytest.approx(1.0, abs=0.02)


def test_a_slow_learner_among_processes():
  run = runs('unequal')[list(MERGING).index('K=1 latest')]
  fast, _, slow = studies.measure(run, Loopback(), SECONDS, [])
  assert fast.predicted.pace == pytest.approx(1.0, abs=0.1)
  assert fast.measured.pace > 0.4  # Not 0.2, as of one that waits.
  assert slow.measured.participation > 0.5
  assert slow.measured.merged > 0.5
  # It makes a fifth of the other's steps: by this the sleeps are seen.
  assert slow.measured.trained < 0.4 * fast.measured.trained


def test_a_visitor_among_processes_is_merged_and_leaves():
  (run,) = runs('visitors')
  cells = studies.measure(run, Loopback(), SECONDS, [])
  found = {(cell.phase, cell.group): cell.measured for cell in cells}
  assert found.keys() == {
    ('before', 'stay'), ('visit', 'stay'), ('visit', 'visit'),
    ('after', 'stay'), (studies.WHOLE, 'visit'),
  }  # fmt: skip
  whole = found[studies.WHOLE, 'visit']
  assert whole.trained >= found['visit', 'visit'].trained > 0
  assert whole.merged > 0.5
  assert whole.merged + whole.gone == pytest.approx(1.0)
  for phase in ('before', 'visit', 'after'):
    assert found[phase, 'stay'].participation > 0.5


@needs_links
def test_only_the_link_between_the_sites_is_slow():
  with SiteLinks(['a', 'b', 'c', 'd'], far=['c', 'd']) as made:
    made.shape(4.0)
    assert made.probe_mbits('c', 'a', 1.0) < 4.5
    assert made.probe_mbits('a', 'b', 0.3) > 50.0
    assert made.probe_mbits('c', 'd', 0.3) > 50.0


@needs_links
def test_the_far_site_loses_what_the_link_does_not_carry(tmp_path):
  out = tmp_path / 'cells.json'
  slow, fast = '0.2 Mbit/s', '20 Mbit/s'
  ended = subprocess.run(
    [
      *(sys.executable, '-m', 'tests.netbench', '--study=sites'),
      *('--systems=int4', '--mbits=0.2,20', f'--seconds={SECONDS}'),
      *('--learners=1', f'--step_s={SMALL.step_s}', f'--json={out}'),
    ],
    capture_output=True,
    text=True,
  )
  assert ended.returncode == 0, ended.stdout + ended.stderr
  cells = {
    (cell['phase'], cell['group']): cell
    for cell in json.loads(out.read_text())['cells']
  }
  for how in ('measured', 'predicted'):
    assert cells[fast, 'far'][how]['participation'] > 0.5
    assert cells[slow, 'far'][how]['participation'] < 0.4
    assert cells[slow, 'near'][how]['participation'] > 0.5
    assert cells[slow, 'far'][how]['steps'] > 0.5  # It trains on.
  assert 'Two sites, and one slow link between them' in ended.stdout
