# SPDX-License-Identifier: Apache-2.0
"""The inner state of a learner of two hosts goes from host to host."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from diloco.transport.sockets import free_port

pytestmark = pytest.mark.beside

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope='module')
def found():
  """Returns what each of the two processes prints."""
  coordinator = f'127.0.0.1:{free_port()}'
  running = [
    subprocess.Popen(
      [sys.executable, '-m', 'tests.learner.host_states', str(i), coordinator],
      cwd=ROOT,
      env=os.environ | {'JAX_NUM_CPU_DEVICES': '2', 'JAX_PLATFORMS': 'cpu'},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in (0, 1)
  ]
  ended = [each.communicate(timeout=240) for each in running]
  for each, (_, errors) in zip(running, ended):
    assert each.returncode == 0, errors
  return [json.loads(output.splitlines()[-1]) for output, _ in ended]


def test_moments_come_back_to_the_bit(found):
  for host in found:
    assert host['same'] and host['unlike_fresh']


def test_the_next_step_is_that_of_the_donor(found):
  assert all(host['same_step'] for host in found)


def test_theta_comes_with_them(found):
  for host in found:
    assert host['theta']
    assert set(host['versions']) == {7}


def test_each_host_gives_its_own_part_in_chunks(found):
  for host in found:
    assert host['chunks'] == -(-host['bytes'] // 10_000) > 1
    assert host['bytes'] < 0.6 * host['whole_bytes']


def test_a_state_that_is_not_whole_is_refused(found):
  assert all('bytes of inner state are offered' in x['refused'] for x in found)
