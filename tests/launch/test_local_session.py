# SPDX-License-Identifier: Apache-2.0
"""Whole local runs: most with small stand-ins, one with all that is real."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest

from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir
from diloco.transport.sockets import free_port
from tests.waiting import until

pytestmark = pytest.mark.beside

HERE = pathlib.Path(__file__).parent
DEADLINE_S = 240.0


def start(workdir, steps, what):
  command = [sys.executable, str(HERE / 'launch_stand_ins.py')]
  return subprocess.Popen(
    [*command, str(workdir), str(steps), what],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=os.environ | {'PYTHONPATH': os.getcwd()},
  )


def finish(launcher):
  try:
    return launcher.communicate(timeout=DEADLINE_S)[0]
  finally:
    launcher.kill()


def started(workdir):
  return [e for e in read_jsonl(workdir.events) if e['event'] == 'started']


def wait_for_starts(launcher, workdir, count):
  def holds() -> bool:
    assert launcher.poll() is None, launcher.stdout.read()
    return len(started(workdir)) >= count

  until(holds, DEADLINE_S, lambda: f'{count} starts: {started(workdir)}')


def assert_all_gone(workdir):
  for event in started(workdir):
    until(
      lambda pid=event['pid']: not _lives(pid), DEADLINE_S, f'{event} is gone'
    )


def _lives(pid):
  try:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


def test_a_run_loses_a_learner_and_comes_to_its_end(tmp_path):
  workdir = Workdir(tmp_path / 'run')
  launcher = start(workdir.root, 120, 'good')
  shown = finish(launcher)
  assert launcher.returncode == 0, shown
  events = read_jsonl(workdir.events)
  (kill,) = [e for e in events if e['event'] == 'killed']
  assert kill['process'] == 'learner-1'
  assert 'planned in config.faults' in kill['detail']
  assert [e['process'] for e in started(workdir)] == [
    'syncer', 'learner-0', 'learner-1', 'learner-2', 'learner-1', 'evaluate',
  ]  # fmt: skip
  for text in ('killed: SIGKILL at global step', '2.430', '3.506', 'learner-2'):
    assert text in shown
  assert workdir.loss_plot.stat().st_size > 10_000
  assert json.loads(workdir.pids.read_text())['processes'] == {}
  assert_all_gone(workdir)


@pytest.mark.parametrize(
  ('number', 'code'), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_stops_everything(tmp_path, number, code):
  workdir = Workdir(tmp_path / 'run')
  launcher = start(workdir.root, 100_000, 'good')
  wait_for_starts(launcher, workdir, 4)
  launcher.send_signal(number)
  shown = finish(launcher)
  assert launcher.returncode == code, shown
  assert f'stopped by {number.name}; no process is left' in shown
  assert f'the same command goes on with the run in {workdir.root}' in shown
  *_, picture, _ = shown.splitlines()
  for name in ('syncer', 'learner-0', 'learner-1', 'learner-2'):
    assert f'{name} stopped' in picture
  assert 'running' not in picture
  assert ' live ' not in picture.partition('|')[2]
  assert_all_gone(workdir)


def test_a_launcher_that_is_killed_leaves_no_process(tmp_path):
  workdir = Workdir(tmp_path / 'run')
  launcher = start(workdir.root, 100_000, 'stubborn')
  wait_for_starts(launcher, workdir, 4)
  launcher.kill()
  launcher.wait()
  assert_all_gone(workdir)
  launcher.stdout.close()


def test_a_refused_process_stops_the_run_and_its_log_is_shown(tmp_path):
  workdir = Workdir(tmp_path / 'run')
  launcher = start(workdir.root, 100_000, 'refused')
  shown = finish(launcher)
  assert launcher.returncode == 1
  assert 'failed: learner-2 exited with code 78: it can not run' in shown
  assert '  the reason of the stand-in' in shown
  assert_all_gone(workdir)


def test_a_run_that_was_not_evaluated_has_not_succeeded(tmp_path):
  workdir = Workdir(tmp_path / 'run')
  launcher = start(workdir.root, 20, 'broken:1')
  shown = finish(launcher)
  assert launcher.returncode == 1
  assert 'failed: evaluate exited with code 1' in shown
  assert not workdir.evaluation.exists()
  assert_all_gone(workdir)


# A learner that is added by hand, all of it real -----------------------------

STEPS = 'steps=100000'
OVERRIDES = {
  'model.kind': 'bowl',  # It compiles at once.
  'model.layers': 2,
  'inner.optimizer': 'sgd',
  'data.shards': 3,
  'transport.data_plane': 'grpc',
  'run.step_floor_s': 0.05,
  'run.cpu_threads': 1,
}


def test_unlike_learners_train_and_leave(tmp_path):
  """One of two hosts, and one of one host with another mesh and batch."""
  keys = {
    **OVERRIDES,
    'protocol.quorum': 2,
    'protocol.patience': DEADLINE_S,
    'protocol.total_steps': 100,
    'unlike_learners': '0: hosts=2, mesh.fsdp=2; 1: data.batch=8, mesh.fsdp=4',
  }
  workdir = Workdir(tmp_path / 'run')
  launcher = subprocess.Popen(
    [
      *(sys.executable, '-m', 'launch.local', '--cpu_devices'),
      '--config=experiments/tests_tiny.py',
      *(f'--config.{key}={value}' for key, value in keys.items()),
      f'--workdir={workdir.root}',
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )

  def has_begun(learner):
    assert launcher.poll() is None, launcher.stdout.read()
    path = workdir.learner_tape(learner)
    return path.exists() and path.stat().st_size > 0

  try:
    until(lambda: has_begun(1), DEADLINE_S, 'learner 1 begins')
    # It takes fewer processes to start, and waits: a round takes who is there.
    pid = json.loads(workdir.pids.read_text())['processes']['learner-1']
    os.kill(pid, signal.SIGSTOP)
    until(lambda: has_begun(0), DEADLINE_S, 'learner 0 begins')
    os.kill(pid, signal.SIGCONT)
    shown = finish(launcher)
  finally:
    launcher.kill()
  assert launcher.returncode == 0, shown
  ends = {
    each['process']: each['detail']
    for each in read_jsonl(workdir.events)
    if each['event'] == 'exited'
  }
  for process in ('learner-0', 'learner-0.1', 'learner-1'):
    assert ends[process] == 'exited with code 0'
  for learner, hosts, devices, batch in ((0, 2, 2, 4), (1, 1, 4, 8)):
    lines = read_jsonl(workdir.learner_tape(learner))
    (begin,) = (line for line in lines if line['kind'] == 'Begin')
    machine = begin['machine']
    assert (machine['hosts'], machine['fsdp']) == (hosts, devices)
    offer = next(line for line in lines if line['kind'] == 'Snapshot')
    assert offer['c_tokens'] == offer['c_steps'] * batch * 32


def test_a_learner_joins_a_run_that_goes_on_and_leaves_it(tmp_path):
  workdir = Workdir(tmp_path / 'run')
  flags = [
    f'--config=experiments/tests_tiny.py:{STEPS}',
    *(f'--config.{key}={value}' for key, value in OVERRIDES.items()),
    f'--workdir={workdir.root}',
  ]
  port = free_port()

  def merged(learner):
    assert launcher.poll() is None, launcher.stdout.read()
    closes = [x for x in read_jsonl(workdir.tape) if x['kind'] == 'Publish']
    return sum(
      learner in [share['learner'] for share in close['shares']]
      for close in closes
    )

  launcher = subprocess.Popen(
    [
      *(sys.executable, '-m', 'launch.local', *flags),
      f'--config.transport.port={port}',
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  try:
    until(lambda: merged(0), DEADLINE_S, 'a round')
    with subprocess.Popen(
      [
        *(sys.executable, '-m', 'diloco.learner', *flags, '--learner=2'),
        f'--syncer=127.0.0.1:{port}',
      ]
    ) as newcomer:
      until(lambda: merged(2) > 3, DEADLINE_S, 'rounds with the newcomer')
      newcomer.send_signal(signal.SIGTERM)
    assert newcomer.returncode == 143
    since = merged(0)
    until(lambda: merged(0) > since + 3, DEADLINE_S, 'rounds without it')
    launcher.send_signal(signal.SIGTERM)
    shown = finish(launcher)
    assert launcher.returncode == 143, shown
    assert 'learner-2 ' in shown  # It has a row, as the others have.
    assert_all_gone(workdir)
  finally:
    launcher.kill()
