# SPDX-License-Identifier: Apache-2.0
"""Checks what a run shows as it goes, and what it writes into its folder."""

import io

import pytest

from diloco.config import run_config
from diloco.config.sections import ConfigError
from diloco.lab.outputs import Point, Recording, ShownProgress
from diloco.metrics import names
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.run_progress import ProgressLine
from diloco.metrics.workdir import Workdir
from experiments import common


def _scalars(step: int) -> dict[str, float]:
  return {
    names.TIME: float(step),
    names.GLOBAL_STEP: step,
    names.TRAIN_LOSS: 2.5,
  }


class _Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


@pytest.mark.parametrize('stream', [io.StringIO, _Terminal])
def test_progress_is_said_and_an_evaluation_stays(stream):
  file = stream()
  shown = ShownProgress(2, 20, ProgressLine(file))
  shown.happened(0.0, 'learner-0', 'started')
  for step in range(1, 21):
    shown.stepped(0, step, _scalars(step))
  shown.evaluated(Point(20, 100, 1.25, 20.0, 1.5))
  shown.close()
  said = file.getvalue()
  line = 'step 20/20  loss 2.5000  held out 1.2500  ●○  20 s simulated\n'
  assert said.endswith(line)
  assert ('step 1/20  loss 2.5000  ●○  1 s simulated' in said) == file.isatty()


def _config():
  config = common.quicktest(common.base())
  config.run.log_every_steps = 5
  return run_config.build(config)


def test_an_evaluation_stands_in_the_record_of_the_step_before(tmp_path):
  recording = Recording(tmp_path, _config())
  for step in range(1, 8):
    recording.stepped(0, step, _scalars(step))
    if step == 3:
      recording.evaluated(Point(3, 100, 1.25, 3.0, 1.5))
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
