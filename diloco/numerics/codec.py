# SPDX-License-Identifier: Apache-2.0
"""Codecs by name: how a vector of f32 becomes bytes, and how many.

f32 and bf16 are stored as they are. All others quantise block by block to 1 to
8 bits a value and one scale; a value is level · scale, with a small integer:

  3 to 8 bits   levels -L … L, L = 2ᵇ⁻¹ - 1   scale = max|x| / (L + ½ - margin)
  2 bits        levels -3, -1, 1, 3           scale = Σ|x|·|level| / Σ level²
  1 bit         levels -1, 1                  scale = mean |x|

From 3 bits up no value is ever more than half a step off. The largest value
of a block may be half a step off like any other: the step max|x| / L, which
represents it exactly, is larger, and so is the error (0.117 against 0.111 on a
Gaussian with int4 and blocks of 128).

With four or two levels none is spent on zero: on a Gaussian that leaves an
error of 0.34 against 0.44 for -1, 0, 1, at the same two bits. The last two
scales are the least-squares ones for their levels, so that the error is never
larger than the vector itself, which error feedback needs.

Bytes: the scales of all blocks, then the codes. A code is cut into fields whose
widths divide a byte, the powers of two that its bits are the sum of, the widest
in the lowest bits: 4 + 2 where it has 6, one field where it has 1, 2, 4 or 8.
A block has all its values' first fields, then all their second ones. Of a field
of f bits a byte holds 8/f: the block is cut into as many equal runs, and byte j
holds that of value j of each run, the first run in the lowest bits. Hence int4
has the first half of a block in low nibbles and the second half in high ones,
and unpacking moves whole runs. The last block may be shorter and has its own,
shorter, runs.

Non-finite values make the scale, and so every decoded value of their block,
non-finite: the receiver refuses them. Scales below the smallest normal f32 are
zero, since machines disagree about smaller numbers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from diloco.numerics import native

_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_MAX_MIDPOINT = np.uint32(0x7F7F_8000)  # From here up, rounding gives Inf.
# Shape letters: N blocks, B values of a block, W bytes of a block's codes.

BITS = range(1, 9)  # Of one value.
SIGNED_BITS_MIN = 3  # Below, no level is spent on zero.
LEVEL_MAX = {
  bits: 2 ** (bits - 1) - 1 if bits >= SIGNED_BITS_MIN else 2**bits - 1
  for bits in BITS
}
BLOCK_MULTIPLE = 8  # Fields of 1 bit of a block fill whole bytes.
CHUNK_VALUES = 1 << 16  # 256 KiB of f32: a chunk stays in the L2 cache.

# By bits, (L + ½) / (1 + 2⁻⁸), rounded down to hundredths, such as 7.47 of 4:
# the bf16 scale may be 2⁻⁸ too small, and yet no quotient rounds to L + 1.
_DIVISOR = {
  bits: math.floor(100 * (LEVEL_MAX[bits] + 0.5) / (1 + 2**-8)) / 100
  for bits in BITS
}
_SCALE_MIN = np.finfo(np.float32).tiny
# Values of int2 beyond this many mean |x| get level ±3. Optimal on a Gaussian:
# its best four even levels are 0.9957 σ apart, and mean |x| is 0.7979 σ.
_THRESHOLD = 1.248


# Converts between f32 and bfloat16 bits, the upper 16 bits of an f32.


def to_bits(x: np.ndarray) -> np.ndarray:
  """Rounds f32 to the uint16 bits of the nearest bfloat16, ties to even.

  Finite stays finite: values beyond the largest bfloat16 (3.39e38) are clipped
  to it. Non-finite stays non-finite.
  """
  bits = x.view(np.uint32)
  odd = (bits >> np.uint32(16)) & np.uint32(1)
  increment = (odd + np.uint32(0x7FFF)) * (bits & _MAGNITUDE < _MAX_MIDPOINT)
  return ((bits + increment) >> np.uint32(16)).astype('<u2')


def from_bits(bits: np.ndarray) -> np.ndarray:
  """Returns the f32 values of bfloat16 bits, exactly."""
  return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclasses.dataclass(frozen=True)
class Stored:
  """A floating-point type on the wire, of scales or of values.

  Attributes:
    dtype: of what is stored, little-endian.
    pack: maps f32 to what is stored.
    unpack: maps what is stored to f32.
  """

  dtype: str
  pack: Callable[[np.ndarray], np.ndarray]
  unpack: Callable[[np.ndarray], np.ndarray]

  @property
  def nbytes(self) -> int:
    """Bytes of one value."""
    return np.dtype(self.dtype).itemsize


STORED = {
  'bf16': Stored('<u2', to_bits, from_bits),
  'f32': Stored('<f4', lambda x: x, lambda stored: stored.astype(np.float32)),
}


class Codec(Protocol):
  """Encodes vectors; decoding gives the same bits on every machine.

  Finite vectors decode to finite values, others to vectors with non-finite
  values. The shape is not part of the bytes.

  Attributes:
    name: in messages.
    block_values: number of values that are encoded together; the last block
      may be shorter.
  """

  name: str
  block_values: int

  def nbytes(self, n: int) -> int:
    """Returns the exact size of n encoded values."""

  def select(self, data: np.ndarray, n: int, blocks: np.ndarray) -> np.ndarray:
    """Returns the encoding of some blocks alone, from that of n values.

    Args:
      data: uint8 [nbytes(n)].
      blocks: indices of the blocks, ascending.
    """

  def encode(self, x: np.ndarray) -> np.ndarray:
    """Encodes f32 [n] as a new uint8 [nbytes(n)].

    Raises:
      ValueError: not f32 [n].
    """

  def decode(self, data: np.ndarray, n: int) -> np.ndarray:
    """Decodes uint8 [nbytes(n)] to f32 [n].

    Raises:
      ValueError: `data` is not the encoding of n values.
    """


@dataclasses.dataclass(frozen=True)
class FloatCodec:
  """Stores each value by itself; `name` is a key of `STORED`."""

  name: str
  block_values: int = 1

  def select(self, data: np.ndarray, n: int, blocks: np.ndarray) -> np.ndarray:
    _check_size(self, data, n)
    return data.view(STORED[self.name].dtype)[blocks].view(np.uint8)

  def nbytes(self, n: int) -> int:
    return STORED[self.name].nbytes * n

  def encode(self, x: np.ndarray) -> np.ndarray:
    _check_values(self, x)
    kind, data = STORED[self.name], np.empty(self.nbytes(x.size), np.uint8)
    stored = data.view(kind.dtype)
    for part in self._chunks(x.size):
      stored[part] = kind.pack(x[part])
    return data

  def decode(self, data: np.ndarray, n: int) -> np.ndarray:
    _check_size(self, data, n)
    kind, x = STORED[self.name], np.empty(n, np.float32)
    stored = data.view(kind.dtype)
    for part in self._chunks(n):
      x[part] = kind.unpack(stored[part])
    return x

  def _chunks(self, n: int) -> Iterator[slice]:
    return (slice(i, i + CHUNK_VALUES) for i in range(0, n, CHUNK_VALUES))


@dataclasses.dataclass(frozen=True)
class BlockCodec:
  """A codec for blocks of integers of 1 to 8 bits."""

  name: str
  bits: int
  block_size: int
  scale: str  # 'bf16' or 'f32'.

  @property
  def block_values(self) -> int:
    return self.block_size

  @property
  def scale_bytes(self) -> int:
    return STORED[self.scale].nbytes

  def select(self, data: np.ndarray, n: int, blocks: np.ndarray) -> np.ndarray:
    scales, codes = self._parts(data, n)
    full, width = n // self.block_size, self._width(self.block_size)
    rows = codes[: full * width].reshape(full, width)
    whole = blocks[blocks < full]
    parts = [scales[blocks].view(np.uint8), rows[whole].reshape(-1)]
    if whole.size < blocks.size:
      parts.append(codes[full * width :])  # The last block, which is shorter.
    return np.concatenate(parts)

  def nbytes(self, n: int) -> int:
    full, tail = divmod(n, self.block_size)
    return (
      (full + (tail > 0)) * self.scale_bytes
      + full * self._width(self.block_size)
      + self._width(tail)
    )

  def encode(self, x: np.ndarray) -> np.ndarray:
    """Encodes f32 [n] as uint8 [nbytes(n)], each value to the nearest level."""
    _check_values(self, x)
    data = np.empty(self.nbytes(x.size), np.uint8)
    if native.encode(self, x, data):
      return data
    scales, codes = self._parts(data, x.size)
    # For non-finite values only the scale counts; their codes are arbitrary.
    with np.errstate(invalid='ignore', over='ignore'):
      for blocks, width, values, packed in self._chunks(x.size):
        x_NB = x[values].reshape(-1, width)
        if self.bits < SIGNED_BITS_MIN:
          scale_N, codes_NB = self._quantise_odd(x_NB)
        else:
          scale_N, codes_NB = self._quantise(x_NB)
        scales[blocks] = STORED[self.scale].pack(scale_N)
        codes[packed] = self._pack(codes_NB).reshape(-1)
    return data

  def decode(self, data: np.ndarray, n: int) -> np.ndarray:
    """Decodes uint8 [nbytes(n)] to f32 [n], with one product per value."""
    _check_size(self, data, n)
    x = np.empty(n, np.float32)
    if native.decode(self, data, x):
      return x
    scales, codes = self._parts(data, n)
    with np.errstate(invalid='ignore'):
      for blocks, width, values, packed in self._chunks(n):
        scale_N = STORED[self.scale].unpack(scales[blocks])
        codes_NW = codes[packed].reshape(scale_N.size, -1)
        levels_NB = self._unpack(codes_NW, width)
        np.multiply(
          levels_NB, scale_N[:, None], out=x[values].reshape(-1, width)
        )
    return x

  def inspect(self, data: np.ndarray, shape) -> 'EncodedArray | None':
    """Returns what can be merged as it is; None: it must be decoded.

    Args:
      data: the encoding of an array of this shape.
    """
    sums = native.inspect(self, data, math.prod(shape))
    return None if sums is None else EncodedArray(self, data, shape, *sums)

  def _quantise(self, x_NB):
    """Returns scales and integer levels, as two's complement codes."""
    magnitude_NB = np.abs(x_NB)
    divisor = np.float32(_DIVISOR[self.bits])
    scale_N = self._storable(magnitude_NB.max(axis=1) / divisor)
    step_N = np.where(scale_N == 0, np.float32(1), scale_N)
    level_NB = np.divide(x_NB, step_N[:, None], out=magnitude_NB)
    np.rint(level_NB, out=level_NB)
    return scale_N, level_NB.astype(np.int8).view(np.uint8)

  def _quantise_odd(self, x_NB):
    """Returns scales and odd levels ±1 (and ±3); code c is 2c - level_max."""
    width = x_NB.shape[1]
    magnitude_NB = np.abs(x_NB)
    sum_N = magnitude_NB.sum(axis=1, dtype=np.float64)  # f32 might overflow.
    positive_NB = (x_NB >= 0).view(np.uint8)
    if self.bits == 1:
      return self._storable(sum_N / width), positive_NB
    threshold_N = (_THRESHOLD / width * sum_N).astype(np.float32)
    large_NB = magnitude_NB > threshold_N[:, None]
    large_sum_N = np.multiply(magnitude_NB, large_NB, out=magnitude_NB).sum(
      axis=1, dtype=np.float64
    )
    large_N = np.count_nonzero(large_NB, axis=1)
    scale_N = (sum_N + 2 * large_sum_N) / (width + 8 * large_N)
    # -3, -1, 1, 3 are the codes 0, 1, 2, 3.
    codes_NB = (positive_NB ^ large_NB ^ np.uint8(1)) | positive_NB << 1
    return self._storable(scale_N), codes_NB

  def _storable(self, scale_N: np.ndarray) -> np.ndarray:
    """Rounds scales to what is stored; level_max · scale stays finite."""
    scale_N = scale_N.astype(np.float32)
    bound = np.finfo(np.float32).max / np.float32(LEVEL_MAX[self.bits])
    bound = from_bits(bound.view(np.uint32) >> np.uint32(16))
    finite_N = np.isfinite(scale_N)
    scale_N = np.where(finite_N, np.minimum(scale_N, bound), scale_N)
    scale_N = np.where(scale_N < _SCALE_MIN, np.float32(0), scale_N)
    kind = STORED[self.scale]
    return kind.unpack(kind.pack(scale_N))

  def _pack(self, codes_NB: np.ndarray) -> np.ndarray:
    """Returns the codes' bytes, uint8 [N, W]; codes may have more high bits."""
    if self.bits == 8:
      return codes_NB
    blocks, width = codes_NB.shape
    packed_NW = np.zeros((blocks, self._width(width)), np.uint8)
    for field, shift, start, run in self._fields(width):
      mask = np.uint8((1 << field) - 1)
      run_NW = packed_NW[:, start : start + run]
      for i in range(8 // field):
        values_NW = codes_NB[:, i * run : (i + 1) * run] >> np.uint8(shift)
        run_NW[:, : values_NW.shape[1]] |= (values_NW & mask) << np.uint8(
          i * field
        )
    return packed_NW

  def _unpack(self, codes_NW: np.ndarray, width: int) -> np.ndarray:
    """Returns levels, int8 [N, width]."""
    if self.bits == 8:
      return codes_NW.view(np.int8)
    codes_NB = np.zeros((codes_NW.shape[0], width), np.uint8)
    for field, shift, start, run in self._fields(width):
      mask = np.uint8((1 << field) - 1)
      for i in range(8 // field):
        values_NW = codes_NB[:, i * run : (i + 1) * run]
        run_NW = codes_NW[:, start : start + values_NW.shape[1]]
        values_NW |= (run_NW >> np.uint8(i * field) & mask) << np.uint8(shift)
    if self.bits >= SIGNED_BITS_MIN:
      # To the top of the byte, and down again, where int8 extends the sign.
      room = 8 - self.bits
      return (codes_NB << np.uint8(room)).view(np.int8) >> np.int8(room)
    return (codes_NB << np.uint8(1)).view(np.int8) - np.int8(
      LEVEL_MAX[self.bits]
    )

  def _fields(self, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields each field of the codes of a block of this many values.

    Its bits, its lowest bit in the code, and the first byte and number of bytes
    that it takes of the block's codes.
    """
    shift = start = 0
    for field in (8, 4, 2, 1):
      if self.bits & field:
        run = -(-width * field // 8)
        yield field, shift, start, run
        shift, start = shift + field, start + run

  def _width(self, n: int) -> int:
    """Returns the bytes that the codes of a block of n values take."""
    return sum(run for *_, run in self._fields(n))

  def _parts(self, data: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns views of the scales and of the codes."""
    end = -(-n // self.block_size) * self.scale_bytes
    return data[:end].view(STORED[self.scale].dtype), data[end:]

  def _chunks(self, n: int) -> Iterator[tuple[slice, int, slice, slice]]:
    """Yields slices of blocks, their width, and slices of values and codes."""
    full, tail = divmod(n, self.block_size)
    step = max(1, CHUNK_VALUES // self.block_size)
    packed = self._width(self.block_size)
    for start in range(0, full, step):
      stop = min(start + step, full)
      values = slice(start * self.block_size, stop * self.block_size)
      codes = slice(start * packed, stop * packed)
      yield slice(start, stop), self.block_size, values, codes
    if tail:
      values = slice(full * self.block_size, n)
      codes = slice(full * packed, full * packed + self._width(tail))
      yield slice(full, full + 1), tail, values, codes


@dataclasses.dataclass(frozen=True)
class EncodedArray:
  """An array that stays encoded until it is merged, with what checks it.

  Attributes:
    largest: max |x|, NaN if one is.
    squares: Σ x² of each `native.SUM_VALUES` decoded values.
  """

  codec: BlockCodec
  data: np.ndarray
  shape: tuple[int, ...]
  largest: float
  squares: np.ndarray

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    """Decodes, for numpy; `copy` says nothing, as all is new."""
    values = self.codec.decode(self.data, self.size).reshape(self.shape)
    return values if dtype is None else values.astype(dtype, copy=False)


def _check_values(codec: Codec, x: np.ndarray):
  if x.dtype != np.float32 or x.ndim != 1:
    raise ValueError(
      f'{codec.name}: {x.dtype} {x.shape} can not be encoded, only float32 (n,)'
    )


def _check_size(codec: Codec, data: np.ndarray, n: int):
  if data.dtype != np.uint8 or data.shape != (codec.nbytes(n),):
    raise ValueError(
      f'{codec.name}: {data.dtype} {data.shape} is not {n} values; these are '
      f'uint8 ({codec.nbytes(n)},)'
    )


def in_blocks(bits: int) -> Callable[[int, str], BlockCodec]:
  """Returns what makes a codec of blocks of integers, for `CODECS`.

  Raises:
    ValueError: values of so many bits can't be packed.
  """
  if bits not in BITS:
    raise ValueError(
      f'a codec of {bits} bits: blocks pack {BITS[0]} to {BITS[-1]} bits'
    )
  return functools.partial(BlockCodec, f'int{bits}', bits)


# Each takes the block size and the type of the scales.
CODECS: dict[str, Callable[[int, str], Codec]] = {
  'int1': in_blocks(1),
  'int2': in_blocks(2),
  'int4': in_blocks(4),
  'int8': in_blocks(8),
  'bf16': lambda block_size, scale: FloatCodec('bf16'),
  'f32': lambda block_size, scale: FloatCodec('f32'),
}


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
  multiple = BLOCK_MULTIPLE
  if not isinstance(block_size, int) or block_size < 1 or block_size % multiple:
    raise ValueError(
      f'{name} with block {block_size}, must be a positive multiple of '
      f'{multiple}'
    )
  if scale not in STORED:
    raise ValueError(
      f'{name} with scale {scale!r}, must be one of {tuple(STORED)}'
    )
  return CODECS[name](block_size, scale)


def bytes_per_value(
  name: str, block_size: int = 128, scale: str = 'bf16'
) -> float:
  """Returns the bytes per value of a long tensor, with its share of a scale.

  The arguments and errors are those of `make_codec`.
  """
  return value_bytes(make_codec(name, block_size, scale))


def value_bytes(codec: Codec) -> float:
  """Returns the bytes per value of a long tensor."""
  return codec.nbytes(codec.block_values) / codec.block_values


def check_codec(codec: Codec) -> Codec:
  """Checks a codec of the user's own on vectors of some lengths.

  Returns:
    The codec.

  Raises:
    ValueError: it does not do what `Codec` says.
  """
  kind = type(codec).__name__
  for name in ('name', 'block_values', 'nbytes', 'select', 'encode', 'decode'):
    if not hasattr(codec, name):
      raise ValueError(
        f'gave a {kind} without {name}, must give what '
        'diloco.numerics.codec.Codec describes'
      )
  if codec.name in CODECS or not isinstance(codec.name, str):
    raise ValueError(
      f'its name is {codec.name!r}, must be a text other than '
      f'{", ".join(CODECS)}'
    )
  block = codec.block_values
  if not isinstance(block, int) or block < 1:
    raise ValueError(f'its block_values is {block!r}, must be an int above 0')
  for n in (1, block, 3 * block + 1):
    _check_trip(codec, np.cos(np.arange(n, dtype=np.float32)))
  _decoded(codec, np.full(block, np.finfo(np.float32).max), 'the largest f32')
  if np.any(_decoded(codec, np.zeros(block, np.float32), 'zeros')):
    raise ValueError('it decodes zeros to other numbers')
  for bad in (np.nan, np.inf):
    lost = codec.decode(codec.encode(np.full(block, bad, np.float32)), block)
    if np.isfinite(lost).all():
      raise ValueError(
        f'it decodes {bad} to finite values, must decode it to what is not, so '
        'that the receiver can refuse it'
      )
  return codec


def _check_trip(codec: Codec, x: np.ndarray):
  n, block = x.size, codec.block_values
  decoded = _decoded(codec, x, f'{n} values')
  if np.linalg.norm(x - decoded) > np.linalg.norm(x):
    raise ValueError(
      f'{n} values come back with an error larger than they are: error '
      'feedback would grow without bound'
    )
  last = (n - 1) // block
  chosen = np.unique([0, last])
  expected = [decoded[i * block : (i + 1) * block] for i in chosen]
  some = codec.select(codec.encode(x), n, chosen)
  found = codec.decode(some, sum(map(len, expected)))
  if not np.array_equal(found, np.concatenate(expected)):
    raise ValueError(
      f'blocks {chosen.tolist()} of {n} values, selected, decode to other '
      'values than within the whole'
    )


def _decoded(codec: Codec, x: np.ndarray, what: str) -> np.ndarray:
  """Returns finite values after a round trip, whose types it checks."""
  given, n = x.copy(), x.size
  data, again = codec.encode(x), codec.encode(x)
  if not np.array_equal(x, given):
    raise ValueError('encode changes what it is given')
  for found, kind, shape in (
    (data, np.uint8, (codec.nbytes(n),)),
    (codec.decode(data, n), np.float32, (n,)),
  ):
    if not isinstance(found, np.ndarray) or (found.dtype, found.shape) != (
      kind,
      shape,
    ):
      described = getattr(found, 'dtype', type(found).__name__)
      raise ValueError(
        f'{what} become {described} {getattr(found, "shape", "")}, must be '
        f'numpy {np.dtype(kind)} {shape}'
      )
  if not np.array_equal(data, again):
    raise ValueError(f'{what} are encoded differently the second time')
  if not np.isfinite(found).all():
    raise ValueError(f'{what} are decoded to what is not finite')
  return found
