# SPDX-License-Identifier: Apache-2.0
"""A run that was cut by kill -9 goes on, by the same command."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

from diloco.config import run_config
from diloco.config.sections import ConfigError
from diloco.lab import run as lab_run
from diloco.lab.checkpoints import UNREADABLE, LabCheckpoints, pack, unpack
from diloco.lab.outputs import Recording
from diloco.lab.run import train
from diloco.metrics.workdir import Workdir
from diloco.numerics.outer import FragmentState
from diloco.run.spec import make_run_spec
from experiments import common
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
  config.protocol.update(total_steps=%d, blend='rebase')
  config.lab.update(system=arg, checkpoint_steps=%d, away_steps=2.0)
  config.lab.update(eval_every_steps=3, mtbf_steps=15.0)
  config.faults = ('kill learner 0 at 0.2', 'kill learner 1 at 0.75')
  if arg == 'decoupled':
    config.faults += ('kill syncer at 0.333',)  # At a checkpoint.
    config.lab.update(visitors=1, visit_from=0.25)
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
  whole, trained = _whole(tmp_path, monkeypatch, system)
  made = _seen(tmp_path, 'whole')
  cut_at = made * CUT_AT_STEP // STEPS
  process = _start(tmp_path, run, system, 'first', cut_at)
  started.append(process)
  saved = run.checkpoints('lab') / f'{2 * EVERY}'
  _wait(process, lambda: saved.exists())
  _wait(process, lambda: _seen(tmp_path, 'first') == cut_at)
  os.kill(process.pid, signal.SIGKILL)
  process.wait()

  process = _start(tmp_path, run, system, 'second', sys.maxsize)
  started.append(process)
  said, errors = process.communicate(timeout=WAIT_S)
  assert process.returncode == 0, errors
  assert f'goes on from step {2 * EVERY}' in errors
  assert _seen(tmp_path, 'second') < made / 2, 'made anew'

  assert f'parameters {lab_run.crc(trained.parameters):08x}' in said
  assert trained.unexplained_tokens in (0, None)
  result = json.loads((run.root / 'result.json').read_text())
  expected = dataclasses.asdict(lab_run.result_of(trained, 0.0))
  expected = json.loads(json.dumps(expected))
  assert result | {'wall_s': 0.0} == expected
  for name in ('tape.jsonl', 'events.jsonl', *_metrics(whole)):
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
  checkpoints = LabCheckpoints(whole.checkpoints('lab'), config)
  try:
    return whole, train(
      make_run_spec(config), observer=recording, checkpoints=checkpoints
    )
  finally:
    checkpoints.close()
    recording.close()


def _metrics(run: Workdir) -> list[str]:
  found = (run.root / 'metrics').iterdir()
  return [f'metrics/{path.name}' for path in found]


def _wait(process, condition):
  def holds() -> bool:
    if process.poll() is not None:
      raise AssertionError(process.communicate()[1])
    return condition()

  until(holds, WAIT_S, 'the run has come so far')


def _seen(folder, name) -> int:
  path = folder / name
  return len(path.read_text()) if path.exists() else 0


# What is kept ----------------------------------------------------------------


def test_objects_come_back_and_an_array_in_two_places_is_kept_once():
  theta = {'w': np.arange(3, dtype=np.float32)}
  state = FragmentState(theta, optax.adam(0.1).init(theta), theta, 4)
  packed = pack({7: [state, {(1, 'x')}, None]})
  assert len(packed) == 1 + 1 + 3  # All else; w; count, μ and ν.
  [found, pairs, nothing] = unpack(packed)[7]
  assert jax.tree.structure(found.optimizer_state) == jax.tree.structure(
    state.optimizer_state
  )
  assert found.theta['w'] is found.residual['w']
  np.testing.assert_array_equal(found.theta['w'], theta['w'])
  assert (found.version, pairs, nothing) == (4, {(1, 'x')}, None)


def test_checkpoints_of_another_configuration_are_removed(tmp_path):
  config = common.quicktest(common.base())
  for seed, found in ((0, 0), (0, 8), (1, 0)):
    config.seed = seed
    kept = LabCheckpoints(tmp_path, run_config.build(config))
    assert kept.from_step == found
    if not found:
      kept.save(8, ['here'])
    else:
      assert kept.state == ['here']
    kept.close()


def test_files_that_lack_what_was_written_are_refused(tmp_path):
  config = run_config.build(common.quicktest(common.base()))
  recording = Recording(tmp_path, config)
  recording.happened(0.0, 'syncer', 'started')
  place = recording.place()
  recording.happened(1.0, 'syncer', 'killed')
  recording.close()
  Recording(tmp_path, config, place).close()
  assert len(Workdir(tmp_path).events.read_text().splitlines()) == 1
  Workdir(tmp_path).events.write_text('')
  with pytest.raises(ConfigError, match='shorter than at the checkpoint'):
    Recording(tmp_path, config, place)


@pytest.mark.parametrize('called', [os.system, print, run_config.flat])
def test_a_checkpoint_can_call_nothing(called):
  class Calls:
    def __reduce__(self):
      return called, ('true',)

  with pytest.raises(UNREADABLE, match='no class of a checkpoint'):
    unpack(pack({'state': Calls()}))
