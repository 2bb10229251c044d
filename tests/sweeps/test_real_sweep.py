# SPDX-License-Identifier: Apache-2.0
"""A sweep of real runs, which are stood for by the records that they leave."""

import signal

import pytest

from diloco.config.sections import ConfigError
from diloco.sweeps import making, sweep
from diloco.sweeps.sweep import Variant
from experiments import tests_tiny
from launch import local, real_sweep
from launch import program as launch_program
from tests.sweeps import made_runs

pytestmark = pytest.mark.beside

ROWS = (
  Variant('outer.lr = 0.3', {'outer.lr': 0.3}),
  Variant('outer.lr = 0.6', {'outer.lr': 0.6}, 'outer.lr = 0.3'),
)
SEEDS = 2


def asked(root) -> making.Sweep:
  base = tests_tiny.get_config().to_dict()
  made = making.make_configs(base, ROWS)
  return making.Sweep(root, tuple(ROWS), made, tuple(range(SEEDS)))


class Runs:
  """Stands for the launcher.

  Args:
    codes: exit codes by the run's number; 0 unless given.
  """

  def __init__(self, codes=None):
    self.made: list[str] = []
    self._codes = codes or {}

  def __call__(self, run, tell) -> int:
    code = self._codes.get(len(self.made), 0)
    self.made.append(run.name)
    if code == 0:
      loss = 2.0 if run.config.outer.lr == 0.3 else 1.8
      made_runs.write(run.workdir, run.config, loss + 0.1 * run.seed)
    return code


def test_every_variant_and_seed_is_made_once(tmp_path, capsys):
  runs = Runs()
  assert real_sweep.make(asked(tmp_path), runs) == 0
  assert runs.made == [
    'outer.lr = 0.3, seed 0', 'outer.lr = 0.6, seed 0',
    'outer.lr = 0.3, seed 1', 'outer.lr = 0.6, seed 1',
  ]  # fmt: skip
  shown = capsys.readouterr()
  assert '4 runs, one at a time' in shown.err
  assert '1/4, about ' in shown.err
  assert 'outer.lr = 0.6, seed 1: loss 1.9000, 0:0' in shown.err
  # −10 % and −9.52 %: their mean, and t · s / √2 with t = 12.706.
  assert '-9.76 ± 3.03 %' in shown.out
  again = Runs()
  assert real_sweep.make(asked(tmp_path), again) == 0
  assert not again.made
  assert capsys.readouterr().out == shown.out


def test_a_run_that_fails_is_named_and_the_others_are_made(tmp_path, capsys):
  runs = Runs({1: 1})
  assert real_sweep.make(asked(tmp_path), runs) == 1
  assert len(runs.made) == 4
  said = capsys.readouterr().err
  folder = sweep.folder(tmp_path, 'outer.lr = 0.6', 0)
  assert 'outer.lr = 0.6, seed 0: failed' in said
  assert (
    f'failed: outer.lr = 0.6, seed 0; see {folder}/logs/launcher.log' in said
  )
  again = Runs()
  assert real_sweep.make(asked(tmp_path), again) == 0
  assert again.made == ['outer.lr = 0.6, seed 0']


def test_a_run_with_broken_records_is_a_failed_one(tmp_path, capsys):
  def broken(run, tell) -> int:
    made_runs.write(run.workdir, run.config, 2.0)
    run.workdir.summary.write_text('{')
    return 0

  assert real_sweep.make(asked(tmp_path), broken) == 1
  assert 'summary.json: ' in capsys.readouterr().err


def test_a_run_that_a_signal_stops_is_the_last(tmp_path, capsys):
  runs = Runs({1: 128 + signal.SIGTERM})
  assert real_sweep.make(asked(tmp_path), runs) == 128 + signal.SIGTERM
  assert len(runs.made) == 2
  shown = capsys.readouterr()
  assert 'stopped by SIGTERM; no process is left' in shown.err
  assert 'the same command goes on with the sweep' in shown.err
  assert shown.out == ''


def _check(root, of_processes):
  made = making.make_configs(tests_tiny.get_config().to_dict(), ROWS)
  making.check(made, ROWS, range(SEEDS), root, of_processes)


def test_a_finished_run_of_processes_is_none_of_the_lab(tmp_path):
  real_sweep.make(asked(tmp_path), Runs())
  _check(tmp_path, of_processes=True)
  with pytest.raises(ConfigError, match=r'otherwise \(by processes\)'):
    _check(tmp_path, of_processes=False)


def test_a_run_that_is_over_without_a_result_is_looked_at(tmp_path):
  """It is not made again; so it must be the one that is asked for."""
  [run, other, *_] = asked(tmp_path).runs
  made_runs.write(run.workdir, run.config, 2.0)
  _check(tmp_path, of_processes=True)
  assert real_sweep.make_run(run, lambda _: None) == 0
  made_runs.write(run.workdir, other.config, 2.0)
  with pytest.raises(ConfigError, match=r'outer\.lr=0\.6 there, 0\.3 here'):
    _check(tmp_path, of_processes=True)


def test_all_runs_share_what_is_compiled(tmp_path, monkeypatch):
  [run, *_] = asked(tmp_path).runs
  seen = []

  def take(config, parts, *rest):
    seen.append(parts)
    return 0

  def read_program(config, workdir, address, arguments):
    return launch_program.program(config, arguments, workdir, address)

  monkeypatch.setattr(local, 'run', take)
  monkeypatch.setattr(local, 'read_program', read_program)
  monkeypatch.setattr(local, 'accelerators', lambda _: None)
  monkeypatch.setattr(making.flags, 'arguments', list)
  assert real_sweep.make_run(run, lambda _: None) == 0
  [parts] = seen
  assert dict(parts.environment)['JAX_COMPILATION_CACHE_DIR'] == str(
    tmp_path / 'compiled'
  )
  syncer = parts.roles[0].argv
  assert {'--config.outer.lr=0.3', '--config.seed=0'} < set(syncer)
  assert f'--workdir={run.workdir.root}' in syncer
  log = (run.workdir.root / real_sweep.LOG).read_text()
  assert 'the syncer listens at' in log
