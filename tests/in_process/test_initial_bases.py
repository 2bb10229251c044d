# SPDX-License-Identifier: Apache-2.0
"""On a CPU the first bases share memory with θ: no step may write there."""

import math

import pytest

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.config import run_config
from diloco.data import pipeline
from diloco.learner import restore
from diloco.learner.programs import LearnerPrograms
from diloco.learner.train_state import DoubleBuffer, SteppingState
from diloco.numerics import payload
from diloco.protocol import host_messages
from diloco.run.spec import make_run_spec
from experiments import tests_tiny

pytestmark = pytest.mark.beside

STEPS = 3


def test_steps_leave_the_first_bases_as_they_were(tmp_path):
  run_spec = make_run_spec(run_config.build(tests_tiny.get_config()))
  programs = LearnerPrograms(run_spec)
  records = LearnerRecords(tmp_path, 0, run_spec.fingerprints, 1, say=print)
  restored = restore.restore(run_spec, programs, records)
  holder = DoubleBuffer(programs)
  learner = SteppingState(run_spec, 0, programs, restored, records)
  learner.perform(host_messages.DrawTheta())
  params, state = learner.params, learner.inner_state
  batches = pipeline.batches(run_spec.dataset(0), 0, run_spec.config.data.batch)
  for step in range(STEPS):
    placed = programs.put_batch(next(batches))
    params, state, metrics = holder.step(params, state, placed, 0.1, (0, step))
  assert math.isfinite(metrics['loss'])
  batches.close()
  held = restored.host.held()
  for base, pieces in zip(held, run_spec.layout.fragments, strict=True):
    assert payload.crc(base.theta, pieces) == base.crc
