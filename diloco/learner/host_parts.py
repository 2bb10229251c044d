# SPDX-License-Identifier: Apache-2.0
"""A host's share of a tree of jax arrays: to numpy boxes, and back."""

from typing import Any

import jax
import numpy as np

from diloco.checkpoint.arrays import named, values
from diloco.numerics import boxes
from diloco.numerics.boxes import Box

# By name of the leaf; none is empty, and together they are all that the host's
# devices need.
Parts = dict[str, list[tuple[Box, np.ndarray]]]


def empty(likes: Any) -> Parts:
  """Returns arrays to be written to.

  Args:
    likes: a tree of shapes, dtypes and shardings.
  """
  return {
    name: [
      (box, np.empty(boxes.shape(box), like.dtype)) for box in _boxes(like)
    ]
    for name, like in named(likes).items()
  }


def to_host(tree: Any) -> Parts:
  """Returns the arrays on the host (all transfers concurrently).

  Arrays on CPU devices are not copied: they must not be donated while the
  result is in use.
  """
  leaves = named(tree)
  for leaf in leaves.values():
    leaf.copy_to_host_async()
  return {
    name: [(box, values(leaf, box)) for box in _boxes(leaf)]
    for name, leaf in leaves.items()
  }


def place(parts: Parts, likes: Any) -> Any:
  """Returns the tree `likes` with the values in it, where its leaves lie.

  Args:
    parts: emptied, so that each leaf is on the host or in its place, not both.
  """

  def placed(held: list, like) -> jax.Array:
    if like.sharding.is_fully_addressable:
      [(_, whole)] = held
      return jax.device_put(whole, like.sharding)
    return jax.make_array_from_callback(
      like.shape,
      like.sharding,
      lambda index: boxes.read(held, boxes.at(index, like.shape), like.dtype),
    )

  leaves = [
    placed(parts.pop(name), like) for name, like in named(likes).items()
  ]
  return jax.tree.structure(likes).unflatten(leaves)


def _boxes(like) -> list[Box]:
  if like.sharding.is_fully_addressable:
    return [boxes.whole(like.shape)]
  indices = like.sharding.addressable_devices_indices_map(like.shape).values()
  return sorted({boxes.at(index, like.shape) for index in indices})
