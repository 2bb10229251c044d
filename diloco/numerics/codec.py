# SPDX-License-Identifier: Apache-2.0
"""Codecs by name: how a vector of f32 becomes bytes, and how many."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np

from diloco.numerics import block_codec


class Codec(Protocol):
  """Encodes vectors; decoding gives the same bits on every machine.

  Finite vectors decode to finite values, others to vectors with non-finite
  values. The shape is not part of the bytes.
  """

  name: str

  @property
  def block_values(self) -> int:
    """Number of values that are encoded together; the last block may be
    shorter.
    """

  def nbytes(self, n: int) -> int:
    """Returns the exact size of n encoded values."""

  def select(self, data: np.ndarray, n: int, blocks: np.ndarray) -> np.ndarray:
    """Returns the encoding of some blocks alone, from that of n values.

    Args:
      data: uint8 [nbytes(n)].
      blocks: indices of the blocks, ascending.
    """

  def encode(
    self, x: np.ndarray, rng: np.random.Generator | None = None
  ) -> np.ndarray:
    """Encodes f32 [n] as a new uint8 [nbytes(n)].

    `rng` rounds stochastically; `ValueError` if the codec can't.
    """

  def decode(self, data: np.ndarray, n: int) -> np.ndarray:
    """Decodes uint8 [nbytes(n)] to f32 [n]; `ValueError` for any other
    length.
    """


def make_codec(name: str, block_size: int = 128, scale: str = 'bf16') -> Codec:
  """Makes the codec `name`.

  Args:
    block_size: values that share a scale ('int…' only); smaller is more
      accurate and larger on the wire.
    scale: type of the scales, 'bf16' or 'f32' ('int…' only).

  Raises:
    ValueError: an argument is out of range.
  """
  if name not in CODECS:
    raise ValueError(f'codec {name!r}, must be one of {tuple(CODECS)}')
  multiple = block_codec.BLOCK_MULTIPLE
  if not isinstance(block_size, int) or block_size < 1 or block_size % multiple:
    raise ValueError(
      f'{name} with block {block_size}, must be a positive multiple of '
      f'{multiple}'
    )
  if scale not in block_codec.SCALE_BYTES:
    raise ValueError(
      f'{name} with scale {scale!r}, must be one of '
      f'{tuple(block_codec.SCALE_BYTES)}'
    )
  return CODECS[name].make(block_size, scale)


def bytes_per_value(
  name: str, block_size: int = 128, scale: str = 'bf16'
) -> float:
  """Returns the bytes per value of a long tensor, with its share of a scale.

  The arguments and errors are those of `make_codec`.
  """
  made = make_codec(name, block_size, scale)
  return made.nbytes(made.block_values) / made.block_values


@dataclasses.dataclass(frozen=True)
class Float32Codec:
  """Stores the bytes unchanged, little-endian."""

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
  """Stores the nearest bfloat16, little-endian; clips to the largest one."""

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
      bits[part] = block_codec.to_bits(x[part])
    return data

  def decode(self, data: np.ndarray, n: int) -> np.ndarray:
    _check_size(self, data, n)
    x = np.empty(n, np.float32)
    bits = data.view('<u2')
    for part in _chunks(n):
      x[part] = block_codec.from_bits(bits[part])
    return x


def _chunks(n: int):
  step = block_codec.CHUNK_VALUES
  return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _check(name: str, x: np.ndarray, rng: np.random.Generator | None):
  block_codec.check_values(name, x)
  if rng is not None:
    raise block_codec.not_stochastic(name)


def _check_size(codec: Codec, data: np.ndarray, n: int):
  if data.dtype != np.uint8 or data.shape != (codec.nbytes(n),):
    raise ValueError(
      f'{codec.name}: {data.dtype} {data.shape} is not {n} values; these are '
      f'uint8 ({codec.nbytes(n)},)'
    )


@dataclasses.dataclass(frozen=True)
class CodecKind:
  """A codec of `CODECS`.

  Attributes:
    make: takes the block size and the type of the scales.
  """

  make: Callable[[int, str], Codec]


def in_blocks(bits: int) -> CodecKind:
  """Returns the codec of blocks of integers; their bits are `BITS`.

  Raises:
    ValueError: values of so many bits can't be packed.
  """
  if bits not in block_codec.BITS:
    raise ValueError(
      f'a codec of {bits} bits: blocks pack {block_codec.BITS[0]} to '
      f'{block_codec.BITS[-1]} bits'
    )
  name = f'int{bits}'
  return CodecKind(lambda *blocks: block_codec.BlockCodec(name, bits, *blocks))


CODECS = {
  'int1': in_blocks(1),
  'int2': in_blocks(2),
  'int4': in_blocks(4),
  'int8': in_blocks(8),
  'bf16': CodecKind(lambda block_size, scale: Bfloat16Codec()),
  'f32': CodecKind(lambda block_size, scale: Float32Codec()),
}
NAMES = tuple(CODECS)
