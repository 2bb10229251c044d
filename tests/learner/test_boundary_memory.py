# SPDX-License-Identifier: Apache-2.0
"""Boundaries in the memory of slices, and that from which a learner goes on."""

import jax.numpy as jnp
import numpy as np
import pytest

from diloco.checkpoint.arrays import BrokenRecord
from diloco.learner.hosts.boundary_memory import Boundary, BoundaryMemory
from diloco.learner.hosts.host_group import what_to_restore
from diloco.protocol.host_messages import HostStarted, RestoreFrom

IDENTITY = {'run': 'of the test'}


def _boundary(step: int) -> Boundary:
  params = {'layers/up': jnp.arange(6.0).reshape(2, 3) + step}
  moments = (jnp.int32(step), {'layers/up': jnp.full((2, 3), -0.0)})
  bases = {1: {'layers/up[0]@0:2': np.ones((2, 1), np.float32)}}
  return Boundary(step, params, moments, bases, f'{{"step": {step}}}')


def test_a_boundary_comes_back_to_the_bit(tmp_path):
  memory = BoundaryMemory(tmp_path, 2, 0, IDENTITY)
  memory.note(_boundary(4))
  memory.note(_boundary(5))
  assert memory.write() == 5
  stored = BoundaryMemory(tmp_path, 2, 0, IDENTITY).read()
  assert (stored.step, stored.progress) == (5, '{"step": 5}')
  up = stored.read('params/layers/up', ((0, 2), (1, 3)))
  np.testing.assert_array_equal(up, np.arange(6.0).reshape(2, 3)[:, 1:] + 5)
  assert stored.read('optimizer/layers/up', ((0, 2), (0, 3))).tobytes() == (
    np.full((2, 3), -0.0, np.float32).tobytes()
  )
  assert stored.read('optimizer', ()) == 5
  np.testing.assert_array_equal(
    stored.bases[1]['layers/up[0]@0:2'], np.ones((2, 1))
  )
  for other in (2, 1), (1, 0):
    assert BoundaryMemory(tmp_path, *other, IDENTITY).read() is None
  assert BoundaryMemory(tmp_path, 2, 0, {'run': 'another'}).read() is None


def test_the_last_that_can_be_read_is_written(tmp_path):
  memory = BoundaryMemory(tmp_path, 0, 0, IDENTITY)
  assert memory.write() is None
  memory.note(_boundary(4))
  newer = _boundary(5)
  memory.note(newer)
  newer.params['layers/up'].delete()  # As a step does that it is given to.
  assert memory.write() == 4


def test_damage_is_found(tmp_path):
  memory = BoundaryMemory(tmp_path, 0, 0, IDENTITY)
  memory.note(_boundary(4))
  memory.write()
  [path] = tmp_path.iterdir()
  data = bytearray(path.read_bytes())
  data[-1] ^= 1
  path.write_bytes(data)
  with pytest.raises(BrokenRecord, match='is damaged'):
    memory.read()


def _hosts(*held, steps: tuple[int, ...] = ()) -> list[HostStarted]:
  """Hosts that hold a boundary: (process, step), or the step of process 1."""
  pairs = [x if isinstance(x, tuple) else (1, x) for x in held]
  return [
    HostStarted(i, steps, step, _progress(i, process))
    for i, (process, step) in enumerate(pairs)
  ]


def _progress(host: int, process: int = 1) -> str:
  return f'{{"process": {process}, "host": {host}}}'


@pytest.mark.parametrize(
  ('held', 'steps', 'slices', 'found'),
  [
    ((7, 7, 7), (), 3, RestoreFrom(7, 0, True, _progress(0))),
    # The second has lost its memory, the third was a step further.
    ((7, 0, 8), (5,), 3, RestoreFrom(8, 2, False, _progress(2))),
    # Of the first slice's two hosts one was a step further.
    ((8, 7, 7, 7), (), 2, RestoreFrom(7, 1, False, _progress(2))),
    ((8, 7, 0, 0), (), 2, RestoreFrom(-1)),
    ((7, 7), (5, 9), 2, RestoreFrom(9)),
    ((0, 0), (5, 9), 1, RestoreFrom(9)),
    # The second had to begin again from step 4, and has trained since.
    ((8, (2, 7)), (4,), 2, RestoreFrom(7, 1, False, _progress(1, 2))),
    # As far, but not the same.
    ((8, (2, 8)), (4,), 2, RestoreFrom(8, 1, False, _progress(1, 2))),
    # Two hosts of a slice, of which one is from an older process.
    ((8, (2, 8), 7, 7), (), 2, RestoreFrom(7, 1, False, _progress(2))),
  ],
)
def test_the_newest_whole_state_is_gone_on_from(held, steps, slices, found):
  assert what_to_restore(_hosts(*held, steps=steps), slices) == found
