# SPDX-License-Identifier: Apache-2.0
"""The result of a run of processes, from records that were written by hand."""

import dataclasses
import math

import pytest

from diloco.config import run_config
from diloco.metrics.workdir import Workdir, learner_name
from diloco.sweeps import recorded_result, sweep
from diloco.sweeps.sweep import BadResult
from experiments import tests_tiny
from tests.sweeps import made_runs

CONFIG = run_config.build(tests_tiny.get_config())


@pytest.fixture(name='workdir')
def fixture_workdir(tmp_path):
  workdir = Workdir(tmp_path / 'run')
  made_runs.write(workdir, CONFIG, 2.5)
  return workdir


def test_a_result_is_what_the_records_say(workdir):
  found = recorded_result.read(workdir, CONFIG)
  assert (found.loss, found.rounds, found.wall_s) == (2.5, 2, 8.5)
  assert found.goodput == 0.75
  assert found.participation == (2 + 1) / (2 * 2)
  assert found.age_steps == pytest.approx((1.25 + 1.25 + 1.75) / 3)
  assert found.old_share == 1 / 3
  # Of fragment 0 4 steps of both, of fragment 1 6 steps of one.
  assert found.merged_tokens == (2 * 4 + 6) * made_runs.TOKENS / 2
  # From 4 to 7 at both learners, from 6 to 8 at one.
  assert found.delay_steps == pytest.approx((3 + 3 + 2) / 3)
  assert found.unexplained_tokens == 0


def test_the_curve_begins_ends_and_has_what_was_evaluated_between(workdir):
  """The Θ of step 4 was published after 5 seconds, so after 10 steps of 16.

  What the evaluator measured of the last Θ is the run's own loss again.
  """
  whole = 2 * made_runs.STEPS * made_runs.TOKENS
  assert recorded_result.read(workdir, CONFIG).curve == (
    (0, 0, 6.0),
    (4, whole * 10 // 16, 5.0),
    (made_runs.STEPS, whole, 2.5),
  )


def test_without_records_of_steps_tokens_follow_the_global_step(workdir):
  """There are none with `run.log_every_steps` above the steps of the run."""
  for learner in (0, 1):
    workdir.metrics(learner_name(learner)).write_text('')
  _, (step, tokens, _), (total_steps, total_tokens, _) = recorded_result.read(
    workdir, CONFIG
  ).curve
  assert tokens == total_tokens * step / total_steps


def test_the_learners_mean_is_not_known(workdir):
  """It is written and read as such, and no number."""
  found = recorded_result.read(workdir, CONFIG)
  assert math.isnan(found.learners_loss)
  sweep.write_into(workdir.root, found)
  again = sweep.read_from(workdir.root)
  assert math.isnan(again.learners_loss)
  assert dataclasses.replace(again, learners_loss=0.0) == dataclasses.replace(
    found, learners_loss=0.0
  )


@pytest.mark.parametrize('name', ['summary', 'evaluation'])
def test_a_run_that_is_not_over_has_no_result(workdir, name):
  path = getattr(workdir, name)
  path.unlink()
  with pytest.raises(BadResult, match=f'{path}: is missing'):
    recorded_result.read(workdir, CONFIG)


@pytest.mark.parametrize('name', ['tape', 'config', 'summary'])
def test_broken_records_make_no_result(workdir, name):
  path = getattr(workdir, name)
  path.write_text('{"a\n' + path.read_text())
  with pytest.raises(BadResult, match=path.name) as refused:
    recorded_result.read(workdir, CONFIG)
  assert 'is missing' not in str(refused.value)
