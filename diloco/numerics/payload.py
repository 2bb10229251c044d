# SPDX-License-Identifier: Apache-2.0
"""The bytes of a fragment: its pieces, each encoded alone, concatenated.

Pieces are encoded separately, in the order of the layout, so that no block of a
codec spans two tensors, and the fragmentation does not change what a piece
decodes to.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from diloco.numerics.codec import Codec
from diloco.numerics.fragments import Pieces

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array of its shape.


def payload_bytes(pieces: Pieces, codec: Codec) -> int:
  """Returns the exact size of the encoded fragment."""
  return sum(codec.nbytes(piece.size) for piece in pieces)


def encode(
  arrays: Arrays,
  pieces: Pieces,
  codec: Codec,
  rng: np.random.Generator | None = None,
) -> np.ndarray:
  """Returns the fragment as uint8 [payload_bytes]; `rng`: see `Codec.encode`.

  Raises:
    ValueError: an array is not f32 or not of its piece's shape.
  """
  vectors = (_vector(arrays, piece) for piece in pieces)
  parts = [codec.encode(vector, rng) for vector in vectors]
  return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def decode(
  data: np.ndarray, pieces: Pieces, codec: Codec
) -> dict[str, np.ndarray]:
  """Decodes a fragment to arrays of the pieces' shapes; inverse of `encode`.

  Raises:
    ValueError: `data` has not exactly `payload_bytes` bytes.
  """
  nbytes = payload_bytes(pieces, codec)
  if data.dtype != np.uint8 or data.shape != (nbytes,):
    raise ValueError(
      f'payload is {data.dtype} {data.shape}; the fragment takes '
      f'uint8 ({nbytes},) in {codec.name}'
    )
  arrays, start = {}, 0
  for piece in pieces:
    stop = start + codec.nbytes(piece.size)
    vector = codec.decode(data[start:stop], piece.size)
    arrays[piece.name] = vector.reshape(piece.shape)
    start = stop
  return arrays


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
  return tuple(zlib.crc32(vector.view(np.uint8)) for vector in vectors)


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
