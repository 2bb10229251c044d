# SPDX-License-Identifier: Apache-2.0
"""Places pieces of fragments on a learner's mesh, sharded like their parameter.

No piece is ever whole on one device: a copy of a fragment leaves each device as
that device's own shards, and comes back as them. Each host likewise has its own
slices.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco.numerics.fragments import Piece
from diloco.numerics.mesh_partition import Partition, Slice


def partition_of(
  mesh: Mesh,
  shardings: Mapping[str, NamedSharding],
  ranks: Mapping[str, int],
) -> Partition:
  """Returns how `mesh` cuts parameters, in terms that a syncer understands.

  Args:
    shardings: of the parameters, by path.
    ranks: number of axes of each parameter, by path.
  """
  processes = [device.process_index for device in mesh.devices.flat]
  hosts = sorted(set(processes))
  return Partition(
    axes=tuple((str(name), size) for name, size in mesh.shape.items()),
    hosts=tuple(hosts.index(process) for process in processes),
    splits={
      path: (*sharding.spec, *(None,) * (ranks[path] - len(sharding.spec)))
      for path, sharding in shardings.items()
    },
  )


def piece_sharding(
  piece: Piece, partition: Partition, mesh: Mesh
) -> NamedSharding:
  """Returns a piece's sharding over the mesh that `partition` describes."""
  return NamedSharding(mesh, PartitionSpec(*partition.piece_splits(piece)))


def place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """Puts `x` on this process's devices of `sharding`.

  Every process of the mesh calls it with the same `x`; no communication takes
  place.
  """
  return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])


def place_boxes(
  piece: Piece,
  boxes: Sequence[Slice],
  arrays: Mapping[str, np.ndarray],
  sharding: NamedSharding,
) -> jax.Array:
  """Assembles a piece of which each process has its own slices.

  Args:
    boxes: the slices that this process holds: all that its devices need.
    arrays: box name -> f32 array of its shape.
    sharding: sharding of the piece.
  """

  def part(index: tuple[slice, ...]) -> np.ndarray:
    wanted = _ranges(index, piece.shape)
    for box in boxes:
      if _within(wanted, box.ranges):
        at = (
          slice(a - first, b - first)
          for (a, b), (first, _) in zip(wanted, box.ranges)
        )
        return arrays[box.name][(*at, ...)]
    raise AssertionError(f'{piece.name}{wanted} is in none of {boxes}')

  return jax.make_array_from_callback(piece.shape, sharding, part)


def take_boxes(
  boxes: Sequence[Slice], arrays: Mapping[str, jax.Array]
) -> dict[str, np.ndarray]:
  """Copies the slices' values from this process's shards to the host.

  Args:
    boxes: each is tiled by whole shards.
    arrays: piece name -> array.
  """
  taken = {}
  for box in boxes:
    array = arrays[box.piece.name]
    here = array.is_fully_addressable or array.is_fully_replicated
    if box.is_whole and here:
      taken[box.name] = np.asarray(array)  # It may be on the host already.
      continue
    values = np.empty(box.shape, np.float32)
    for shard in array.addressable_shards:
      ranges = _ranges(shard.index, box.piece.shape)
      if _within(ranges, box.ranges):
        at = (
          slice(a - first, b - first)
          for (a, b), (first, _) in zip(ranges, box.ranges)
        )
        values[(*at, ...)] = shard.data
    taken[box.name] = values
  return taken


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]):
  """Converts a shard's index to (first, last + 1) by axis."""
  return tuple(s.indices(size)[:2] for s, size in zip(index, shape))


def _within(inner, outer) -> bool:
  return all(
    first <= a and b <= last
    for (a, b), (first, last) in zip(inner, outer, strict=True)
  )
