# SPDX-License-Identifier: Apache-2.0
"""Nothing of the exchange is larger on a chip than a shard of a parameter.

Of models that no machine of the suite could hold, compiled for as many forced
devices as their slices have chips.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from diloco.sizing import memory

ROOT = pathlib.Path(__file__).parents[2]
# Of each kind of array a few: what is asked holds for any number of layers.
SHORT = ('model.layers=4', 'protocol.fragments=4')
LEARNERS = {
  '12b on v5p-256': ('12b', 'v5p-256', *SHORT),
  '5b on v5e-64': (
    '5b',
    'v5e-64',
    'mesh.fsdp=64',
    'inner.accumulate=1',
    *SHORT,
  ),
}
F32 = 4


@functools.cache
def _found(learner: str) -> dict:
  done = subprocess.run(
    [sys.executable, '-m', 'tests.sizing.sync_path', *LEARNERS[learner]],
    cwd=ROOT,
    # What LLVM makes of it is not looked at, and takes a minute.
    env={**os.environ, 'XLA_FLAGS': '--xla_backend_optimization_level=0'},
    capture_output=True,
    text=True,
    check=False,
    timeout=400,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize('learner', LEARNERS)
def test_no_array_is_larger_than_a_shard_of_a_parameter(learner):
  """Issue: by abstract evaluation, of each snapshot, blend and replacement."""
  found = _found(learner)
  assert len(found['programs']) == 3 * len(found['fragment_shards'])
  larger = {
    name: nbytes
    for name, nbytes in found['programs'].items()
    if nbytes > found['largest_shard']
  }
  assert not larger, found['largest_shard']


@pytest.mark.parametrize('learner', LEARNERS)
def test_the_exchange_takes_no_more_than_two_fragments_of_a_chip(learner):
  found = _found(learner)
  assert found['ahead'] == 1
  parts = ('snapshots', 'arrived', 'exchange_temporaries')
  taken = sum(found[part] for part in parts)
  # XLA adds a table of pointers, 8 bytes for each array.
  assert taken <= 2 * max(found['fragment_shards']) + 4096


@pytest.mark.parametrize('learner', LEARNERS)
def test_host_memory_is_that_of_the_shards(learner):
  """Issue: the formula of a host's memory is what abstract shapes give."""
  found = _found(learner)
  n, s = found['values'], found['state_bytes']
  assert found['held_by_hosts'] == [n] * found['hosts']
  norms = found['on_every_host']  # All else is on one.
  assert n == (found['parameters'] - norms) / found['hosts'] + norms
  assert s == 2 * F32 * n + F32  # Two moments, and a counter.
  theta, _, checkpoint, giving, taking = memory.of_learner(
    n, n / 4, s, found['value_bytes'], found['ahead']
  )
  assert theta.nbytes == F32 * n
  assert checkpoint.nbytes == 3 * F32 * n + F32
  assert giving.nbytes == 5 * F32 * n + 2 * F32
  assert taking.nbytes == 2 * checkpoint.nbytes
