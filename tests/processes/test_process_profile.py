# SPDX-License-Identifier: Apache-2.0
"""A learner that trains writes traces that JAX's profiler can read."""

import signal

import jax.profiler
import pytest

from tests.processes.processes import START_S, Processes

pytestmark = pytest.mark.soak

PROFILED = (
  'protocol.learners=1',
  'run.profile_at_step=2',
  'run.profile_steps=2',
  'run.step_floor_s=0.02',
  'protocol.total_steps=100000',
)


def test_a_trace_from_a_step_on_and_one_when_asked(tmp_path):
  with Processes(tmp_path, *PROFILED) as processes:
    folder = processes.workdir.profiles('learner-0')

    def traces():
      return sorted(folder.rglob('*.xplane.pb'))

    processes.syncer()
    learner = processes.learner(0)
    processes.until(lambda: len(traces()) == 1, START_S, 'a trace')
    made = len(processes.steps(0))
    processes.until(
      lambda: len(processes.steps(0)) > made + 2, START_S, 'it trains on'
    )
    learner.send(signal.SIGUSR1)
    processes.until(lambda: len(traces()) == 2, START_S, 'a second trace')
    made = len(processes.steps(0))
    processes.until(  # By then it is written.
      lambda: len(processes.steps(0)) > made + 2, START_S, 'it trains on'
    )
  for path in traces():
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    assert any('CPU' in plane.name for plane in planes)
