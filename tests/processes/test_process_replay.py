# SPDX-License-Identifier: Apache-2.0
"""A run of three processes, two of them killed, is done again to the bit."""

import signal

import pytest

from diloco.protocol.incarnation import process_of
from tests.processes.processes import START_S, Processes

pytestmark = pytest.mark.beside

STEPS = 100
# Of the tiny shape, made slow by sleep: the replays need not wait.
SLEEPY = ('run.step_floor_s=0.04',)


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
  """Learner 1 and the syncer die of SIGKILL and are started again.

  While a process starts, the learners that train are stopped, so that the run
  is not over before it is there, however slow the machine.
  """
  root = tmp_path_factory.mktemp('replayed')
  overrides = (
    f'protocol.total_steps={STEPS}',
    'protocol.patience=6.0',
    'protocol.blend=carry',
    f'transport.connect_s={START_S}',
  )
  with Processes(root, *SLEEPY, *overrides) as processes:
    syncer = processes.syncer()
    dies = processes.learner(1)
    _until_ready(processes, 1)
    dies.send(signal.SIGSTOP)
    # Learner 1 takes the run to its end, whenever it is there.
    stays = processes.learner(0, 'run.step_floor_s=0.2')
    _until_ready(processes, 0)
    dies.send(signal.SIGCONT)
    processes.until_merged(1)
    dies.send(signal.SIGKILL)
    processes.until_merged(0)
    stays.send(signal.SIGSTOP)
    syncer.send(signal.SIGKILL)
    syncer = processes.syncer(name='syncer-again')
    stays.send(signal.SIGCONT)  # It gives back what the syncer lost.
    processes.until_merged(0, rounds=1)
    stays.send(signal.SIGSTOP)
    again = processes.learner(1, name='learner-1-again')
    processes.until_merged(1)
    stays.send(signal.SIGCONT)
    for each in (syncer, stays, again):
      assert processes.exit_code(each) == 0, processes.tails()
    yield processes


def _until_ready(processes: Processes, learner: int):
  """Waits until the syncer has counted the learner as ready."""
  processes.until(
    lambda: learner in [line['learner'] for line in processes.tape('ready')],
    START_S,
    f'learner {learner} is ready',
  )


def test_replays_to_the_same_bytes(killed):
  replay = killed.start_without_config('replay', 'diloco.replay')
  assert killed.exit_code(replay) == 0, killed.tails()
  assert 'every round has the CRC of the run' in replay.output
  assert f'{killed.workdir.parameters}: the same bytes' in replay.output


def test_three_processes_of_learners_were_replayed(killed):
  """The kill would be for nothing otherwise."""
  incarnations = {
    process_of(share['incarnation'])
    for line in killed.tape('Publish')
    for share in line['shares']
  }
  assert len(incarnations) == 3
  assert len(killed.tape('Started')) == 2
