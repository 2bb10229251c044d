# SPDX-License-Identifier: Apache-2.0
"""What one host has of a tree of arrays, as named numpy arrays, and back.

If an array is spread over several processes, each has its own shards, under
names that say which, such as 'params/norm@0:8,16:32'.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from diloco.checkpoint.arrays import named


def to_host(tree: Any) -> dict[str, np.ndarray]:
  """Returns name -> array on the host (all transfers concurrently).

  Arrays on CPU devices are not copied: they must not be donated while the
  result is in use.
  """
  leaves = {}
  for name, leaf in named(tree).items():
    leaves |= _parts(name, leaf)
  for leaf in leaves.values():
    if isinstance(leaf, jax.Array):
      leaf.copy_to_host_async()
  return {name: _on_host(leaf) for name, leaf in leaves.items()}


def expected(likes: Any) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns shape and dtype of what this process has of a tree, by name.

  Args:
    likes: a tree; its leaves have shape and dtype, and may have a sharding.
  """
  return {
    part: jax.ShapeDtypeStruct(_shape(index, like), like.dtype)
    for name, like in named(likes).items()
    for part, index in _expected(name, like)
  }


def place(arrays: Mapping[str, np.ndarray], likes: Any) -> Any:
  """Returns the tree `likes` with `arrays` in it, where its leaves lie."""
  placed = [_placed(name, arrays, x) for name, x in named(likes).items()]
  return jax.tree.structure(likes).unflatten(placed)


def _placed(name: str, arrays: Mapping[str, np.ndarray], like) -> jax.Array:
  if like.sharding.is_fully_addressable:
    return jax.device_put(arrays[name], like.sharding)
  return jax.make_array_from_callback(
    like.shape,
    like.sharding,
    lambda index: arrays[_part_name(name, index, like)],
  )


def _parts(name: str, leaf) -> dict[str, Any]:
  """Returns a leaf's parts in this process."""
  if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
    return {name: leaf}
  return {
    _part_name(name, shard.index, leaf): shard.data
    for shard in leaf.addressable_shards
  }


def _expected(name: str, like):
  """Returns (name, index) of the parts of a leaf that are of this process."""
  sharding = getattr(like, 'sharding', None)
  if sharding is None or sharding.is_fully_addressable:
    return {name: None}.items()
  indices = sharding.addressable_devices_indices_map(like.shape).values()
  return {_part_name(name, index, like): index for index in indices}.items()


def _part_name(name: str, index: tuple[slice, ...], like) -> str:
  ranges = (s.indices(n)[:2] for s, n in zip(index, like.shape))
  return f'{name}@' + ','.join(f'{a}:{b}' for a, b in ranges)


def _shape(index: tuple[slice, ...] | None, like) -> tuple[int, ...]:
  if index is None:
    return tuple(like.shape)
  return tuple(len(range(*s.indices(n))) for s, n in zip(index, like.shape))


def _on_host(leaf) -> np.ndarray:
  if not isinstance(leaf, jax.Array) or len(leaf.devices()) == 1:
    return np.asarray(leaf)
  # jax would keep what it puts together for as long as it has the array.
  whole = np.empty(leaf.shape, leaf.dtype)
  for shard in leaf.addressable_shards:
    whole[shard.index] = shard.data
  return whole
