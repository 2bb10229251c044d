# SPDX-License-Identifier: Apache-2.0
"""`python -m launch.local --sweep`: what it refuses before a run begins."""

import dataclasses

import pytest

from diloco.config import run_config
from diloco.metrics import files
from diloco.metrics.workdir import Workdir
from diloco.sweeps import sweep
from experiments import tests_tiny
from tests import commands

pytestmark = pytest.mark.beside

CONFIG = '--config=experiments/tests_tiny.py'
VALUES = '--sweep=outer.lr=0.3,0.6'
EXPERIMENT = """
from experiments import tests_tiny

get_config = tests_tiny.get_config

def sweep(add):
  add('decoupled', {})
  add('data-parallel', {'lab.system': 'data_parallel'}, against='decoupled')
"""


def refused(*argv) -> list[str]:
  """Returns the lines that say what is wrong."""
  return commands.refused('-m', 'launch.local', *argv)


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (
      ['--sweep=outer.lrr=0.3,0.6'],
      "sweep: 'outer.lrr = 0.3': outer.lrr: unknown key, did you mean outer.lr",
    ),
    (['--sweep=outer.lr=0.3'], '--sweep=outer.lr=0.3: must be KEY=V1,V2,…'),
    (['--sweep'], 'experiments/tests_tiny.py: has no sweep(add)'),
    (
      [VALUES, '--overwrite'],
      '--overwrite: is for a single run; remove the folder of a run',
    ),
    (
      [VALUES, '--only=0.9'],
      '--only=0.9: is in no label of the variants: outer.lr = 0.3, outer.lr',
    ),
    (['--seeds=2'], '--seeds: is for --sweep, which is not given'),
    (
      ['--sweep=lab.jitter=0.1,0.2'],
      "sweep: 'lab.jitter = 0.1': lab.jitter: only of the lab",
    ),
    (
      ['--sweep=data.path=/no/such,/no/other', '--config.data.source=text'],
      "sweep: 'data.path = /no/such': data.path='/no/such'",
    ),
    (
      ['--sweep=protocol.learners=2,3', '--hosts=1,1'],
      "sweep: 'protocol.learners = 3': --hosts=1,1: has 2 numbers",
    ),
  ],
  ids=lambda each: each[-1].partition('=')[0] if type(each) is list else '',
)
def test_a_mistake_is_named_before_a_run_begins(tmp_path, flags, message):
  said = refused(CONFIG, f'--workdir={tmp_path / "runs"}', *flags)
  assert message in said[0]
  assert len({*said}) == len(said), 'the same for each seed'
  assert not (tmp_path / 'runs').exists()


def test_a_system_of_the_lab_is_refused_and_can_be_left_out(tmp_path):
  """Processes would make the same run twice."""
  config = tmp_path / 'mine.py'
  config.write_text(EXPERIMENT)
  flags = f'--config={config}', f'--workdir={tmp_path / "runs"}', '--sweep'
  [said] = refused(*flags)
  assert "sweep: 'data-parallel': lab.system: only of the lab" in said
  [said] = refused(*flags, '--only=decoupled', '--overwrite')
  assert '--overwrite' in said


def test_the_folder_of_a_run_is_none_of_a_sweep(tmp_path):
  Workdir(tmp_path).config.write_text('{}')
  [said] = refused(CONFIG, f'--workdir={tmp_path}', VALUES)
  assert f'--workdir={tmp_path}: holds a run, a sweep needs a folder' in said


def test_what_stands_in_the_way_is_named_for_all_runs_at_once(tmp_path):
  """One folder has a stranger's file, another a run that was cut."""
  cut, foreign = (
    sweep.folder(tmp_path, f'outer.lr = {value}', 0) for value in (0.3, 0.6)
  )
  for folder in (cut, foreign):
    folder.mkdir(parents=True)
  (foreign / 'thesis.tex').write_text('x')
  given = tests_tiny.get_config()
  given.outer.lr = 0.45
  config = dataclasses.asdict(run_config.build(given))
  files.write_json(Workdir(cut).config, config)
  Workdir(cut).checkpoints('learner-0').mkdir(parents=True)  # It has begun.
  said = refused(CONFIG, f'--workdir={tmp_path}', VALUES, '--seeds=1')
  assert len(said) == 2
  assert f'{cut}: holds another run, with outer.lr: 0.3 here, 0.45' in said[0]
  assert f"{foreign}: holds 'thesis.tex', which is not of a run" in said[1]


def test_a_single_run_imports_no_scipy():
  code = 'import sys, launch.local; print("scipy" in sys.modules)'
  assert commands.output('-c', code) == 'False\n'
