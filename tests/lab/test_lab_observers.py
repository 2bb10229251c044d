# SPDX-License-Identifier: Apache-2.0
"""Checks what a run shows as it goes, and what it writes into its folder."""

import io
import re

import pytest
import rich.console

from diloco.config import run_config
from diloco.config.sections import ConfigError
from diloco.lab.outputs import Bar, Point, Recording
from diloco.metrics import names
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir
from experiments import common


def _scalars(step: int) -> dict[str, float]:
  return {
    names.TIME: float(step),
    names.GLOBAL_STEP: step,
    names.TRAIN_LOSS: 2.5,
  }


def _shown(terminal: bool) -> str:
  file = io.StringIO()
  console = rich.console.Console(
    file=file, force_terminal=terminal, width=120, legacy_windows=False
  )
  bar = Bar(2, 20, console)
  bar.happened(0.0, 'learner-0', 'started')
  for step in range(1, 21):
    bar.stepped(0, step, _scalars(step))
  bar.evaluated(Point(20, 100, 1.25, 1.5, 20.0))
  bar.close()
  return file.getvalue()


def test_plain_lines_where_nobody_looks_on():
  lines = _shown(terminal=False).splitlines()
  left = r', about \d:\d\d left'
  assert re.fullmatch(
    rf'step 2/20{left}  loss 2\.5000  ●○  2 s simulated', lines[0]
  )
  assert lines[-1] == (
    'step 20/20  loss 2.5000  held out 1.2500  ●○  20 s simulated'
  )
  assert len(lines) == 11


def test_one_bar_on_a_terminal():
  shown = _shown(terminal=True)
  assert '20/20' in shown
  assert 'held out 1.2500' in shown
  assert '\x1b[' in shown, 'nothing was drawn in place'


def _config():
  config = common.quicktest(common.base())
  config.run.log_every_steps = 5
  return run_config.build(config)


def test_an_evaluation_stands_in_the_record_of_the_step_before(tmp_path):
  recording = Recording(tmp_path, _config())
  for step in range(1, 8):
    recording.stepped(0, step, _scalars(step))
    if step == 3:
      recording.evaluated(Point(3, 100, 1.25, 1.5, 3.0))
  recording.close()
  records = read_jsonl(Workdir(tmp_path).metrics('learner-0'))
  assert [record['step'] for record in records] == [3, 5, 7]
  assert [r.get(names.EVAL_LOSS) for r in records] == [1.25, None, None]


def test_an_earlier_run_is_written_over(tmp_path):
  for _ in range(2):
    recording = Recording(tmp_path, _config())
    recording.stepped(0, 1, _scalars(1))
    recording.happened(0.0, 'syncer', 'started')
    recording.close()
  assert len(read_jsonl(Workdir(tmp_path).metrics('learner-0'))) == 1
  assert len(read_jsonl(Workdir(tmp_path).events)) == 1


def test_a_run_of_processes_is_let_be(tmp_path):
  Workdir(tmp_path).status.write_text('{}')
  with pytest.raises(ConfigError, match=r'holds a run of processes'):
    Recording(tmp_path, _config())
