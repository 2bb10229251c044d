# SPDX-License-Identifier: Apache-2.0
"""A learner's compiled functions on 1 and on 4 devices do the same."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def _on(fsdp: int, tensor: int) -> dict:
  done = subprocess.run(
    [sys.executable, '-m', 'tests.runtime.mesh_steps', str(fsdp), str(tensor)],
    cwd=ROOT,
    env={**os.environ, 'JAX_NUM_CPU_DEVICES': '4', 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    check=False,
    timeout=240,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize('fsdp, tensor', [(4, 1), (1, 4), (2, 2)])
def test_losses_with_snapshots_and_blends_are_those_of_one_device(fsdp, tensor):
  np.testing.assert_allclose(
    _on(fsdp, tensor)['losses'], _on(1, 1)['losses'], rtol=2e-5
  )


@pytest.mark.parametrize('fsdp, tensor', [(4, 1), (1, 4), (2, 2)])
def test_parameters_and_moments_lie_in_quarters(fsdp, tensor):
  for key in ('largest_shard', 'largest_moment_shard'):
    assert _on(fsdp, tensor)[key] == _on(1, 1)[key] // 4


@pytest.mark.parametrize('fsdp, tensor', [(4, 1), (1, 4), (2, 2)])
def test_nothing_exchanged_is_larger_than_a_shard_of_a_parameter(fsdp, tensor):
  found = _on(fsdp, tensor)
  assert found['largest_exchanged_shard'] <= found['largest_shard']
  whole = _on(1, 1)['largest_exchanged_shard']
  assert found['largest_exchanged_shard'] < whole
