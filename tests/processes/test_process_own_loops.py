# SPDX-License-Identifier: Apache-2.0
"""Loops that are not ours train a run; one dies and comes back."""

import json
import re
import signal

import numpy as np
import pytest

from diloco.checkpoint.parameters import read_parameters
from diloco.metrics.status import read_summary
from diloco.transport import sockets
from tests.commands import python
from tests.processes.processes import START_S, Processes

pytestmark = pytest.mark.beside

MODULE = 'tests.processes.loops'


# How much higher than that of the same `Trainer` alone, of as many steps as the
# run has, a held-out loss may be.
AS_GOOD = 1.1


SOAK = [
  pytest.param(kind, marks=pytest.mark.soak) for kind in ('nnx', 'sharded')
]


@pytest.mark.parametrize('kind', ['plain', *SOAK])
def test_a_loop_of_ones_own_dies_and_comes_back(kind, tmp_path):
  dies_and_comes_back(kind, tmp_path)


@pytest.mark.foreign
def test_a_trainer_of_others_dies_and_comes_back_and_trains_as_well(tmp_path):
  run = dies_and_comes_back('kauldron', tmp_path)
  with run:
    alone = run.start_without_config('alone', MODULE, 'alone', 'kauldron')
    assert run.exit_code(alone) == 0, run.tails()
    losses = json.loads(re.search(r'held out (.*)', alone.output)[1])
  print('held-out losses:', losses)
  assert losses['run'] < 0.6 * losses['start']
  assert losses['run'] < AS_GOOD * losses['alone']


def dies_and_comes_back(kind, tmp_path):
  """Trains two learners to the end, of which one is killed; returns the run."""
  with Processes(tmp_path) as run:
    syncer = run.start_without_config('syncer', MODULE, 'syncer', kind)

    def address():
      found = re.search(r'listens at (\S+)', syncer.output)
      return found and found[1]

    run.until(address, START_S, 'the syncer listens')

    def learner(number, name):
      """Starts its only process, or both."""
      words = MODULE, address(), kind, str(number)
      hosts = [()]
      if kind == 'sharded':
        at = f'127.0.0.1:{sockets.free_port("127.0.0.1")}'
        hosts = [(host, at) for host in '01']
      return [
        run.start_without_config(
          name + '-host'.join(['', *more[:1]]), *words, *more
        )
        for more in hosts
      ]

    first, second = learner(0, 'first'), learner(1, 'second')
    run.until_merged(1)
    for process in second:  # Of several the others would take 100 s to see it.
      process.send(signal.SIGKILL)
    for process in second:
      run.exit_code(process)
    second = learner(1, 'second-again')
    run.until(
      lambda: len({line['incarnation'] for line in run.steps(1)}) == 2,
      START_S,
      'it is back',
    )
    run.until_merged(1)
    (run.workdir.root / 'go').touch()
    assert {run.exit_code(x) for x in (*first, *second, syncer)} == {0}

    _, again = read_summary(run.workdir.summary).learners
    assert again.incarnations >= 2
    # It went on from its own checkpoint, or from the other's state.
    assert int(re.search(r'at step (\d+)', again.beginning)[1]) > 0, again
    for number in (0, 1):
      losses = [line['train/loss'] for line in run.steps(number)]
      assert losses[-1] < 0.8 * losses[0]
    replayed = python('-m', 'diloco.replay', run.workdir.root)
    assert "model.kind='given': its steps were made by" in replayed.stderr
    final = read_parameters(run.workdir.parameters)
    for number in (0, 1) if kind != 'sharded' else ():
      theta = read_parameters(run.workdir.root / f'theta-{number}')
      assert theta.keys() == final.keys()
      for path, value in final.items():
        np.testing.assert_array_equal(theta[path], value, err_msg=path)
  return run
