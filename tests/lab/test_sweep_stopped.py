# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C of a sweep: its runs end, and no other begins."""

import os
import pathlib

import pytest

from diloco.config import flags
from diloco.lab import sweep, sweep_runner
from tests import waiting

pytestmark = pytest.mark.beside

JOBS = 2
ROWS = [sweep.Variant(f'M = {number}', {}) for number in range(1, 5)]


def test_ctrl_c_ends_the_runs_and_begins_no_other(
  tmp_path, monkeypatch, capsys
):
  begun = _run_in_place_of_python(tmp_path, monkeypatch)

  def interrupted(_):
    waiting.until(lambda: len(_pids(begun)) == JOBS, 60, 'the first runs')
    raise KeyboardInterrupt

  monkeypatch.setattr(sweep_runner.futures, 'as_completed', interrupted)
  with pytest.raises(KeyboardInterrupt):
    sweep_runner.make(ROWS, 1, JOBS, tmp_path / 'runs')
  assert len(_pids(begun)) == JOBS
  for pid in _pids(begun):
    with pytest.raises(ProcessLookupError):
      os.kill(pid, 0)
  said = capsys.readouterr().err
  assert f'4 runs, 2 at a time; logs: {tmp_path}/runs/*/seed-*/log' in said
  assert 'the same command goes on with the sweep' in said


def test_ctrl_c_of_a_command_is_no_traceback(monkeypatch, capsys):
  def interrupted(_):
    raise KeyboardInterrupt

  codes = []
  monkeypatch.setattr(flags.os, '_exit', codes.append)
  flags._or_exit(interrupted)([])
  assert codes == [130]
  assert capsys.readouterr().err == 'stopped\n'


def _run_in_place_of_python(tmp_path, monkeypatch) -> pathlib.Path:
  """Makes runs processes that sleep, and returns the file of their pids."""
  begun, program = tmp_path / 'begun', tmp_path / 'python'
  begun.touch()
  program.write_text(f'#!/bin/sh\necho $$ >>{begun}\nexec sleep 20\n')
  program.chmod(0o755)
  monkeypatch.setattr(sweep_runner.sys, 'executable', str(program))
  monkeypatch.setattr(sweep_runner.flags, 'arguments', list)
  return begun


def _pids(begun: pathlib.Path) -> list[int]:
  return [int(line) for line in begun.read_text().splitlines()]
