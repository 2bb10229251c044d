# SPDX-License-Identifier: Apache-2.0
"""A learner's compiled functions on one and on many devices do the same."""

import functools
import json
import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
ONE = '1x1x1x1'
# fsdp x expert x tensor x accumulate.
MESHES = {
  'decoder': ('4x1x1x1', '2x1x2x2'),
  'moe': ('2x2x2x2',),
  'lora': ('2x1x2x2',),
}
PAIRS = [(kind, mesh) for kind, meshes in MESHES.items() for mesh in meshes]


@functools.cache
def _of(kind: str) -> dict:
  command = ['-m', 'tests.learner.mesh_steps', kind, ONE, *MESHES[kind]]
  done = subprocess.run(
    [sys.executable, *command],
    cwd=ROOT,
    env={
      **os.environ,
      'JAX_NUM_CPU_DEVICES': '8',
      'JAX_PLATFORMS': 'cpu',
      # What LLVM makes of it is not looked at, and takes a minute.
      'XLA_FLAGS': '--xla_backend_optimization_level=0',
    },
    capture_output=True,
    text=True,
    check=False,
    timeout=480,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def _sizes(mesh: str) -> list[int]:
  return [int(size) for size in mesh.split('x')]


@pytest.mark.parametrize('kind, mesh', PAIRS)
def test_losses_with_snapshots_and_blends_are_those_of_one_device(kind, mesh):
  np.testing.assert_allclose(
    _of(kind)[mesh]['losses'], _of(kind)[ONE]['losses'], rtol=3e-5
  )


@pytest.mark.parametrize('mesh', MESHES['decoder'])
def test_parameters_and_moments_lie_in_equal_parts(mesh):
  *sizes, _ = _sizes(mesh)
  for key in ('largest_shard', 'largest_moment_shard'):
    whole = _of('decoder')[ONE][key]
    assert _of('decoder')[mesh][key] == whole // math.prod(sizes)


@pytest.mark.parametrize('kind, mesh', PAIRS)
def test_nothing_exchanged_is_larger_than_a_shard_of_a_parameter(kind, mesh):
  found, whole = _of(kind)[mesh], _of(kind)[ONE]
  assert found['largest_exchanged_shard'] <= found['largest_shard']
  fsdp, _, tensor, _ = _sizes(mesh)
  if fsdp * tensor > 1:  # The largest piece may be no expert's.
    assert found['largest_exchanged_shard'] < whole['largest_exchanged_shard']


@pytest.mark.parametrize('kind, mesh', PAIRS)
def test_weights_that_are_read_are_those_of_the_syncer(kind, mesh):
  found = _of(kind)[mesh]
  assert found['crcs'] == found['crcs_of_the_syncer'] == _of(kind)[ONE]['crcs']
