# SPDX-License-Identifier: Apache-2.0
"""A learner of two processes, FSDP 4, beside one of a single process.

Both learners have four devices. With τ = 0 and K = M the run is the same as
one in which both have one process: only the sums over devices are made in
another order.
"""

import signal

import numpy as np
import pytest

from diloco.checkpoint.parameters import read_parameters
from tests.runtime.groups import Group
from tests.runtime.processes import ENDLESS, START_S, Processes

pytestmark = pytest.mark.alone

ON_FOUR = (
  'model.heads=4',
  'model.kv_heads=4',
  'model.head_dim=8',
  'mesh.fsdp=4',
)
TOGETHER = (
  *ON_FOUR,
  'protocol.overlap_steps=0',
  'protocol.quorum=2',
  'protocol.total_steps=24',
  'codec.up=f32',  # Or a last bit may become a whole level of int4.
  'codec.down=f32',
)
# Steps that leave this machine time to start what was killed.
SLOWLY = (
  *ON_FOUR,
  *ENDLESS,
  'run.step_floor_s=0.1',
  'checkpoint.learner_every_steps=5',
  'protocol.patience=2.0',
)


@pytest.fixture(scope='module')
def finals(tmp_path_factory):
  """Final Θ with the learners of one process, and with one of two."""
  found = []
  for hosts in (1, 2):
    root = tmp_path_factory.mktemp(f'hosts{hosts}')
    with Processes(root, *TOGETHER) as processes:
      syncer = processes.syncer()
      groups = [Group(processes, 0, hosts, 4), Group(processes, 1, 1, 4)]
      for group in groups:
        assert group.exit_codes() == [0] * len(group.members)
      assert processes.exit_code(syncer) == 0
      found.append(read_parameters(processes.workdir.parameters))
  return found


def test_two_processes_train_to_what_one_does(finals):
  one, two = finals
  for path in one:
    np.testing.assert_allclose(two[path], one[path], rtol=0, atol=2e-5)


def saved(processes, host: int) -> list[int]:
  """The steps of checkpoints of one host of learner 0."""
  folder = processes.workdir.host_checkpoints('learner-0', host)
  names = (path.name for path in folder.glob('*'))
  return [int(name) for name in names if name.isdecimal()]


def test_a_learner_of_two_processes_survives_every_death(tmp_path):
  with Processes(tmp_path, *SLOWLY) as processes:
    syncer = processes.syncer()
    group, single = Group(processes, 0, 2, 4), Group(processes, 1, 1, 4)
    processes.until_merged(0)
    processes.until_merged(1)

    for host in (1, 0):  # Either death is the learner's.
      processes.until(
        lambda: all(saved(processes, host) for host in (0, 1)),
        START_S,
        'both hosts have a checkpoint',
      )
      group.members[host].send(signal.SIGKILL)
      codes = group.exit_codes()
      assert all(code not in (0, 78) for code in codes), codes
      merged = len(processes.merged(1))
      processes.until(
        lambda merged=merged: len(processes.merged(1)) > merged,
        START_S,
        'learner 1 goes on alone',
      )
      group = Group(processes, 0, 2, 4)
      processes.until_merged(0)
      assert 'goes on from' in group.members[0].output

    syncer.send(signal.SIGKILL)
    syncer = processes.syncer(name='syncer-again')
    processes.until_merged(0)
    processes.until_merged(1)

    single.members[0].send(signal.SIGKILL)
    merged = len(processes.merged(0))
    processes.until(
      lambda: len(processes.merged(0)) > merged,
      START_S,
      'learner 0 goes on alone',
    )

    group.members[1].send(signal.SIGTERM)  # One host is told: all leave.
    assert group.exit_codes() == [143, 143]
