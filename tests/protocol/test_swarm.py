# SPDX-License-Identifier: Apache-2.0
"""Swarms of random scenarios: fixed seeds, and others at each run."""

import hashlib
import os
import pathlib

import pytest

from diloco import swarm as diloco_swarm
from diloco.simulator import invariants
from diloco.simulator import swarm as simulator_swarm
from diloco.simulator.scenario import BURDENED_FROM
from tests.commands import output, python

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[1]
FIXED, FRESH, SOAK = 100, 120, 20_000
AT_ONCE = 250


def _known() -> list[int]:
  """Seeds that have found something; `seeds.txt` says what."""
  lines = (FOLDER / 'seeds.txt').read_text().splitlines()
  return [int(line.split()[0]) for line in lines if not line.startswith('#')]


@pytest.fixture(name='fresh', scope='session')
def _fresh() -> int:
  """The first of the seeds of this run; the same in all of its processes."""
  run = os.environ.get('PYTEST_XDIST_TESTRUNUID') or os.urandom(8).hex()
  digest = hashlib.sha256(run.encode()).digest()
  return BURDENED_FROM + int.from_bytes(digest[:5])


@pytest.mark.parametrize('seed', _known())
def test_a_seed_that_once_failed(seed):
  simulator_swarm.run(seed)


def test_fixed_swarm():
  _all_hold(0, FIXED)


def test_fresh_swarm(fresh):
  """A seed that fails goes to `seeds.txt`, with what it has found."""
  _all_hold(fresh, FRESH)


@pytest.mark.soak
@pytest.mark.parametrize('offset', range(0, SOAK, AT_ONCE))
def test_soak_swarm(offset, fresh):
  _all_hold(fresh + FRESH + offset, AT_ONCE)


def _all_hold(first: int, count: int):
  print(f'seeds from {first} to {first + count - 1}')
  done = simulator_swarm.survey(range(first, first + count))
  assert done.seeds == count
  assert not done.failures, '\n'.join(diloco_swarm.failure_lines(done.failures))


def test_a_failed_seed_does_not_stop_the_others(monkeypatch):
  original = simulator_swarm.Swarm.run

  def run(self):
    if self.scenario.seed == 1:
      raise invariants.Violation('planted')
    original(self)

  monkeypatch.setattr(simulator_swarm.Swarm, 'run', run)
  done = simulator_swarm.survey(range(3))
  assert done.seeds == 3 and done.events > 0
  assert diloco_swarm.failure_lines(done.failures) == [
    'FAILED 1: Violation: planted',
    'rerun: python -m diloco.swarm --seed=1',
  ]


def test_what_the_scenarios_had_is_counted():
  first = BURDENED_FROM
  done = simulator_swarm.survey((first, first + 1, first + 2))
  assert not done.failures
  assert done.witnessed == {
    simulator_swarm.SLOW_LINK: 1,
    simulator_swarm.SEVERAL_VERSIONS: 1,
    simulator_swarm.LOST_FRAGMENT: 1,
    simulator_swarm.UNLIKE_BATCHES: 2,
  }


def test_the_command_runs_seeds():
  said = output('-m', 'diloco.swarm', '--seeds=0:3', '--jobs=2')
  assert '\n3 seeds, ' in said


def test_a_failure_is_listed_at_the_end_and_is_the_exit_code():
  code = (
    'import sys\n'
    'from absl import app\n'
    'from diloco import swarm\n'
    'from diloco.simulator.swarm import Survey\n'
    'swarm.swarm.survey = lambda seeds: Survey(\n'
    '  len(seeds), 9, tuple((s, "planted") for s in seeds if s % 60 == 0))\n'
    'app.run(swarm.main, ["swarm", "--seeds=1:130"])\n'
  )
  done = python('-c', code)
  assert done.returncode == 1, done
  lines = done.stdout.splitlines()
  assert [x for x in lines if x.startswith('FAILED')] == [
    'FAILED 60: planted',
    'FAILED 120: planted',
  ]
  assert lines[-1].startswith('129 seeds, 27 events, 2 FAILED'), lines
