# SPDX-License-Identifier: Apache-2.0
"""A learner that is stopped while its syncer is away keeps its last step."""

import pytest

from diloco.checkpoint import store
from diloco.metrics.workdir import learner_name
from tests.in_process.in_process import DEADLINE_S, Run
from tests.transport.faulty import Faults

pytestmark = pytest.mark.beside


@pytest.mark.parametrize('overlap_steps', [0, 1])
def test_its_last_step_is_in_its_checkpoint(tmp_path, overlap_steps):
  run = Run(
    tmp_path,
    Faults(),
    step_floor_s=0.02,
    checkpoint={'learner_every_steps': 10_000},
    overlap_steps=overlap_steps,
    total_steps=100_000,
  )
  run.start_syncer()
  living = run.start(0)
  run.until_merged(living)
  run.syncing.stop()
  run._syncer.join(DEADLINE_S)
  run.syncing.close()
  run.until(
    lambda: not living.exchange.machine_state().connected, 'it is cut off'
  )
  living.training.stop()
  living.thread.join(DEADLINE_S)
  assert living.left is not None and living.left.stopped
  folder = run.workdir.checkpoints(learner_name(0))
  newest = store.newest_after(folder, -1)
  run.close()
  assert newest is not None, run.said
  assert newest.step == living.training._step
  state = living.exchange.machine_state()
  assert state.completed_step == newest.step
