# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of real processes: killed, and without disk."""

import json
import os
import pathlib
import random
import subprocess
import sys
import threading

import pytest

from launch.parent_death import dying_with_parent

pytestmark = pytest.mark.beside

ROOT = pathlib.Path(__file__).parents[2]
KILLS, KILLS_MAX = 5, 20  # More, where none comes in the midst of a save.
LATEST_S = 0.25  # After the begin of a save; one takes about as long.
TASK_S = 240.0


def _command(task, folder):
  module = 'tests.checkpoint.checkpoint_process'
  return [sys.executable, '-m', module, task, str(folder)]


def _environment():
  return os.environ | {'JAX_PLATFORMS': 'cpu'}


def _run(task, folder):
  done = subprocess.run(
    _command(task, folder),
    cwd=ROOT,
    env=_environment(),
    capture_output=True,
    text=True,
    check=False,
    timeout=TASK_S,
  )
  assert done.returncode == 0, done.stderr
  return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def _save_and_kill(folder, after_s):
  """Returns what the process told until it was killed in mid-save."""
  told = {}
  with subprocess.Popen(
    dying_with_parent(_command('keep_saving', folder)),
    cwd=ROOT,
    env=_environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  ) as process:
    watchdog = threading.Timer(TASK_S, process.kill)
    watchdog.start()
    first = None
    for line in process.stdout:
      told |= json.loads(line)
      first = first or told.get('begun')
      if first and told['begun'] == first + 1:  # One is whole, one not.
        threading.Event().wait(after_s)
        process.kill()
        break
    for line in process.stdout:
      told |= json.loads(line)
    watchdog.cancel()
  return told


def test_the_newest_whole_checkpoint_outlives_kills_at_any_moment(tmp_path):
  rng = random.Random(17)
  written = torn = 0
  for kill in range(KILLS_MAX):
    if torn and kill >= KILLS:
      break
    told = _save_and_kill(tmp_path, after_s=rng.uniform(0, LATEST_S))
    assert told.get('restored', -1) >= written, f'{kill=} {told=}'
    written = told['written']
    torn += len(list(tmp_path.glob('*.orbax-checkpoint-tmp')))
  assert torn > 0, 'no kill came in the midst of a save'


@pytest.fixture(scope='module')
def without_disk(tmp_path_factory):
  return _run('full_disk', tmp_path_factory.mktemp('full') / 'store')


def test_a_save_without_disk_fails_alone(without_disk):
  told, _ = without_disk
  assert [line['failed'] for line in told] == [0, 1, 1]
  assert [line['folder'] for line in told] == [['1'], ['1'], ['1', '3']]


def test_a_save_without_disk_is_said_in_one_line(without_disk):
  _, stderr = without_disk
  [line] = [line for line in stderr.splitlines() if 'store/2' in line]
  assert 'store/2 could not be written' in line
  assert 'File too large' in line
  assert '/orbax/' not in stderr, "Orbax's tracebacks"
