# SPDX-License-Identifier: Apache-2.0
"""A run of three processes, two of them killed, is done again to the bit."""

import signal

import pytest

from diloco.runtime.incarnation import process_of
from tests.runtime.processes import SLOW, START_S, Processes

pytestmark = pytest.mark.alone

STEPS = 150


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
  """Learner 1 and the syncer die of SIGKILL and are started again.

  Learner 0 is stopped while they start, so that the run is not over before
  they are there.
  """
  root = tmp_path_factory.mktemp('replayed')
  overrides = (
    f'protocol.total_steps={STEPS}',
    'protocol.patience=6.0',
    'protocol.blend=carry',
  )
  with Processes(root, *SLOW, *overrides) as processes:
    syncer = processes.syncer()
    first = [processes.learner(m) for m in (0, 1)]
    processes.until_merged(1)
    first[1].send(signal.SIGKILL)
    processes.until_merged(0)
    first[0].send(signal.SIGSTOP)
    syncer.send(signal.SIGKILL)
    again = processes.learner(1, name='learner-1-again')
    syncer = processes.syncer('syncer-again')
    processes.until(
      lambda: len(processes.tape('ready')) >= 3, START_S, 'learner 1 is back'
    )
    first[0].send(signal.SIGCONT)
    for each in (syncer, first[0], again):
      assert processes.exit_code(each) == 0, processes.tails()
    yield processes


def test_replays_to_the_same_bytes(killed):
  replay = killed.start_without_config('replay', 'diloco.replay')
  assert killed.exit_code(replay) == 0, killed.tails()
  assert 'every round has the CRC of the run' in replay.output
  assert f'{killed.workdir.parameters}: the same bytes' in replay.output


def test_the_lab_follows_to_the_same_bytes(killed):
  """Other code does what the processes did: a run in one process is a run."""
  follow = killed.start_without_config('follow', 'diloco.lab.follow')
  assert killed.exit_code(follow) == 0, killed.tails()
  assert 'every round has the CRC of the run' in follow.output
  assert f'{killed.workdir.parameters}: the same bytes' in follow.output


def test_three_processes_of_learners_were_replayed(killed):
  """Else the kill was for nothing."""
  incarnations = {
    process_of(share['incarnation'])
    for line in killed.tape('Publish')
    for share in line['shares']
  }
  assert len(incarnations) == 3
  assert len(killed.tape('Started')) == 2
