# SPDX-License-Identifier: Apache-2.0
"""A state from the memory of slices is in that of a world before it steps.

The slice that gave it may be lost at once.
"""

import json

import jax
import numpy as np
import pytest

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.config import run_config
from diloco.learner import restore
from diloco.learner.hosts.boundary_memory import BoundaryMemory
from diloco.learner.programs import LearnerPrograms
from diloco.learner.train_state import SteppingState
from diloco.protocol import host_messages
from diloco.run.spec import make_run_spec
from experiments import tests_tiny

pytestmark = pytest.mark.beside

STEP = 7
PROGRESS = {
  'process': 5, 'rows': 14, 'step': STEP, 'tokens': 448, 'versions': [0, 0],
  'crcs': [1, 2], 'from_steps': [0, 0], 'from_tokens': [0, 0],
  'closed_known': 0, 'global_step': STEP,
}  # fmt: skip


def test_a_restored_boundary_is_written_before_the_first_step(tmp_path):
  run_spec = make_run_spec(run_config.build(tests_tiny.get_config()))
  programs = LearnerPrograms(run_spec)
  records = LearnerRecords(tmp_path, 0, run_spec.fingerprints, 1, say=print)
  giver, taker = (BoundaryMemory(tmp_path / x, 0, 0, {}) for x in 'gt')

  def state_of(restored, memory):
    return SteppingState(run_spec, 0, programs, restored, records, memory)

  first = state_of(restore.restore(run_spec, programs, records), giver)
  assert giver.write() is None, 'nothing was restored'
  first.perform(host_messages.DrawTheta())
  first.perform(host_messages.Reform(1, json.dumps(PROGRESS)))
  assert giver.write() == STEP
  source = host_messages.RestoreFrom(STEP, 0, True, json.dumps(PROGRESS))
  restored = restore.restore(
    run_spec, programs, records, source, giver.read()
  )
  state_of(restored, taker)
  assert taker.write() == STEP
  stored = taker.read()
  assert json.loads(stored.progress) == PROGRESS
  for path, x in first.params.items():
    box = tuple((0, n) for n in x.shape)
    found = stored.read(f'params/{path}', box)
    np.testing.assert_array_equal(found, jax.device_get(x))
  assert stored.bases.keys() == {0, 1}
