# SPDX-License-Identifier: Apache-2.0
"""The bytes of a fragment: encoded whole, decoded whole or in part.

Pieces are encoded separately, in the order of the layout, so that no block of a
codec spans two tensors, and the fragmentation does not change what a piece
decodes to.
"""

import dataclasses
import math
import struct
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from diloco.numerics import native
from diloco.numerics.codec import BlockCodec, Codec, EncodedArray
from diloco.numerics.fragments import Pieces
from diloco.numerics.mesh_partition import Slice

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array of its shape.


def payload_bytes(pieces: Pieces, codec: Codec) -> int:
  """Returns the exact size of the encoded fragment."""
  return sum(codec.nbytes(piece.size) for piece in pieces)


def encode(arrays: Arrays, pieces: Pieces, codec: Codec) -> np.ndarray:
  """Returns the fragment as uint8 [payload_bytes].

  Raises:
    ValueError: an array is not f32 or not of its piece's shape.
  """
  if len(pieces) == 1:
    return codec.encode(_vector(arrays, pieces[0]))
  data = np.empty(payload_bytes(pieces, codec), np.uint8)
  start = 0
  for piece in pieces:
    part = codec.encode(_vector(arrays, piece))
    data[start : start + part.size] = part
    start += part.size
  return data


def decode(
  data: np.ndarray, pieces: Pieces, codec: Codec
) -> dict[str, np.ndarray]:
  """Decodes a fragment to arrays of the pieces' shapes; inverse of `encode`.

  Raises:
    ValueError: `data` has not exactly `payload_bytes` bytes.
  """
  return {
    piece.name: codec.decode(part, piece.size).reshape(piece.shape)
    for piece, part in _parts(data, pieces, codec)
  }


def inspect(
  data: np.ndarray, pieces: Pieces, codec: Codec
) -> dict[str, np.ndarray | EncodedArray]:
  """Does what `decode` does, but what can be merged as it is stays encoded."""
  arrays = {}
  for piece, part in _parts(data, pieces, codec):
    values = None
    if isinstance(codec, BlockCodec):
      values = codec.inspect(part, piece.shape)
    if values is None:
      values = codec.decode(part, piece.size).reshape(piece.shape)
    arrays[piece.name] = values
  return arrays


def _parts(data: np.ndarray, pieces: Pieces, codec: Codec):
  """Yields each piece with its bytes."""
  nbytes = payload_bytes(pieces, codec)
  if data.dtype != np.uint8 or data.shape != (nbytes,):
    raise ValueError(
      f'payload is {data.dtype} {data.shape}; the fragment takes '
      f'uint8 ({nbytes},) in {codec.name}'
    )
  start = 0
  for piece in pieces:
    stop = start + codec.nbytes(piece.size)
    yield piece, data[start:stop]
    start = stop


def crc(arrays: Arrays, pieces: Pieces) -> int:
  """Returns the CRC of a fragment: `crc_of` its pieces, in the layout's order.

  It covers bits, not values: -0.0 and 0.0 differ.
  """
  return crc_of(piece_crcs(arrays, pieces))


def piece_crcs(arrays: Arrays, pieces: Pieces) -> tuple[int, ...]:
  """Returns `zlib.crc32` of each piece's little-endian f32 bytes."""
  vectors = (
    _vector(arrays, piece).astype('<f4', copy=False) for piece in pieces
  )
  return tuple(native.crc32(vector) for vector in vectors)


def crc_of(crcs: Sequence[int]) -> int:
  """Combines CRCs into one: the CRC of their u32s.

  So a fragment whose pieces are held by several processes has one CRC, which
  can be computed from theirs without the bytes.
  """
  return zlib.crc32(struct.pack(f'<{len(crcs)}I', *crcs))


def is_finite(arrays: Arrays) -> bool:
  """Returns True if no value is NaN or infinite."""
  return all(bool(np.isfinite(array).all()) for array in arrays.values())


def _vector(arrays: Arrays, piece) -> np.ndarray:
  array = arrays[piece.name]
  if array.dtype != np.float32 or array.shape != piece.shape:
    raise ValueError(
      f'{piece.name}: {array.dtype} {array.shape}, must be float32 '
      f'{piece.shape}'
    )
  return np.ascontiguousarray(array).reshape(-1)


# Cuts from the bytes of a fragment those that one host needs.
#
# The syncer encodes an outer update once, for all learners; a host of a learner
# takes the codec blocks that its slices touch. What it decodes has the same
# bits as in the whole. If slices begin and end between blocks, as they do on
# real meshes (the part of a host is a multiple of 128 values along the last
# axis, or whole rows), it takes nothing that it does not need.


@dataclasses.dataclass(frozen=True)
class _Cover:
  """The blocks of a piece that a slice touches.

  Attributes:
    blocks: their indices, ascending.
    values: how many values they have together.
    positions: where the slice's values are among those; None: all, in order.
  """

  blocks: np.ndarray
  values: int
  positions: np.ndarray | slice | None


def cut_bytes(boxes: Sequence[Slice], codec: Codec) -> int:
  """Returns the exact size of what `cut` gives."""
  return sum(codec.nbytes(_cover(box, codec).values) for box in boxes)


def cut(
  data: np.ndarray, pieces: Pieces, boxes: Sequence[Slice], codec: Codec
) -> np.ndarray:
  """Returns the bytes of `boxes`, uint8 [cut_bytes].

  Args:
    data: `payload.encode` of `pieces`.
    pieces: the pieces of a fragment.
    boxes: slices of some of them, in their order.
    codec: the codec that wrote the data.
  """
  encoded = {piece.name: part for piece, part in _parts(data, pieces, codec)}
  parts = [np.empty(0, np.uint8)]
  for box in boxes:
    whole, blocks = encoded[box.piece.name], _cover(box, codec).blocks
    parts.append(codec.select(whole, box.piece.size, blocks))
  return np.concatenate(parts)


def decode_cut(
  data: np.ndarray, boxes: Sequence[Slice], codec: Codec
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


def _cover(box: Slice, codec: Codec) -> _Cover:
  block, shape = codec.block_values, box.piece.shape
  axis, run = _run(box)
  first, last = box.ranges[axis] if shape else (0, 1)
  # The slice is a run of values in each of the rows that it has.
  row, width = run * (shape[axis] if shape else 1), run * (last - first)
  lead = tuple(slice(a, b) for a, b in box.ranges[:axis])
  rows = np.arange(box.piece.size // row).reshape(shape[:axis])[lead]
  starts = rows.reshape(-1) * row + first * run
  lows, highs = starts // block, -(-(starts + width) // block)
  lows[1:] = np.maximum(lows[1:], highs[:-1])  # Two runs may share a block.
  counts = highs - lows
  ends = np.cumsum(counts)
  blocks = np.repeat(highs - ends, counts) + np.arange(ends[-1])
  values = blocks.size * block
  if blocks[-1] == box.piece.size // block:  # The last one, which is shorter.
    values += box.piece.size % block - block
  if values == box.size:
    return _Cover(blocks, values, None)
  begin = np.searchsorted(blocks, starts // block) * block + starts % block
  if begin.size == 1:
    return _Cover(blocks, values, slice(begin[0], begin[0] + width))
  positions = begin[:, None] + np.arange(width)
  return _Cover(blocks, values, positions.reshape(-1))


def _run(box: Slice) -> tuple[int, int]:
  """Returns the last axis that is cut, and the values behind each index."""
  shape = box.piece.shape
  for axis in reversed(range(len(shape))):
    if box.shape[axis] != shape[axis]:
      return axis, math.prod(shape[axis + 1 :])
  return 0, math.prod(shape[1:])
