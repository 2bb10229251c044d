# SPDX-License-Identifier: Apache-2.0
"""What one host has of a tree of arrays, as named numpy arrays, and back.

Of an array that is spread over several processes each has its own boxes, under
names that say which, such as 'params/norm@0:8,16:32'.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from diloco.checkpoint.arrays import box_name, named, ranges_of, values


def expected(likes: Any) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns shape and dtype of what this process has of a tree, by name.

  Args:
    likes: a tree of arrays, or of their shapes, dtypes and shardings.
  """
  return {
    part: jax.ShapeDtypeStruct([b - a for a, b in ranges], like.dtype)
    for name, like in named(likes).items()
    for part, ranges in _parts(name, like).items()
  }


def to_host(tree: Any) -> dict[str, np.ndarray]:
  """Returns name -> array on the host (all transfers concurrently).

  Arrays on CPU devices are not copied: they must not be donated while the
  result is in use.
  """
  leaves = named(tree)
  for leaf in leaves.values():
    leaf.copy_to_host_async()
  return {
    part: values(leaf, ranges)
    for name, leaf in leaves.items()
    for part, ranges in _parts(name, leaf).items()
  }


def place(arrays: Mapping[str, np.ndarray], likes: Any) -> Any:
  """Returns the tree `likes` with `arrays` in it, where its leaves lie."""

  def placed(name: str, like) -> jax.Array:
    if like.sharding.is_fully_addressable:
      return jax.device_put(arrays[name], like.sharding)
    return jax.make_array_from_callback(
      like.shape,
      like.sharding,
      lambda index: arrays[f'{name}@{box_name(index, like.shape)}'],
    )

  leaves = [placed(name, like) for name, like in named(likes).items()]
  return jax.tree.structure(likes).unflatten(leaves)


def _parts(name: str, like) -> dict[str, Any]:
  """Returns the ranges of a leaf's parts in this process, by name."""
  if like.sharding.is_fully_addressable:
    return {name: tuple((0, n) for n in like.shape)}
  indices = like.sharding.addressable_devices_indices_map(like.shape).values()
  boxes = [box_name(index, like.shape) for index in indices]
  return {f'{name}@{box}': ranges_of(box) for box in boxes}
