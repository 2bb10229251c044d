# SPDX-License-Identifier: Apache-2.0
"""Converts an inner optimizer state to bytes for another learner, and back.

A learner of one process sends it whole. If there are several, each host sends
the shards of its own devices to the host of the same number in another learner,
whose devices hold the same shards if both are partitioned alike.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

CHUNK_BYTES_MAX = 1 << 26  # Per payload: bounds what a lost pull costs.


def size_bytes(like) -> int:
  """Returns the bytes of a state of this structure.

  Args:
    like: a pytree of arrays or of `jax.ShapeDtypeStruct`.
  """
  return sum(_nbytes(leaf) for leaf in jax.tree.leaves(like))


def to_chunks(state) -> list[np.ndarray]:
  """Cuts all leaves, in the pytree's order, into uint8 payloads.

  Bits are copied without conversion. A state of no bytes, such as that of SGD
  without momentum, gives no chunks.
  """
  return _cut(np.asarray(leaf) for leaf in jax.tree.leaves(state))


def from_chunks(chunks: Sequence[np.ndarray], like):
  """Returns the state that `to_chunks` cut, with the structure of `like`.

  Raises:
    ValueError: the number of bytes is wrong.
  """
  whole = _joined(chunks)
  if whole.size != size_bytes(like):
    raise ValueError(
      f'{whole.size} bytes of inner state, this learner has {size_bytes(like)}'
    )
  leaves, structure = jax.tree.flatten(like)
  arrays, start = [], 0
  for leaf in leaves:
    stop = start + _nbytes(leaf)
    part = whole[start:stop].view(leaf.dtype).reshape(leaf.shape)
    arrays.append(part)
    start = stop
  return structure.unflatten(arrays)


Ranges = tuple[tuple[int, int], ...]  # (first, last + 1) by axis.
Shards = Mapping[Ranges, np.ndarray]  # The shards of one leaf on one host.


def shards_to_chunks(state) -> list[np.ndarray]:
  """Cuts the distinct shards on this process's devices into uint8 payloads.

  Args:
    state: a pytree of arrays on the devices of several processes.
  """
  return _cut(
    np.asarray(data)
    for leaf in jax.tree.leaves(state)
    for _, data in sorted(_held(leaf).items(), key=lambda item: item[0])
  )


def shards_size_bytes(like) -> int:
  """Returns how many bytes `shards_to_chunks` gives for this structure.

  Args:
    like: a pytree of `jax.ShapeDtypeStruct`, with shardings.
  """
  return sum(
    _shard_nbytes(leaf, ranges)
    for leaf in jax.tree.leaves(like)
    for ranges in _ranges_here(leaf)
  )


def shards_from_chunks(chunks: Sequence[np.ndarray], like):
  """Returns the pytree of `Shards` that `shards_to_chunks` cut.

  Raises:
    ValueError: the number of bytes is wrong.
  """
  whole, wanted = _joined(chunks), shards_size_bytes(like)
  if whole.size != wanted:
    raise ValueError(
      f'{whole.size} bytes of inner state, this host has {wanted}'
    )
  leaves, structure = jax.tree.flatten(like)
  found, start = [], 0
  for leaf in leaves:
    shards = {}
    for ranges in _ranges_here(leaf):
      stop = start + _shard_nbytes(leaf, ranges)
      shape = tuple(b - a for a, b in ranges)
      shards[ranges] = whole[start:stop].view(leaf.dtype).reshape(shape)
      start = stop
    found.append(shards)
  return structure.unflatten(found)


def place_shards(state, like):
  """Puts a state on the devices to which each process adds its own shards.

  Args:
    state: as `shards_from_chunks` gives it.
    like: shapes, dtypes and shardings.
  """
  leaves, structure = jax.tree.flatten(like)
  return structure.unflatten(
    jax.make_array_from_callback(
      leaf.shape,
      leaf.sharding,
      lambda index, leaf=leaf, shards=shards: shards[
        _ranges(index, leaf.shape)
      ],
    )
    for leaf, shards in zip(leaves, structure.flatten_up_to(state))
  )


def _held(leaf: jax.Array) -> dict[Ranges, jax.Array]:
  return {
    _ranges(shard.index, leaf.shape): shard.data
    for shard in leaf.addressable_shards
  }


def _ranges_here(leaf) -> list[Ranges]:
  here = leaf.sharding.addressable_devices_indices_map(leaf.shape)
  return sorted({_ranges(index, leaf.shape) for index in here.values()})


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> Ranges:
  return tuple(s.indices(size)[:2] for s, size in zip(index, shape))


def _shard_nbytes(leaf, ranges: Ranges) -> int:
  size = math.prod(b - a for a, b in ranges)
  return size * np.dtype(leaf.dtype).itemsize


def _cut(arrays: Iterable[np.ndarray]) -> list[np.ndarray]:
  """Cuts the arrays' bytes into chunks, with one more array in memory at a
  time.
  """
  chunks: list[np.ndarray] = []
  open_parts: list[np.ndarray] = []
  room = CHUNK_BYTES_MAX
  for array in arrays:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    while data.size:
      part, data = data[:room], data[room:]
      open_parts.append(part)
      room -= part.size
      if not room:
        chunks.append(_joined(open_parts))
        open_parts, room = [], CHUNK_BYTES_MAX
  if open_parts:
    chunks.append(_joined(open_parts))
  return chunks


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate([np.empty(0, np.uint8), *parts])


def is_finite(state) -> bool:
  """Returns True if no value of a host's copy is NaN or infinite."""
  return all(
    bool(np.isfinite(leaf).all())
    for leaf in jax.tree.leaves(state)
    if np.issubdtype(leaf.dtype, np.floating)
  )


def _nbytes(leaf) -> int:
  return int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
