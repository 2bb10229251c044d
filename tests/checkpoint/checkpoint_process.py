# SPDX-License-Identifier: Apache-2.0
"""Saves and restores in a process that can be killed, limited, or has a mesh.

Run by `test_checkpoint_processes.py`; prints one JSON per line.
"""

import itertools
import json
import pathlib
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec

from diloco.checkpoint.store import Checkpoints
from diloco.run import logs

SIZE = 1 << 22  # Values; some 16 MB, so that a save takes a while.
SAVE_S = 60.0


def tell(**fields):
  print(json.dumps(fields), flush=True)


def checkpoints(folder: pathlib.Path) -> Checkpoints:
  return Checkpoints(folder, 2, 0, logging.warning)


def arrays_of(step: int) -> dict:
  return {'a': np.full(SIZE, step, np.float32), 'b': np.full(3, step)}


def keep_saving(folder: pathlib.Path):
  """Goes on from the newest checkpoint until it is killed."""
  store = checkpoints(folder)
  found = store.restore(arrays_of(0))
  newest = found.step if found else 0
  if found:
    assert found.meta == {'step': newest}
    assert all((x == newest).all() for x in found.arrays.values())
  tell(restored=newest)
  for step in itertools.count(newest + 1):
    assert store.save(step, arrays_of(step), {'step': step}, None)
    tell(begun=step)
    assert store.wait(SAVE_S)
    tell(written=step)


def full_disk(folder: pathlib.Path):
  """Saves, fails where no file may grow, saves again."""
  logging.use_absl_handler()  # As in a real process.
  logs.keep_ours()
  store = checkpoints(folder)
  unlimited = resource.RLIM_INFINITY
  for step, bytes_max in ((1, unlimited), (2, 1 << 20), (3, unlimited)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, unlimited))
    assert store.save(step, arrays_of(step), {}, None)
    assert store.wait(SAVE_S)
    tell(failed=store.failed, folder=sorted(p.name for p in folder.iterdir()))
  store.close(SAVE_S)


def other_mesh(folder: pathlib.Path):
  """Saves from 4 devices, gives the arrays away, restores elsewhere."""
  store = checkpoints(folder)
  value = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
  line = jax.make_mesh((4,), ('x',))
  square = jax.make_mesh((2, 2), ('x', 'y'))
  rows = NamedSharding(line, PartitionSpec('x', None))
  double = jax.jit(lambda x: 2 * x, donate_argnums=0)
  given = jax.device_put(value.copy(), rows)
  assert store.save(1, {'w': given}, {}, None)
  jax.block_until_ready(double(given))
  assert given.is_deleted()
  assert store.wait(SAVE_S)
  places = {
    'the same': rows,
    'square': NamedSharding(square, PartitionSpec('y', 'x')),
    'one device': jax.sharding.SingleDeviceSharding(jax.devices()[3]),
  }
  for name, place in places.items():
    like = jax.ShapeDtypeStruct(value.shape, jnp.float32, sharding=place)
    found = store.restore({'w': like}).arrays['w']
    tell(
      place=name,
      there=found.sharding == place,
      equal=bool((np.asarray(found) == value).all()),
    )


if __name__ == '__main__':
  task = {f.__name__: f for f in (keep_saving, full_disk, other_mesh)}
  task[sys.argv[1]](pathlib.Path(sys.argv[2]))
