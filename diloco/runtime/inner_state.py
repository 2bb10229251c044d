# SPDX-License-Identifier: Apache-2.0
"""An inner optimizer state as bytes that travel from peer to peer, and back."""

from collections.abc import Sequence

import jax
import numpy as np

CHUNK_BYTES_MAX = 1 << 26  # Of one payload: bounds what a lost pull costs.


def size_bytes(like) -> int:
  """How many bytes a state of this structure has.

  Args:
    like: a pytree of arrays or of `jax.ShapeDtypeStruct`.
  """
  return sum(_nbytes(leaf) for leaf in jax.tree.leaves(like))


def to_chunks(state) -> list[np.ndarray]:
  """All leaves, in the pytree's order, cut into uint8 payloads.

  The bits count: nothing is converted. None for a state of no bytes, such as
  that of SGD without momentum.
  """
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
  whole = _joined(
    [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in leaves]
  )
  starts = range(0, whole.size, CHUNK_BYTES_MAX)
  return [whole[start : start + CHUNK_BYTES_MAX] for start in starts]


def from_chunks(chunks: Sequence[np.ndarray], like):
  """The state that `to_chunks` cut, with the structure of `like`.

  Raises:
    ValueError: it is not as many bytes.
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


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate([np.empty(0, np.uint8), *parts])


def is_finite(state) -> bool:
  """Whether no value of a host's copy is NaN or infinite."""
  return all(
    bool(np.isfinite(leaf).all())
    for leaf in jax.tree.leaves(state)
    if np.issubdtype(leaf.dtype, np.floating)
  )


def _nbytes(leaf) -> int:
  return int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
