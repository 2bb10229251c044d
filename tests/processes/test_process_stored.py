# SPDX-License-Identifier: Apache-2.0
"""A learner that comes back through a peer's checkpoint, not the live peer."""

import signal

import pytest

from diloco.metrics import token_ledger
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import learner_name
from tests.processes.processes import ENDLESS, SLOW, START_S, Processes

pytestmark = pytest.mark.soak

FRAGMENTS = 2  # Of `tests_tiny`.


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  root = tmp_path_factory.mktemp('stored')
  saves = 'checkpoint.learner_every_steps=10'
  with Processes(root, 'protocol.learners=2', *ENDLESS, *SLOW, saves) as run:
    syncer = run.syncer()
    first = run.learner(
      0, 'mesh.fsdp=2', environment={'JAX_NUM_CPU_DEVICES': '2'}
    )
    none = 'checkpoint.learner_every_steps=0', 'checkpoint.bootstrap=checkpoint'
    dies = run.learner(1, *none)
    folder = run.workdir.checkpoints(learner_name(0))
    run.until(
      lambda: (
        len(run.steps(1)) > 2
        and any(
          int(x.name) > 20 for x in folder.glob('*') if x.name.isdecimal()
        )
      ),
      START_S,
      'one has saved, the other trains',
    )
    dies.send(signal.SIGKILL)
    run.exit_code(dies)
    again = run.learner(1, *none, name='learner-1-again')
    run.until(
      lambda: (
        len(_begins(run)) == 2
        and any(
          x['learner'] == 1
          and x['incarnation'] >> 12 == _begins(run)[1]['process']
          for line in run.tape('Publish')
          for x in line['shares']
        )
      ),
      START_S,
      'it is merged again',
    )
    for running in (again, first, syncer):
      running.send(signal.SIGTERM)
      run.exit_code(running)
    yield run


def _begins(run: Processes) -> list[dict]:
  lines = read_jsonl(run.workdir.learner_tape(1))
  return [line for line in lines if line['kind'] == 'Begin']


def test_its_source_stands_on_the_tape_and_in_the_log(run):
  source = _begins(run)[1]['source']
  assert (source['kind'], source['learner']) == ('peer_checkpoint', 0)
  words = f'learner 0 in its checkpoint of step {source["step"]}'
  ready = [x['reason'] for x in run.tape('ready') if x['learner'] == 1]
  assert ready[-1].endswith(words)
  assert not [x for x in run.tape('donor') if x['learner'] == 1]


def test_the_ledger_balances(run):
  for where, row in token_ledger.rows_of(run.workdir, FRAGMENTS).items():
    assert row.unexplained == 0, (where, row)


def test_the_replay_makes_the_same_bytes(run):
  replay = run.start_without_config('replay', 'diloco.replay')
  assert run.exit_code(replay) == 0, replay.output
  assert 'every round has the CRC of the run' in replay.output
