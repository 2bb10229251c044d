# SPDX-License-Identifier: Apache-2.0
"""`python -m diloco.simulate`, in processes of its own as users start it."""

import re

import pytest

from diloco.metrics.run_progress import LOG_EVERY_S
from tests import commands

CONFIG = '--config=experiments/heterogeneous.py'
TINY = (
  CONFIG,
  "--config.study.settings=('K=1 grace',)",
  '--config.study.steps=20',
  '--config.study.seeds=1',
)


def start(*argv):
  return commands.python('-m', 'diloco.simulate', *argv)


def refused(*argv, main='diloco.simulate') -> str:
  return '\n'.join(commands.refused('-m', main, *argv))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('simulate')


@pytest.fixture(scope='module')
def done(folder):
  """Runs the study once, with its report in `folder`/one."""
  return start(*TINY, f'--outdir={folder / "one"}')


def test_the_same_seed_gives_the_same_bytes(folder, done):
  assert done.returncode == 0, done.stderr
  assert start(*TINY, f'--outdir={folder / "two"}').stdout == done.stdout
  assert len(done.stdout) > 500
  for path in (folder / 'one').iterdir():
    same = folder / 'two' / path.name
    assert path.read_bytes() == same.read_bytes(), path.name


def test_it_says_where_the_page_lies_and_how_to_get_it_again(folder, done):
  said = done.stderr.splitlines()
  assert said[-2] == f'page: {folder / "one" / "page.html"}'
  wall_s = float(re.fullmatch(r'wall time: ([0-9.]+) s', said[-1])[1])
  assert len(said) == 2 or wall_s >= LOG_EVERY_S - 1, 'a short study says more'
  command = (
    'python -m diloco.simulate --config=experiments/heterogeneous.py '
    "'--config.study.settings=('\"'\"'K=1 grace'\"'\"',)' "
    '--config.study.steps=20 --config.study.seeds=1'
  )
  assert f'Again: {command}' in done.stdout


def test_mistakes_end_in_one_line_each(tmp_path):
  out = f'--outdir={tmp_path / "out"}'
  assert refused(out) == (
    'error: --config: is missing, such as --config=experiments/goodput.py'
  )
  assert refused(CONFIG, out, 'more') == 'error: more: unexpected argument'
  assert refused(CONFIG, out, '--config.study.step=3') == (
    'error: --config.study.step=3: unknown key study.step, did you mean '
    'study.steps?'
  )
  assert refused(
    CONFIG, out, '--config.study.seeds=0', '--config.fleet.slow_learners=9'
  ).splitlines() == [
    'error: study.seeds=0: must be at least 1',
    'error: fleet.slow_learners=9: there are protocol.learners=8',
  ]
  assert not (tmp_path / 'out').exists()


def test_a_folder_that_can_not_be_written_is_refused_at_once(tmp_path):
  (tmp_path / 'file').write_text('')
  for name in ('file', 'file/below'):
    path = tmp_path / name
    assert refused(*TINY, f'--outdir={path}').startswith(
      f'error: --outdir={path}: '
    )


@pytest.mark.parametrize('name', ['quickstart', 'tests_tiny'])
def test_the_configuration_of_a_training_run_is_told_where_it_belongs(
  name, tmp_path
):
  assert refused(f'--config=experiments/{name}.py', f'--outdir={tmp_path}') == (
    'error: this configuration is of a training run, which launch.local '
    'starts; a simulation takes one with a section study, such as '
    'experiments/goodput.py, experiments/bandwidth.py, '
    'experiments/heterogeneous.py, experiments/scavenging.py'
  )


def test_the_launcher_says_so_of_a_simulation(tmp_path):
  workdir = f'--workdir={tmp_path / "run"}'
  assert refused(CONFIG, workdir, main='launch.local') == (
    'error: this configuration is of a simulation, not of a training run: '
    'start it with python -m diloco.simulate --config=…'
  )
  assert not (tmp_path / 'run').exists()


def test_a_check_that_fails_ends_with_1(tmp_path):
  """A planted fault: another pause."""
  done = start(
    '--config=experiments/goodput.py:quicktest',
    "--config.study.systems=('elastic data-parallel',)",
    '--config.study.chips=(2_400_000,)',
    '--config.failures.pause_s=30.0',
    f'--outdir={tmp_path}',
    '--check',
  )
  assert done.returncode == 1, done.stderr
  assert 'IT DOES NOT HOLD' in done.stdout
  assert done.stdout.splitlines()[-1].endswith(' --check')


def test_a_folder_that_is_no_run_is_refused(tmp_path):
  said = refused(f'--replay={tmp_path}')
  assert said.startswith('error: replay: ')
  assert str(tmp_path) in said
