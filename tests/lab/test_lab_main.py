# SPDX-License-Identifier: Apache-2.0
"""`python -m diloco.lab` as users start it, with a sweep of their own."""

import fcntl
import re

import pytest

from diloco.checkpoint.parameters import read_parameters
from diloco.lab.run import crc
from diloco.metrics import recorded_run
from diloco.metrics.workdir import Workdir
from diloco.sweeps import making, sweep
from tests.commands import output, python, refused

EXPERIMENT = """
from experiments import common

def get_config(arg=None):
  config = common.quicktest(common.base())
  config.model.layers = 1
  config.protocol.total_steps = 8
  return config

def sweep(add):
  add('data-parallel', {'lab.system': 'data_parallel'})
  add('int8', {'codec.up': 'int8', 'outer.lr': 0.5}, against='data-parallel')
"""


def start(*argv):
  return python('-m', 'diloco.lab', *argv)


@pytest.mark.soak
def test_a_sweep_is_made_once(tmp_path):
  config = tmp_path / 'mine.py'
  config.write_text(EXPERIMENT)
  argv = (
    f'--config={config}', f'--workdir={tmp_path / "runs"}', '--sweep',
    '--seeds=1',
  )  # fmt: skip
  first = start(*argv)
  assert first.returncode == 0, first.stderr
  losses = {
    label: sweep.read(tmp_path / 'runs', label, 0).loss
    for label in ('data-parallel', 'int8')
  }
  difference = 100 * (losses['int8'] / losses['data-parallel'] - 1)
  row = next(x for x in first.stdout.splitlines() if x.startswith('int8'))
  assert f'{losses["int8"]:.4f}' in row
  assert f'{difference:+.2f}' in row
  assert '2/2' in first.stderr

  run = sweep.folder(tmp_path / 'runs', 'int8', 0)
  recorded = recorded_run.read(run)
  assert {step.learner for step in recorded.steps} == {0, 1}
  assert len(recorded.rounds) == sweep.read_from(run).rounds
  assert recorded.ended
  assert recorded.status.heldout_loss == losses['int8']
  assert [*run.glob('tensorboard/learner-0/events*')]
  said = (run / 'log').read_text()
  assert re.search(r'step 8/8  loss [0-9.]+  held out', said), said
  assert '●●' in said
  assert not Workdir(run).parameters.exists(), 'of a sweep'

  again = start(*argv)
  assert again.stdout == first.stdout
  assert '1/' not in again.stderr, 'made again'


def test_the_model_of_a_run_can_be_sampled(tmp_path):
  config = tmp_path / 'mine.py'
  config.write_text(EXPERIMENT)
  made = start(f'--config={config}', f'--workdir={tmp_path / "run"}')
  assert made.returncode == 0, made.stderr
  assert 'orbax' not in made.stderr
  parameters = read_parameters(Workdir(tmp_path / 'run').parameters)
  assert f'parameters {crc(parameters):08x}' in made.stdout
  words = '--length=5', '--prompt=abc', f'--workdir={tmp_path / "run"}'
  assert output('-m', 'diloco.generate', *words).startswith('abc')


def test_two_sweeps_do_not_share_a_folder(tmp_path):
  config = tmp_path / 'mine.py'
  config.write_text(EXPERIMENT)
  with (tmp_path / making.LOCK).open('a') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    flags = f'--config={config}', f'--workdir={tmp_path}', '--sweep'
    [said] = refused('-m', 'diloco.lab', *flags, '--seeds=1')
  assert f'{tmp_path}: another sweep is making runs there' in said
  assert not sweep.folder(tmp_path, 'int8', 0).exists()
