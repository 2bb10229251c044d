# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays by name, and the CRCs of the boxes that they consist of.

A leaf's name is its path, such as 'params/block/norm'. A *box* is what one
device has of an array, and what Orbax writes at a time, such as '0:8,16:32'.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from diloco.numerics import boxes, native
from diloco.numerics.boxes import Box

NAMED_MAX = 3  # Number of differences that an error lists.
Crcs = dict[str, dict[str, int]]  # Name -> box -> CRC.


class BrokenRecord(Exception):
  """A file is corrupt, or belongs to another run."""


def named(tree: Any) -> dict[str, Any]:
  """Returns the leaves by path.

  The index of a tuple or list, such as a chain of optimizers, is no part of it
  unless two leaves would have one name.
  """
  paths = jax.tree_util.tree_leaves_with_path(tree)
  for short in (True, False):
    leaves = {_name(path, short): leaf for path, leaf in paths}
    if len(leaves) == len(paths):
      return leaves
  raise ValueError('two leaves of the tree have one name')


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Returns nested dicts, with a level for each part of a name."""
  tree: dict[str, Any] = {}
  for name, leaf in leaves.items():
    *parents, last = name.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = leaf
  return tree


def kinds(leaves: Mapping[str, Any]) -> dict[str, tuple[str, list[int]]]:
  """Returns dtype and shape of each leaf, as JSON."""
  return {name: (x.dtype.name, list(x.shape)) for name, x in leaves.items()}


def compare(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
  """Checks that two results of `kinds` are the same.

  Raises:
    BrokenRecord: names, shapes or dtypes differ.
  """
  differing = [
    f'{name} is {_kind(found.get(name))}, expected {_kind(expected.get(name))}'
    for name in sorted(found.keys() | expected.keys())
    if _kind(found.get(name)) != _kind(expected.get(name))
  ]
  if differing:
    more = len(differing) - NAMED_MAX
    raise BrokenRecord(
      '; '.join(differing[:NAMED_MAX]) + (f'; {more} more' * (more > 0))
    )


def crcs_of(leaves: Mapping[str, Any]) -> Crcs:
  """Returns the CRCs of the boxes that this process saves.

  It waits for what is being computed or copied to the host.
  """
  return {
    name: {
      box_name(index, leaf.shape): _crc(np.asarray(data))
      for index, data, is_saved in boxes_of(leaf)
      if is_saved
    }
    for name, leaf in leaves.items()
  }


def verify(leaves: Mapping[str, Any], crcs: Mapping[str, Mapping[str, int]]):
  """Checks the boxes that were saved and are in this process now.

  Saved and restored with the same mesh and hosts, these are all; so they are in
  a learner's only host, wherever it was saved. Otherwise a box may lie in
  several hosts, and is not checked.

  Args:
    leaves: by name, as restored.
    crcs: of all processes that saved, merged.

  Raises:
    BrokenRecord: a CRC differs, or boxes are missing.
  """
  for name, leaf in leaves.items():
    saved = {ranges_of(text): crc for text, crc in crcs.get(name, {}).items()}
    if sum(map(boxes.size, saved)) != math.prod(leaf.shape):
      raise BrokenRecord(f'the boxes of {name} are not all there')
    for box, expected in saved.items():
      found = values(leaf, box)
      if found is not None and (actual := _crc(found)) != expected:
        raise BrokenRecord(
          f'{name} has the CRC {actual:08x}, {expected:08x} was written'
        )


def boxes_of(leaf) -> Iterable[tuple[tuple[slice, ...], Any, bool]]:
  """Yields index and values of each box here, and if this process saves it."""
  if not isinstance(leaf, jax.Array):
    yield (slice(None),) * leaf.ndim, leaf, jax.process_index() == 0
    return
  for shard in leaf.addressable_shards:
    yield shard.index, shard.data, shard.replica_id == 0


def values(leaf, box: Box) -> np.ndarray | None:
  """Returns a box's values; None if this process does not have all of them."""
  held = ((boxes.at(i, leaf.shape), data) for i, data, _ in boxes_of(leaf))
  return boxes.read(held, box, leaf.dtype)


def box_name(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
  """Returns such as '0:8,16:32'."""
  return boxes.text(boxes.at(index, shape))


def ranges_of(text: str) -> Box:
  """Returns what `box_name` formatted."""
  ends = (part.split(':') for part in text.split(',') if part)
  return tuple((int(first), int(last)) for first, last in ends)


def _crc(array: np.ndarray) -> int:
  return native.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _name(path, short: bool) -> str:
  kept = [
    key
    for key in path
    if not (short and isinstance(key, jax.tree_util.SequenceKey))
  ]
  return jax.tree_util.keystr(tuple(kept), simple=True, separator='/')


def _kind(kind) -> str:
  """Formats dtype and shape, such as 'float32[4, 8]'."""
  return 'absent' if kind is None else f'{kind[0]}{list(kind[1])}'
