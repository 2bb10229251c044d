# SPDX-License-Identifier: Apache-2.0
"""Training over shaped links: refusals, the smallest table, what is left."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest

from tests.netbench import link_tables, links
from tests.netbench.links import LinksFailed, ShapedLinks
from tests.netbench.net_systems import PAYLOAD, SYSTEMS, Setting
from tests.netbench.process_run import remove_left
from tests.waiting import until

pytestmark = pytest.mark.alone

START_S = 120.0
WHY_NOT = links.why_not_here()
needs_links = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
SLOW, FAST = 6.0, 60.0  # Mbit/s.
SMALL = ('--millions=0.2', '--step_s=0.05', '--seconds=1')


def command(*words):
  return [sys.executable, '-m', 'tests.netbench', *words]


# Bad use ---------------------------------------------------------------------


@pytest.mark.parametrize(
  ('words', 'said'),
  [
    (('--systems=carrier_pigeon',), '--systems=carrier_pigeon: must be some'),
    (('--systems=',), 'must be some of int4, '),
    (('--mbits=fast',), '--mbits=fast: must be numbers above 0'),
    (('--mbits=1,0',), '--mbits=1,0: must be numbers above 0'),
    (('--millions=0',), '--millions=0: must be above 0'),
    (('--learners=1',), '--learners=1: must be 2 … 59'),
    (('--delay_ms=-1',), '--delay_ms=-1: must be 0 … 1000'),
    (('--study=sites', '--delay_ms=9'), '--study=sites has no delays'),
    (('more',), 'more: unexpected argument'),
    (
      ('--study=sites', '--systems=diloco'),
      'must be some of int4, bf16, f32',
    ),
    (('--study=visitors', '--mbits=1'), '--study=visitors has no link'),
    (('--study=sites', '--learners=30'), '--learners=30: must be 1 … 29'),
  ],
)
def test_bad_use_gets_a_line_and_78(words, said):
  ended = subprocess.run(command(*words), capture_output=True, text=True)
  assert ended.returncode == 78
  assert said in ended.stderr
  assert 'Traceback' not in ended.stderr


@needs_links
def test_a_rate_that_the_machine_has_not_is_refused():
  ended = subprocess.run(command('--mbits=1e9'), capture_output=True, text=True)
  assert ended.returncode == 78
  assert '--mbits=1e+09: this machine moves ' in ended.stderr


def test_without_the_tools_it_says_which():
  ended = subprocess.run(
    command(),
    capture_output=True,
    text=True,
    env={**os.environ, 'PATH': '/nonexistent'},
  )
  assert ended.returncode == 78
  assert 'tests.netbench: needs ' in ended.stderr


def test_without_root_it_says_so(monkeypatch):
  monkeypatch.setattr(links.shutil, 'which', lambda tool: tool)
  monkeypatch.setattr(links.sys, 'platform', 'linux')
  monkeypatch.setattr(links.os, 'geteuid', lambda: 1000)
  assert links.why_not_here().startswith('needs root')


# The figures -----------------------------------------------------------------


@pytest.mark.parametrize(
  ('shares', 'found'),
  [
    ((0.95, 0.99), ('<=', 1.0)),
    ((0.1, 0.5), ('>', 100.0)),
    ((0.8, 1.0), ('', 10.0)),  # Halfway along the logarithm.
  ],
)
def test_the_bandwidth_is_interpolated(shares, found):
  sign, mbits = link_tables.bandwidth(list(zip((1.0, 100.0), shares)), 0.9)
  assert (sign, mbits) == (found[0], pytest.approx(found[1]))


def test_data_parallel_is_predicted_by_hand():
  setting = Setting(2, 0.4, 0.25)
  found = SYSTEMS['data_parallel'].predict(setting, 3.0, 0.25)
  burst_s = 32 * setting.params / (3e6 * PAYLOAD)
  assert found.utilisation == pytest.approx(0.25 / (0.25 + burst_s))


def test_decoupled_is_predicted_to_lose_rounds_and_no_steps():
  found = SYSTEMS['f32'].predict(Setting(2, 0.4, 0.25), 1.0, 0.25)
  assert found.utilisation > 0.99
  assert found.pace < 0.5


def test_a_delay_is_predicted_to_cost_a_ring_of_two_members_both_its_ways():
  without, late = (
    SYSTEMS['data_parallel'].predict(
      Setting(2, 0.4, 0.25, delay_ms=delay_ms), 100.0, 0.25
    )
    for delay_ms in (0.0, 50.0)
  )
  steps_s = [0.25 / found.utilisation for found in (without, late)]
  assert steps_s[1] - steps_s[0] == pytest.approx(0.1)


# Real links ------------------------------------------------------------------


@needs_links
def test_a_link_delays_each_packet_and_carries_as_much():
  with ShapedLinks(['a', 'b'], delays=True) as made:
    made.shape(SLOW, 30.0)
    assert made.probe_delay_ms('a', 'b') >= 30.0
    assert made.probe_mbits('a', 'b', 1.0) < 1.1 * SLOW
    made.shape(None)
    assert made.probe_delay_ms('a', 'b') < 15.0


@needs_links
def test_wires_whose_process_has_died_are_named():
  with ShapedLinks(['a', 'b'], delays=True) as made:
    made._wires._process.kill()
    made._wires._process.wait()
    with pytest.raises(LinksFailed, match='delayed wires: '):
      made.shape(SLOW, 30.0)


@needs_links
def test_a_link_carries_its_rate_and_counts_it():
  with ShapedLinks(['a', 'b']) as made:
    made.shape(8.0)
    before = made.counts()
    carried = made.probe_mbits('a', 'b', 1.0)
    after = made.counts()
    assert 4.0 < carried < 9.0
    assert after['a'][0] - before['a'][0] > 1e6 / 8 * carried
    made.shape(None)
    assert made.probe_mbits('a', 'b', 0.5) > 50.0


@needs_links
def test_the_smallest_tables(tmp_path):
  slow, own, table = measured(tmp_path, 'data_parallel,int4', SLOW)
  assert 'Decoupled DiLoCo int4' in table
  fast, _ = measured(tmp_path, 'data_parallel', FAST)
  # An all-reduce between two sends the model once, whatever the link.
  for cell in (slow, fast):
    assert cell['sent_bytes'] == pytest.approx(4 * 2e5 / PAYLOAD, rel=0.2)
  # These fail where the shaping does nothing.
  assert slow['utilisation'] < 0.12
  assert 3 * slow['utilisation'] < fast['utilisation'] < 0.75
  assert 0.6 < slow['busiest'] < 1.1
  assert own['utilisation'] > 0.7
  assert own['pace'] > 0.5
  assert own['sent_bytes'] < 0.05 * slow['sent_bytes']


def measured(folder, systems, mbits):
  """Returns the cells of these systems, in order, and what was printed."""
  out = folder / f'{mbits:g}.json'
  words = (f'--systems={systems}', f'--mbits={mbits:g}', f'--json={out}')
  ended = subprocess.run(
    command(*words, *SMALL), capture_output=True, text=True
  )
  assert ended.returncode == 0, ended.stdout + ended.stderr
  cells = {x['system']: x for x in json.loads(out.read_text())['cells']}
  return *(cells[system] for system in systems.split(',')), ended.stdout


@needs_links
@pytest.mark.parametrize(
  ('number', 'code'),
  [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)],
)
def test_nothing_is_left_after_a_kill(number, code):
  home = os.readlink('/proc/self/ns/net')
  devices = psutil.net_if_stats().keys()
  started = subprocess.Popen(
    command('--systems=int4', '--mbits=10', *SMALL),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    process_group=0,
  )
  running = psutil.Process(started.pid)

  def below() -> list[psutil.Process]:
    return running.children(recursive=True)

  def learns() -> bool:
    return sum('diloco.learner' in _words(each) for each in below()) == 2

  until(learns, START_S, 'two learners run')
  left = below()
  assert len(left) >= 7  # Four that hold namespaces, a syncer, two learners.
  os.killpg(started.pid, number)  # As Ctrl-C does in a terminal.
  assert started.wait(START_S) == code
  until(lambda: not any(map(_lives, left)), START_S, 'all of them are gone')
  assert os.readlink('/proc/self/ns/net') == home
  assert psutil.net_if_stats().keys() == devices
  remove_left()  # As the next start does.
  folders = pathlib.Path(tempfile.gettempdir()).glob(f'*{started.pid}-*')
  assert not list(folders)


def _words(process: psutil.Process) -> list[str]:
  try:
    return process.cmdline()
  except psutil.Error:
    return []


def _lives(process: psutil.Process) -> bool:
  try:
    return process.status() != psutil.STATUS_ZOMBIE
  except psutil.Error:
    return False
