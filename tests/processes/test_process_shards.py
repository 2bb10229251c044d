# SPDX-License-Identifier: Apache-2.0
"""Training survives a kill -9 of each process of a sharded syncer."""

import signal

import numpy as np
import pytest

from diloco.checkpoint.parameters import read_parameters
from diloco.metrics import names
from tests.processes.processes import START_S, Processes

pytestmark = pytest.mark.beside

# Far beyond what the deaths take, on slow machines too: learner 1 comes back
# without a floor under its steps, and takes the run to its end.
STEPS = 1500


@pytest.fixture(scope='module')
def survived(tmp_path_factory):
  """A run of 2 shards that lost each of its processes once."""
  root = tmp_path_factory.mktemp('shards')
  with Processes(
    root,
    'syncer.shards=2',
    f'protocol.total_steps={STEPS}',
    'protocol.patience=0.6',
    'run.step_floor_s=0.2',
    'checkpoint.syncer_every_rounds=8',
    'data.shards=4',
  ) as run:
    syncer, shard = run.syncer(), run.shard(1)
    learners = [run.learner(0), run.learner(1)]
    run.until_merged(0)
    run.until_merged(1)

    # Without the shard, its fragment is skipped and the other is merged.
    shard.end()
    owned = 1
    closed = _closed(run, 1 - owned)
    run.until(
      lambda: _closed(run, 1 - owned) >= closed + 3,
      START_S,
      'the fragment of the leader goes on',
    )
    skipped = len(_skipped(run))
    closed = _closed(run, owned)
    shard = run.shard(1, name='shard-1-again')
    run.until(
      lambda: _closed(run, owned) >= closed + 3,
      START_S,
      'the fragment of the shard goes on',
    )

    # The shard outlives its leader.
    syncer.end()
    closed = _closed(run, owned)
    syncer = run.syncer(name='syncer-again')
    run.until(
      lambda: _closed(run, owned) >= closed + 2,
      START_S,
      'both go on with another leader',
    )
    assert shard.exit_code is None

    learners[1].end()
    learners[1] = run.learner(1, 'run.step_floor_s=0', name='learner-1-again')
    run.until_merged(1)

    everybody = [syncer, shard, *learners]
    codes = [run.exit_code(each) for each in everybody]
    yield run, codes, skipped


def _closed(run, fragment: int) -> int:
  return len([x for x in run.tape('Publish') if x['fragment'] == fragment])


def _skipped(run) -> list[dict]:
  return [x for x in run.tape('skipped') if 'is away' in x['reason']]


@pytest.mark.soak
def test_everybody_leaves_in_good_order(survived):
  run, codes, _ = survived
  assert codes == [0, 0, 0, 0], run.tails()


@pytest.mark.soak
def test_rounds_of_the_dead_shard_were_skipped_and_no_others(survived):
  run, _, skipped = survived
  assert skipped >= 2
  reasons = [x['reason'] for x in _skipped(run)]
  assert all('fragment 1 is away' in reason for reason in reasons)


@pytest.mark.soak
def test_versions_rise_by_one_per_close(survived):
  run, _, _ = survived
  for fragment in (0, 1):
    versions = [
      x['version'] for x in run.tape('Publish') if x['fragment'] == fragment
    ]
    assert versions == list(range(1, len(versions) + 1))


@pytest.mark.soak
def test_it_has_learned_and_written_all_of_it(survived):
  run, _, _ = survived
  parameters = read_parameters(run.workdir.parameters)
  assert all(np.isfinite(array).all() for array in parameters.values())
  losses = [step[names.TRAIN_LOSS] for step in run.steps(0)]
  assert np.mean(losses[-20:]) < np.mean(losses[:5]) - 1.0


def test_a_stopped_shard_is_as_good_as_dead(tmp_path):
  with Processes(
    tmp_path,
    'syncer.shards=2',
    'protocol.total_steps=1000000',
    'protocol.patience=0.3',
    'run.step_floor_s=0.04',
    'data.shards=4',
  ) as run:
    run.syncer()
    shard = run.shard(1)
    run.learner(0)
    run.until_merged(0)
    shard.send(signal.SIGSTOP)
    run.until(lambda: len(_skipped(run)) >= 2, START_S, 'it is given up')
    closed = _closed(run, 1)
    shard.send(signal.SIGCONT)
    run.until(
      lambda: _closed(run, 1) >= closed + 2, START_S, 'it is taken back'
    )


def test_a_number_out_of_range_is_refused(tmp_path):
  with Processes(tmp_path, 'syncer.shards=2') as run:
    wrong = run.start(
      'wrong', 'diloco.syncer_shard', '--shard=2', '--leader=127.0.0.1:1'
    )
    assert run.exit_code(wrong) == 78
    assert '--shard=2: must be in 1 … 1' in wrong.output


def test_another_configuration_is_refused(tmp_path):
  with Processes(tmp_path, 'syncer.shards=2') as run:
    run.syncer()
    wrong = run.start(
      'wrong',
      'diloco.syncer_shard',
      '--shard=1',
      f'--leader={run.address}',
      '--config.outer.lr=0.5',
    )
    assert run.exit_code(wrong) == 78
    assert 'outer.lr' in wrong.output
