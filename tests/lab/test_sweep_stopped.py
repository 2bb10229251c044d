# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C of a sweep: its runs end, and no other begins."""

import os
import pathlib

import pytest

from diloco.lab import sweep_runner
from diloco.sweeps import making, sweep
from experiments import common
from tests import waiting
from tests.commands import python

pytestmark = pytest.mark.beside

ROOT = pathlib.Path(__file__).parents[2]
JOBS = 2
ROWS = [sweep.Variant(f'M = {number}', {}) for number in range(1, 5)]


def test_ctrl_c_ends_the_runs_and_begins_no_other(
  tmp_path, monkeypatch, capsys
):
  begun = _run_in_place_of_python(tmp_path, monkeypatch)

  def interrupted(_):
    monkeypatch.undo()
    waiting.until(lambda: len(_pids(begun)) == JOBS, 60, 'the first runs')
    raise KeyboardInterrupt

  monkeypatch.setattr(sweep_runner.time, 'sleep', interrupted)
  with pytest.raises(KeyboardInterrupt):
    sweep_runner.make(_asked(tmp_path / 'runs'), JOBS)
  assert len(_pids(begun)) == JOBS
  assert not any(map(_lives, _pids(begun)))
  said = capsys.readouterr().err
  assert f'4 runs, 2 at a time; logs: {tmp_path}/runs/*/seed-*/log' in said
  assert 'the same command goes on with the sweep' in said


def test_ctrl_c_of_a_command_is_no_traceback_and_leaves_no_process():
  code = """
import multiprocessing, time
from diloco.config import flags

def work(_):
  spawn = multiprocessing.get_context('fork').Process
  child = spawn(target=time.sleep, args=[99])
  child.start()
  print(child.pid, flush=True)
  raise KeyboardInterrupt

flags._or_exit(work)([])
"""
  done = python('-c', code)  # A child that is left would keep its output open.
  assert (done.returncode, done.stderr) == (130, 'stopped\n')
  waiting.until(
    lambda: not _lives(int(done.stdout)), 60, 'the end of the child'
  )


def _asked(root: pathlib.Path) -> making.Sweep:
  base = common.base().to_dict()
  made = making.make_configs(base, ROWS)
  return making.Sweep(root, tuple(ROWS), made, (0,))


def _run_in_place_of_python(tmp_path, monkeypatch) -> pathlib.Path:
  """Makes runs processes that sleep, and returns the file of their pids."""
  begun, program = tmp_path / 'begun', tmp_path / 'python'
  begun.touch()
  program.write_text(f'#!/bin/sh\necho $$ >>{begun}\nexec sleep 600\n')
  program.chmod(0o755)
  monkeypatch.setattr(sweep_runner.sys, 'executable', str(program))
  monkeypatch.setattr(making.flags, 'arguments', list)
  return begun


def _pids(begun: pathlib.Path) -> list[int]:
  return [int(line) for line in begun.read_text().splitlines()]


def _lives(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True
