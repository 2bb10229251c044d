# SPDX-License-Identifier: Apache-2.0
"""A learner of two processes, FSDP 4, beside one of a single process; a syncer
of two shards.

Both learners have four devices. With τ = 0 and K = M the run is the same as
one in which learners and syncer have one process each: only the sums over
devices are made in another order.
"""

import signal

import numpy as np
import pytest

from diloco.checkpoint.parameters import read_parameters
from diloco.metrics import names
from diloco.metrics.jsonl import read_jsonl
from tests.learner.groups import Group
from tests.processes.processes import ENDLESS, START_S, Processes

pytestmark = pytest.mark.soak

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
  'protocol.patience=6.0',
  'codec.up=f32',  # Or a last bit may become a whole level of int4.
  'codec.down=f32',
)
SAVE_STEPS = 5
# Steps that leave this machine time to start what was killed.
SLOWLY = (
  *ON_FOUR,
  *ENDLESS,
  'run.step_floor_s=0.3',
  f'checkpoint.learner_every_steps={SAVE_STEPS}',
  'protocol.patience=2.0',
  'syncer.shards=2',
)


@pytest.fixture(scope='module')
def finals(tmp_path_factory):
  """Final Θ and losses: all of one process; a learner and the syncer of two."""
  found = []
  for hosts in (1, 2):
    root = tmp_path_factory.mktemp(f'hosts{hosts}')
    with Processes(root, *TOGETHER, f'syncer.shards={hosts}') as processes:
      syncer = processes.syncer()
      for shard in range(1, hosts):
        processes.shard(shard)
      groups = [Group(processes, 0, hosts, 4), Group(processes, 1, 1, 4)]
      for group in groups:
        assert group.exit_codes() == [0] * len(group.members)
      assert processes.exit_code(syncer) == 0
      losses = [
        [step[names.TRAIN_LOSS] for step in processes.steps(m)] for m in (0, 1)
      ]
      found.append((read_parameters(processes.workdir.parameters), losses))
  return found


def test_losses_are_those_of_the_run_in_one_piece(finals):
  (_, one), (_, two) = finals
  np.testing.assert_allclose(two, one, rtol=1e-5)


def test_the_result_is_that_of_the_run_in_one_piece(finals):
  (one, _), (two, _) = finals
  for path in one:
    np.testing.assert_allclose(two[path], one[path], rtol=0, atol=2e-5)


def saved(processes) -> list[int]:
  """Returns the steps of the checkpoints of learner 0."""
  names = (x.name for x in processes.workdir.checkpoints('learner-0').glob('*'))
  return [int(name) for name in names if name.isdecimal()]


def merged_into(processes, fragment: int) -> int:
  """Returns how many rounds of a fragment have closed with a merge."""
  rounds = processes.tape('Publish')
  return len([line for line in rounds if line['fragment'] == fragment])


def test_the_run_survives_the_death_of_each_process(tmp_path):
  with Processes(tmp_path, *SLOWLY) as processes:
    syncer, shard = processes.syncer(), processes.shard(1)
    group, single = Group(processes, 0, 2, 4), Group(processes, 1, 1, 4)
    processes.until_merged(0)
    processes.until_merged(1)

    processes.until(
      lambda: len(saved(processes)) > 1, START_S, 'both hosts have saved twice'
    )
    group.members[0].send(signal.SIGKILL)
    codes = group.exit_codes()
    assert all(code not in (0, 78) for code in codes), codes
    merged = len(processes.merged(1))
    processes.until(
      lambda: len(processes.merged(1)) > merged,
      START_S,
      'learner 1 goes on alone',
    )
    group = Group(processes, 0, 2, 4)
    processes.until_merged(0)
    assert 'goes on from' in group.members[0].output

    shard.send(signal.SIGKILL)
    before = merged_into(processes, 0)
    processes.until(
      lambda: merged_into(processes, 0) >= before + 3,
      START_S,
      'the fragment of the other shard goes on',
    )
    before = merged_into(processes, 1)
    processes.shard(1, name='shard-again')
    processes.until(
      lambda: merged_into(processes, 1) >= before + 3,
      START_S,
      'its own fragment goes on',
    )

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

    # One host is told: all leave, though they are saving, and save once more.
    processes.until(
      lambda: processes.steps(0)[-1]['step'] % SAVE_STEPS == 0,
      START_S,
      'a save is due',
    )
    group.members[1].send(signal.SIGTERM)
    assert group.exit_codes() == [143, 143]
    last = processes.steps(0)[-1]['step']
    assert max(saved(processes)) == last


def begun(processes, learner: int) -> list[dict]:
  """Returns where each process of a learner began from, by its event log."""
  lines = read_jsonl(processes.workdir.learner_tape(learner))
  return [line['source'] for line in lines if line['kind'] == 'Begin']


def test_a_killed_learner_takes_its_peers_moments_host_to_host(tmp_path):
  """The learner has no disk: what it has, it has from its peer."""
  without_disk = (*SLOWLY, 'checkpoint.learner_every_steps=0')
  with Processes(tmp_path, *without_disk) as processes:
    processes.syncer()
    processes.shard(1)
    groups = [Group(processes, learner, 2, 4) for learner in (0, 1)]
    for learner in (0, 1):
      processes.until_merged(learner)

    groups[0].members[1].send(signal.SIGKILL)
    groups[0].exit_codes()
    again = Group(processes, 0, 2, 4)
    processes.until_merged(0)
    source = begun(processes, 0)[-1]
    assert (source['kind'], source['learner']) == ('peer', 1)
    assert source['step'] > 0
    took = 'took Θ and the inner state of learner 1'
    assert took in again.members[0].output

    # What was taken is whole: it is given on, and both go on being merged.
    groups[1].members[0].send(signal.SIGKILL)
    groups[1].exit_codes()
    Group(processes, 1, 2, 4)
    processes.until_merged(1)
    processes.until_merged(0)
    assert begun(processes, 1)[-1]['kind'] == 'peer'
    assert begun(processes, 1)[-1]['learner'] == 0

    # One of a single process can't take it, and says so.
    alone = Group(processes, 2, 1, 4)
    processes.until_merged(2)
    assert begun(processes, 2)[-1]['kind'] == 'seed'
    reason = 'goes on without a peer: no live peer has the same hosts and mesh'
    assert reason in alone.members[0].output
