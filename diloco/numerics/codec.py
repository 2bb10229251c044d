# SPDX-License-Identifier: Apache-2.0
"""Codecs by name: how a vector of f32 becomes bytes, and how many."""

import dataclasses
from typing import Protocol

import numpy as np

from diloco.numerics import bfloat16, block_codec

NAMES = ('int1', 'int2', 'int4', 'int8', 'bf16', 'f32')


class Codec(Protocol):
  """Encodes vectors; decoding gives the same bits on every machine.

  What is finite decodes to finite values, and what is not to values of which
  some are not. The shape is not in the bytes.
  """

  name: str

  @property
  def block_values(self) -> int:
    """Values that are encoded together; of n, the last block may be shorter."""

  def nbytes(self, n: int) -> int:
    """Exact size of n encoded values."""

  def select(self, data: np.ndarray, n: int, blocks: np.ndarray) -> np.ndarray:
    """The encoding of those blocks alone, out of that of n values.

    Args:
      data: uint8 [nbytes(n)].
      n: values in all.
      blocks: their numbers, ascending.
    """

  def encode(
    self, x: np.ndarray, rng: np.random.Generator | None = None
  ) -> np.ndarray:
    """f32 [n] to an uint8 [nbytes(n)] of its own.

    `rng` rounds stochastically; `ValueError` where the codec can't.
    """

  def decode(self, data: np.ndarray, n: int) -> np.ndarray:
    """uint8 [nbytes(n)] to f32 [n]; `ValueError` at any other length."""


def make_codec(name: str, block_size: int = 128, scale: str = 'bf16') -> Codec:
  """The codec `name`.

  Args:
    name: one of `NAMES`.
    block_size: values that share a scale ('int…' only); smaller is more
      accurate and larger on the wire.
    scale: type of the scales, 'bf16' or 'f32' ('int…' only).

  Raises:
    ValueError: an argument is out of range.
  """
  if name not in NAMES:
    raise ValueError(f'codec {name!r}, must be one of {NAMES}')
  if not isinstance(block_size, int) or block_size < 1 or block_size % 8:
    raise ValueError(
      f'{name} with block {block_size}, must be a positive multiple of 8'
    )
  if scale not in block_codec.SCALE_BYTES:
    raise ValueError(
      f'{name} with scale {scale!r}, must be one of '
      f'{tuple(block_codec.SCALE_BYTES)}'
    )
  if name == 'f32':
    return Float32Codec()
  if name == 'bf16':
    return Bfloat16Codec()
  bits = int(name.removeprefix('int'))
  return block_codec.BlockCodec(name, bits, block_size, scale)


@dataclasses.dataclass(frozen=True)
class Float32Codec:
  """The bytes as they are, little-endian."""

  name: str = 'f32'
  block_values: int = 1

  def select(self, data: np.ndarray, n: int, blocks: np.ndarray) -> np.ndarray:
    _check_size(self, data, n)
    return data.view('<f4')[blocks].view(np.uint8)

  def nbytes(self, n: int) -> int:
    return 4 * n

  def encode(
    self, x: np.ndarray, rng: np.random.Generator | None = None
  ) -> np.ndarray:
    _check(self.name, x, rng)
    return x.astype('<f4').view(np.uint8)

  def decode(self, data: np.ndarray, n: int) -> np.ndarray:
    _check_size(self, data, n)
    return data.view('<f4').astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Bfloat16Codec:
  """The nearest bfloat16, little-endian; cut to the largest one."""

  name: str = 'bf16'
  block_values: int = 1

  def select(self, data: np.ndarray, n: int, blocks: np.ndarray) -> np.ndarray:
    _check_size(self, data, n)
    return data.view('<u2')[blocks].view(np.uint8)

  def nbytes(self, n: int) -> int:
    return 2 * n

  def encode(
    self, x: np.ndarray, rng: np.random.Generator | None = None
  ) -> np.ndarray:
    _check(self.name, x, rng)
    data = np.empty(self.nbytes(x.size), np.uint8)
    bits = data.view('<u2')
    for part in _chunks(x.size):
      bits[part] = bfloat16.to_bits(x[part])
    return data

  def decode(self, data: np.ndarray, n: int) -> np.ndarray:
    _check_size(self, data, n)
    x = np.empty(n, np.float32)
    bits = data.view('<u2')
    for part in _chunks(n):
      x[part] = bfloat16.from_bits(bits[part])
    return x


def _chunks(n: int):
  step = block_codec.CHUNK_VALUES
  return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _check(name: str, x: np.ndarray, rng: np.random.Generator | None):
  block_codec.check_values(name, x)
  if rng is not None:
    raise ValueError(f'stochastic rounding needs int4 or int8, not {name}')


def _check_size(codec: Codec, data: np.ndarray, n: int):
  if data.dtype != np.uint8 or data.shape != (codec.nbytes(n),):
    raise ValueError(
      f'{codec.name}: {data.dtype} {data.shape} is not {n} values; these are '
      f'uint8 ({codec.nbytes(n)},)'
    )
