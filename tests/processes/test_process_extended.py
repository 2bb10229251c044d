# SPDX-License-Identifier: Apache-2.0
"""A run that is over goes on, where it is given more steps."""

import pytest

from diloco.metrics.status import read_evaluation, read_summary
from tests.processes.processes import Processes

pytestmark = pytest.mark.beside

FIRST, SECOND = 60, 120
EVERY = (
  'run.compilation_cache=false',
  'protocol.quorum=2',
  'protocol.patience=30.0',
  'protocol.overlap_steps=0',  # Neither trains before the other is there.
  'checkpoint.learner_every_steps=10',
)


@pytest.fixture(scope='module')
def extended(tmp_path_factory):
  """A run of `FIRST` steps, and the summary it left, extended to `SECOND`."""
  with Processes(tmp_path_factory.mktemp('extended'), *EVERY) as processes:
    summaries = []
    for steps in (FIRST, SECOND):
      launcher = processes.start(
        f'launcher-{steps}',
        'launch.local',
        f'--config.protocol.total_steps={steps}',
      )
      code = processes.exit_code(launcher, deadline_s=280.0)
      assert code == 0, processes.tails()
      summaries.append(read_summary(processes.workdir.summary))
    yield processes, *summaries


def test_it_has_made_the_steps_of_both(extended):
  processes, first, second = extended
  assert FIRST <= first.step < second.step
  assert second.step >= SECOND
  rounds = [line['round'] for line in processes.tape('Publish')]
  assert rounds == list(range(1, second.rounds + 1))
  assert second.rounds > first.rounds
  assert len(processes.tape('End')) == 2
  for before, after in zip(first.learners, second.learners, strict=True):
    assert after.steps > before.steps
    assert after.rounds > before.rounds
    assert after.rounds == len(processes.merged(after.learner))
    assert after.incarnations == before.incarnations + 1


def test_learners_go_on_from_their_checkpoints(extended):
  processes, _, second = extended
  said = [each.beginning for each in second.learners]
  assert any('checkpoint' in each for each in said), said
  evaluation = read_evaluation(processes.workdir.evaluation)
  assert evaluation.final_loss < evaluation.initial_loss


def test_a_replay_says_that_it_can_not(extended):
  processes, _, _ = extended
  replay = processes.start_without_config('replay', 'diloco.replay')
  assert processes.exit_code(replay) == 78
  [error] = replay.errors
  assert f'extended from {FIRST} to {SECOND} steps' in error
