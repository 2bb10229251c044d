# SPDX-License-Identifier: Apache-2.0
"""Cuts from the bytes of a fragment those that one host needs.

The syncer encodes an outer update once, for all learners; a host of a learner
takes the codec blocks that its slices touch. What it decodes has the same bits
as in the whole. If slices begin and end between blocks, as they do on real
meshes (the part of a host is a multiple of 128 values along the last axis, or
whole rows), it takes nothing that it does not need.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from diloco.numerics.codec import Codec
from diloco.numerics.fragments import Pieces
from diloco.numerics.partition import Box


@dataclasses.dataclass(frozen=True)
class _Cover:
  """The blocks of a piece that a slice touches.

  Attributes:
    blocks: their indices, ascending.
    values: how many values they have together.
    positions: indices of the slice's values among those; None: all, in order.
  """

  blocks: np.ndarray
  values: int
  positions: np.ndarray | None


def cut_bytes(boxes: Sequence[Box], codec: Codec) -> int:
  """Returns the exact size of what `cut` gives."""
  return sum(codec.nbytes(_cover(box, codec).values) for box in boxes)


def cut(
  data: np.ndarray, pieces: Pieces, boxes: Sequence[Box], codec: Codec
) -> np.ndarray:
  """Returns the bytes of `boxes`, uint8 [cut_bytes].

  Args:
    data: `payload.encode` of `pieces`.
    pieces: the pieces of a fragment.
    boxes: slices of some of them, in their order.
    codec: the codec that wrote the data.
  """
  starts, start = {}, 0
  for piece in pieces:
    starts[piece.name] = start
    start += codec.nbytes(piece.size)
  parts = [np.empty(0, np.uint8)]
  for box in boxes:
    start, size = starts[box.piece.name], box.piece.size
    encoded = data[start : start + codec.nbytes(size)]
    parts.append(codec.select(encoded, size, _cover(box, codec).blocks))
  return np.concatenate(parts)


def decode_cut(
  data: np.ndarray, boxes: Sequence[Box], codec: Codec
) -> dict[str, np.ndarray]:
  """Decodes the values of `boxes` by name, f32, each of its box's shape.

  Raises:
    ValueError: `data` has not exactly `cut_bytes` bytes.
  """
  covers = [_cover(box, codec) for box in boxes]
  nbytes = sum(codec.nbytes(cover.values) for cover in covers)
  if data.dtype != np.uint8 or data.shape != (nbytes,):
    raise ValueError(
      f'payload is {data.dtype} {data.shape}; these boxes take '
      f'uint8 ({nbytes},) in {codec.name}'
    )
  arrays, start = {}, 0
  for box, cover in zip(boxes, covers):
    stop = start + codec.nbytes(cover.values)
    vector = codec.decode(data[start:stop], cover.values)
    if cover.positions is not None:
      vector = vector[cover.positions]
    arrays[box.name] = vector.reshape(box.shape)
    start = stop
  return arrays


def _cover(box: Box, codec: Codec) -> _Cover:
  block, shape = codec.block_values, box.piece.shape
  total = box.piece.size
  axis, run = _run(box)
  first, last = box.ranges[axis] if shape else (0, 1)
  # After this many values, indices on the axis repeat.
  row = run * (shape[axis] if shape else 1)
  leading = total // row
  aligned = first * run % block == 0 and (
    (last * run % block == 0 and (leading == 1 or row % block == 0))
    or (leading == 1 and last * run == row)
  )
  if aligned:
    grid = np.arange(-(-total // block)).reshape(*shape[:axis], -1)
    lead = tuple(slice(a, b) for a, b in box.ranges[:axis])
    ends = slice(first * run // block, -(-last * run // block))
    return _Cover(grid[(*lead, ends)].reshape(-1), box.size, None)
  axes = (np.arange(a, b) for a, b in box.ranges)
  flat = np.ravel_multi_index(np.ix_(*axes), shape).reshape(-1)
  blocks, nth = np.unique(flat // block, return_inverse=True)
  values = blocks.size * block
  if blocks[-1] == total // block:  # The last one, which is shorter.
    values += total % block - block
  return _Cover(blocks, values, nth.reshape(-1) * block + flat % block)


def _run(box: Box) -> tuple[int, int]:
  """Returns the last axis that is cut, and the values behind each index."""
  shape = box.piece.shape
  for axis in reversed(range(len(shape))):
    if box.shape[axis] != shape[axis]:
      return axis, math.prod(shape[axis + 1 :])
  return 0, math.prod(shape[1:])
