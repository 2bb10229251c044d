# SPDX-License-Identifier: Apache-2.0
"""The loss plot: the global model as a curve, before the learners."""

import json
import pathlib

import numpy as np
import pytest

from diloco.metrics import names
from diloco.metrics.status import Evaluation
from diloco.metrics.workdir import EVALUATOR, Workdir, learner_name
from launch import plot

EVALUATION = Evaluation(1, 5.5, 1.5, None, None)


def _write(path: pathlib.Path, records):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(json.dumps(each) + '\n' for each in records))


@pytest.fixture(name='workdir')
def fixture_workdir(tmp_path):
  workdir = Workdir(tmp_path)
  for learner in range(2):
    steps = [
      {
        names.TIME: 100.0 + step / 10 + learner,
        names.INCARNATION: 1,
        names.GLOBAL_STEP: step,
        names.TRAIN_LOSS: 5.0 / (1 + step),
      }
      for step in range(0, 200, 10)
    ]
    _write(workdir.metrics(learner_name(learner)), steps)
  _write(workdir.events, [])
  return workdir


def _global(workdir):
  page = plot.picture('name', plot.curves(workdir, 2), EVALUATION)
  page.canvas.draw()
  (panel,) = page.axes  # Losses are compared in one.
  (line,) = (
    line
    for line in panel.lines
    if str(line.get_label()).startswith('global model')
  )
  return line, page


def test_the_evaluations_beside_the_run_are_a_curve(workdir):
  evaluations = [
    {names.TIME: 100.0 + at_s, names.EVAL_LOSS: loss}
    for at_s, loss in ((4.0, 3.0), (8.0, 2.0), (90.0, 1.5))
  ]
  _write(workdir.metrics(EVALUATOR), evaluations)
  line, page = _global(workdir)
  np.testing.assert_allclose(line.get_xdata(), [0.0, 4.0, 8.0, 20.0])
  np.testing.assert_allclose(line.get_ydata(), [5.5, 3.0, 2.0, 1.5])
  assert line.get_linestyle() == '-'
  assert line.get_zorder() > max(
    each.get_zorder() for each in page.axes[0].lines if each is not line
  )
  (above,) = page.axes[0].child_axes
  assert above.get_xticklabels()[0].get_text() == '0'


def test_start_and_end_alone_are_not_joined(workdir):
  line, _ = _global(workdir)
  np.testing.assert_allclose(line.get_ydata(), [5.5, 1.5])
  assert line.get_linestyle() == 'None'
