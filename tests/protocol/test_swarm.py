# SPDX-License-Identifier: Apache-2.0
"""Swarms of random scenarios, and that planted faults would be found."""

import pathlib
import subprocess
import sys

import pytest

from diloco.sim import swarm

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[1]
QUICK, SOAK = 1000, 20_000
AT_ONCE = 250


def _known() -> list[int]:
  """Seeds that have found something; `seeds.txt` says what."""
  lines = (FOLDER / 'seeds.txt').read_text().splitlines()
  return [int(line.split()[0]) for line in lines if not line.startswith('#')]


@pytest.mark.parametrize('seed', _known())
def test_a_seed_that_once_failed(seed):
  swarm.run(seed)


@pytest.mark.parametrize('first', range(0, QUICK, AT_ONCE))
def test_quick_swarm(first):
  for seed in range(first, first + AT_ONCE):
    swarm.run(seed)


@pytest.mark.soak
@pytest.mark.parametrize('first', range(0, SOAK, AT_ONCE))
def test_soak_swarm(first):
  for seed in range(first, first + AT_ONCE):
    swarm.run(seed)


def test_the_command_runs_seeds_without_jax():
  code = (
    'import sys, runpy; sys.argv = ["swarm", "--seeds=0:3"]\n'
    'try:\n'
    '  runpy.run_module("diloco.swarm", run_name="__main__")\n'
    'finally:\n'
    '  print("jax" in sys.modules)\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  words = done.stdout.split()
  assert words[:2] == ['3', 'seeds,'] and words[-1] == 'False', done
