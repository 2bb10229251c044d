# SPDX-License-Identifier: Apache-2.0
"""Nothing can be saved, and the run trains all the same."""

import pytest
from absl import logging

from diloco.metrics.workdir import learner_name
from tests.in_process.in_process import LEARNERS, Run
from tests.transport.faulty import Faults

pytestmark = pytest.mark.beside


@pytest.fixture(scope='module')
def without_disk(tmp_path_factory):
  """A run that finds files where the checkpoints should lie."""
  folder = tmp_path_factory.mktemp('without_disk')
  warned = []
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(logging, 'warning', lambda *words: warned.append(words))
    run = Run(
      folder,
      Faults(),
      checkpoint={'learner_every_steps': 10, 'syncer_every_rounds': 4},
      quorum=LEARNERS,
      overlap_steps=0,  # Neither trains alone: both save.
    )
    run.workdir.syncer.mkdir(exist_ok=True)
    (run.workdir.syncer / 'states').write_text('no folder')
    for learner in range(LEARNERS):
      path = run.workdir.checkpoints(learner_name(learner))
      path.parent.mkdir(exist_ok=True)
      path.write_text('no folder')
    run.finish()
  return run, [str(words[0]) % words[1:] for words in warned]


def test_training_goes_on(without_disk):
  run, _ = without_disk
  assert [left.reason for left in run.left] == ['run is over'] * LEARNERS
  assert run.workdir.summary.exists()


def test_every_learner_says_so(without_disk):
  run, _ = without_disk
  for learner in range(LEARNERS):
    folder = str(run.workdir.checkpoints(learner_name(learner)))
    said = [line for line in run.said if folder in line]
    assert any('could not be written' in line for line in said), run.said


def test_the_syncer_says_so(without_disk):
  _, warned = without_disk
  assert any(
    'states' in line and 'could not be written' in line for line in warned
  ), warned
