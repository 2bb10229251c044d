# SPDX-License-Identifier: Apache-2.0
"""Runs one of two processes of a JAX world that save by themselves.

Run by `test_host_checkpoints.py`: process 1 saves twice, process 0 never; both
restore what is there, each its own part, and print what they found.
"""

import json
import pathlib
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco.checkpoint.host_files import HostFiles
from diloco.checkpoint.store import Checkpoints

SHAPE = (4, 6)


def main(folder: str, process: int, coordinator: str):
  jax.distributed.initialize(coordinator, 2, process)
  mesh = Mesh(np.array(jax.devices()), ('fsdp',))
  spread = NamedSharding(mesh, PartitionSpec('fsdp'))
  same = NamedSharding(mesh, PartitionSpec())
  values = np.arange(24, dtype=np.float32).reshape(SHAPE)

  def tree(step: int):
    return {
      'spread': jax.make_array_from_callback(
        SHAPE, spread, lambda i: values[i] + step
      ),
      'same': jax.make_array_from_callback(
        SHAPE, same, lambda i: values[i] - step
      ),
      'host': np.full(3, process, np.int32),
    }

  saves = Checkpoints(
    pathlib.Path(folder) / f'host-{process}',
    keep_latest=1,
    keep_best=0,
    say=lambda text: print(f'said: {text}', file=sys.stderr),
    files=HostFiles(),
  )
  for step in (1, 2) if process else ():
    assert saves.save(step, tree(step), {'of': process}, loss=None)
    assert saves.wait(60.0)
  likes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=getattr(x, 'sharding', None)
    ),
    tree(0),
  )
  found = saves.restore(likes)
  print(
    json.dumps(
      {
        'readable': saves.readable(),
        'failed': saves.failed,
        'meta': found and found.meta,
        'spread': found and _shards(found.arrays['spread']),
        'same': found and _shards(found.arrays['same']),
        'host': found and found.arrays['host'].tolist(),
      }
    ),
    flush=True,
  )
  saves.close(60.0)


def _shards(array: jax.Array) -> list:
  return [np.asarray(s.data).tolist() for s in array.addressable_shards]


if __name__ == '__main__':
  main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
