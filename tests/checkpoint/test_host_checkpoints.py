# SPDX-License-Identifier: Apache-2.0
"""A process among several saves and restores its own part, without waiting."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from diloco.transport.sockets import free_port
from tests.checkpoint.host_checkpoints import SHAPE

pytestmark = pytest.mark.beside

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope='module')
def found(tmp_path_factory):
  """Returns what the two processes print."""
  folder = tmp_path_factory.mktemp('checkpoints')
  coordinator = f'127.0.0.1:{free_port()}'
  module = 'tests.checkpoint.host_checkpoints'
  running = [
    subprocess.Popen(
      [sys.executable, '-m', module, str(folder), str(process), coordinator],
      cwd=ROOT,
      env=os.environ | {'JAX_NUM_CPU_DEVICES': '2', 'JAX_PLATFORMS': 'cpu'},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for process in (0, 1)
  ]
  ended = [each.communicate(timeout=240) for each in running]
  for each, (_, errors) in zip(running, ended):
    assert each.returncode == 0, errors
  return [json.loads(output.splitlines()[-1]) for output, _ in ended]


def test_the_other_process_need_not_save(found):
  assert found[0]['readable'] == []
  assert found[1]['readable'] == [2]  # keep_latest=1
  assert found[1]['failed'] == 0
  assert found[1]['meta'] == {'of': 1}


def test_its_own_part_comes_back(found):
  values = np.arange(24, dtype=np.float32).reshape(SHAPE)
  rows = [values[2:3] + 2, values[3:4] + 2]  # Of the devices 2 and 3 of 4.
  np.testing.assert_array_equal(found[1]['spread'], rows)
  np.testing.assert_array_equal(found[1]['same'], [values - 2] * 2)
  assert found[1]['host'] == [1] * 3
