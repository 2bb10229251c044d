# SPDX-License-Identifier: Apache-2.0
"""A run that was cut by kill -9 goes on, by the same command."""

import json
import os
import signal
import subprocess
import sys

import pytest

from diloco.checkpoint.store import newest_after
from diloco.config import run_config
from diloco.lab import run as lab_run
from diloco.lab.outputs import Recording
from diloco.lab.run import train
from diloco.metrics.workdir import Workdir
from diloco.run.spec import make_run_spec
from tests.waiting import until

pytestmark = pytest.mark.beside

WAIT_S = 600.0  # On a machine that has other work.
STEPS, EVERY, CUT_AT_STEP = 24, 8, 20  # Two checkpoints come before the cut.
LEARNERS = 2
# A model that counts how often its loss is computed, and, so that the test
# decides where the run is cut, does not go on beyond a number of them.
MODEL = """
import os, threading
import jax
from experiments import own_model

count = 0

def seen():
  global count
  count += 1
  with open(os.environ['SEEN'], 'a') as file:
    file.write('x')
  if count >= int(os.environ['HOLD_AT']):
    threading.Event().wait()

def model(sizes):
  plain = own_model.model(sizes)
  def loss(params, batch, key):
    jax.debug.callback(seen)
    return plain.loss(params, batch, key)
  return plain._replace(loss=loss)

def get_config(arg=None):
  config = own_model.get_config('quicktest')
  config.model.kind = 'counting:model'
  config.protocol.update(total_steps=%d, blend='carry')
  config.lab.update(system=arg, checkpoint_steps=%d, away_steps=2.0)
  config.faults = ('kill learner 0 at 0.2', 'kill learner 1 at 0.75')
  if arg == 'decoupled':
    config.faults += ('kill syncer at 0.4',)
  return config
"""


@pytest.fixture
def started():
  """Processes, which end with the test, however it ends."""
  processes = []
  yield processes
  for process in processes:
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize('system', ['decoupled', 'data_parallel'])
def test_it_ends_as_if_it_had_not_been_cut(
  tmp_path, monkeypatch, started, system
):
  (tmp_path / 'counting.py').write_text(MODEL % (STEPS, EVERY))
  run = Workdir(tmp_path / 'cut')
  each = LEARNERS if system == 'decoupled' else 1
  process = _start(tmp_path, run, system, 'first', CUT_AT_STEP * each)
  started.append(process)
  saved = run.checkpoints('lab') / 'arrays' / f'{2 * EVERY}'
  _wait(process, lambda: saved.exists())
  _wait(process, lambda: _seen(tmp_path, 'first') == CUT_AT_STEP * each)
  os.kill(process.pid, signal.SIGKILL)
  process.wait()
  before = _steps_before(run.checkpoints('lab'))
  assert before >= (2 * EVERY - 4) * each  # A dead learner makes none.

  process = _start(tmp_path, run, system, 'second', sys.maxsize)
  started.append(process)
  said, errors = process.communicate(timeout=WAIT_S)
  assert process.returncode == 0, errors
  assert f'goes on from step {2 * EVERY}' in errors

  whole, trained = _whole(tmp_path, monkeypatch, system)
  assert f'parameters {lab_run.crc(trained.parameters):08x}' in said
  result = json.loads((run.root / 'result.json').read_text())
  assert result['loss'] == trained.loss
  made = _seen(tmp_path, 'second')
  assert made == _seen(tmp_path, 'whole') - before, 'made anew'
  for name in ('tape.jsonl', 'events.jsonl', 'metrics/learner-0.jsonl'):
    assert (run.root / name).read_text() == (whole.root / name).read_text()
  assert not run.checkpoints('lab').exists(), 'is of no use any more'


def _start(folder, run, system, name, hold_at) -> subprocess.Popen:
  return subprocess.Popen(
    [
      sys.executable,
      '-m',
      'diloco.lab',
      f'--config={folder}/counting.py:{system}',
      f'--workdir={run.root}',
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ
    | {
      'PYTHONPATH': os.pathsep.join([str(folder), *sys.path]),
      'SEEN': str(folder / name),
      'HOLD_AT': str(hold_at),
    },
  )


def _whole(tmp_path, monkeypatch, system):
  """Makes the same run in this process; returns its folder and result."""
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, 'counting', raising=False)
  monkeypatch.setenv('SEEN', str(tmp_path / 'whole'))
  monkeypatch.setenv('HOLD_AT', str(sys.maxsize))
  import counting

  config = run_config.build(counting.get_config(system))
  whole = Workdir(tmp_path / 'whole-run')
  recording = Recording(whole.root, config)
  try:
    return whole, train(make_run_spec(config), observer=recording)
  finally:
    recording.close()


def _steps_before(folder) -> int:
  """Counts the steps made when the newest checkpoint was."""
  count = newest_after(folder / 'arrays', 0).meta['answers']
  lines = (folder / 'answers.jsonl').read_text().splitlines()
  answers = [json.loads(line) for line in lines[1 : 1 + count]]
  return sum(question.startswith('step') for question, _ in answers)


def _wait(process, condition):
  def holds() -> bool:
    if process.poll() is not None:
      raise AssertionError(process.communicate()[1])
    return condition()

  until(holds, WAIT_S, 'the run has come so far')


def _seen(folder, name) -> int:
  path = folder / name
  return len(path.read_text()) if path.exists() else 0
