# SPDX-License-Identifier: Apache-2.0
"""Computes how many bytes a codec takes, by its name, without arrays.

The results are those of `diloco.numerics.payload`, for code that must not
import jax; a test compares the two.
"""

BITS = {'int1': 1, 'int2': 2, 'int4': 4, 'int8': 8, 'bf16': 16, 'f32': 32}
SCALE_BYTES = {'bf16': 2, 'f32': 4}


def nbytes(
  values: int, codec: str, block_size: int = 128, scale: str = 'bf16'
) -> int:
  """Returns the bytes of one encoded tensor.

  Args:
    values: values of the tensor; no block spans two tensors.
    codec: one of BITS.
    block_size: values that share a scale ('int…' only).
    scale: type of the scales, one of SCALE_BYTES ('int…' only).

  Raises:
    ValueError: an argument is out of range.
  """
  _check(codec, block_size, scale)
  if values < 0:
    raise ValueError(f'values={values}: must be at least 0')
  bits = BITS[codec]
  if not _in_blocks(codec):
    return values * bits // 8
  full, tail = divmod(values, block_size)
  scales = (full + (tail > 0)) * SCALE_BYTES[scale]
  return scales + full * (block_size * bits // 8) + -(-tail * bits // 8)


def bytes_per_value(
  codec: str, block_size: int = 128, scale: str = 'bf16'
) -> float:
  """Returns the bytes per value of a long tensor, including its share of a
  scale.

  Args:
    codec: one of BITS.
    block_size: values that share one scale ('int…' only).
    scale: type of the scale, one of SCALE_BYTES ('int…' only).

  Raises:
    ValueError: an argument is out of range.
  """
  _check(codec, block_size, scale)
  scales = SCALE_BYTES[scale] / block_size if _in_blocks(codec) else 0.0
  return BITS[codec] / 8 + scales


def fragment_shares(
  fragments: int, embedding_share: float
) -> tuple[float, ...]:
  """Returns each fragment's share of the parameters; the embedding is first.

  Args:
    fragments: P.
    embedding_share: share of an embedding fragment; 0: all are equal.
  """
  if not embedding_share or fragments == 1:
    return (1 / fragments,) * fragments
  rest = (1 - embedding_share) / (fragments - 1)
  return (embedding_share,) + (rest,) * (fragments - 1)


def _in_blocks(codec: str) -> bool:
  return codec.startswith('int')


def _check(codec: str, block_size: int, scale: str):
  if codec not in BITS:
    raise ValueError(f'codec={codec!r}: must be one of {", ".join(BITS)}')
  if block_size < 1 or block_size % 8:
    raise ValueError(
      f'block_size={block_size}: must be a positive multiple of 8'
    )
  if scale not in SCALE_BYTES:
    raise ValueError(
      f'scale={scale!r}: must be one of {", ".join(SCALE_BYTES)}'
    )
