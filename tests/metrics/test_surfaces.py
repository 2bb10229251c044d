# SPDX-License-Identifier: Apache-2.0
"""A second formula of a figure is noticed, wherever it is planted."""

import dataclasses
import io

import pytest
import rich.console

from diloco.metrics import figures, names, status
from diloco.metrics.workdir import SYNCER
from diloco.metrics.writer import TensorBoardWriter
from launch import progress
from tests.metrics import surfaces
from tests.prediction import recorded
from tests.watch.test_followed_run import told

EVALUATION = status.Evaluation(2_000, 5.5, 1.5, 2.0, None)
SURFACES = (
  'page', '/metrics', 'TensorBoard', 'W&B', 'status.json', 'summary.json',
)  # fmt: skip


@pytest.fixture(scope='module', name='run')
def fixture_run(tmp_path_factory):
  """A run that is over: its folder, and what was printed at its end."""
  workdir = recorded.write(tmp_path_factory.mktemp('runs') / 'run', 10.0, {})
  over = told(60, 10.0)
  learner = dataclasses.replace(over.learners[0], tokens=12 * 128)
  over = dataclasses.replace(
    over, finished=True, elapsed_s=10.0, learners=(learner,)
  )
  status.write_status(workdir.status, over)
  status.write_summary(workdir.summary, over)
  board = TensorBoardWriter(workdir.tensorboard(SYNCER))
  board.write_scalars(60, {names.TIME: 1.0, **figures.curves(over)})
  board.close()
  console = rich.console.Console(file=io.StringIO(), width=120)
  console.print(progress.report(workdir, over, EVALUATION, 'loss.png'))
  return workdir, console.file.getvalue()


def test_all_surfaces_agree(run):
  workdir, printed = run
  found = surfaces.shown(workdir)
  assert set(found) == set(SURFACES)
  assert all(len(numbers) >= 5 for numbers in found.values())
  assert not surfaces.differing(status.of_run(workdir), found, printed)


@pytest.mark.parametrize('surface', SURFACES)
def test_tokens_of_steps_times_a_constant_are_noticed(run, surface):
  workdir, printed = run
  found = surfaces.shown(workdir)
  found[surface]['tokens'] = 60 * 128.0  # There was a second learner.
  own = status.of_run(workdir)
  assert surfaces.differing(own, found, printed) == {(surface, 'tokens')}


def test_another_number_in_the_end_table_is_noticed(run):
  workdir, printed = run
  own, found = status.of_run(workdir), surfaces.shown(workdir)
  doctored = printed.replace('90.0%', '89.9%')  # Its goodput.
  assert surfaces.differing(own, found, doctored) == {('terminal', 'goodput')}
