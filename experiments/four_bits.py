# SPDX-License-Identifier: Apache-2.0
"""Codecs of one's own, of four bits a value: E3M0, and int4 rounded at random.

  config.codec.up = config.codec.down = 'experiments.four_bits:e3m0'
  config.codec.up = 'experiments.four_bits:at_random'

A block has a scale, its largest magnitude as bf16, and codes, two to a byte;
the last block is filled up. E3M0 has values 0 and ± s · 2^-6 … s · 2^0: what
the paper's Table 10 compares. Rounded at random, levels s · (-7 … 7) / 7 have
the value itself as their mean, so that rounding errors of many offers cancel.
What both are worth `codecs.py` asks.
"""

import dataclasses
import zlib
from collections.abc import Callable

import numpy as np

SCALE_BYTES = 2
LEVEL_MAX = 7  # Of int4.
E3M0 = np.array([0.0, *2.0 ** np.arange(-6, 1)], np.float32)
MIDDLES = (E3M0[:-1] + E3M0[1:]) / 2


@dataclasses.dataclass(frozen=True)
class FourBits:
  """Blocks of a scale and codes.

  Attributes:
    values: of each code, with the scale 1.
    codes: maps f32 values in -1 … 1, and the vector that they are of, to codes.
  """

  name: str
  block_values: int
  values: tuple[float, ...]
  codes: Callable[[np.ndarray, np.ndarray], np.ndarray]

  @property
  def _block_bytes(self) -> int:
    return SCALE_BYTES + self.block_values // 2

  def nbytes(self, n: int) -> int:
    return -(-n // self.block_values) * self._block_bytes

  def select(self, data, n, blocks):
    return data.reshape(-1, self._block_bytes)[blocks].reshape(-1)

  def encode(self, x):
    blocks = np.zeros((-(-x.size // self.block_values), self.block_values))
    blocks.reshape(-1)[: x.size] = x
    # Cut off, not rounded: the largest f32 has no bf16 above it.
    bits = np.abs(blocks).max(axis=1).astype('<f4').view('<u4') >> 16
    scales = (bits << 16).view('<f4')[:, None]
    with np.errstate(invalid='ignore', divide='ignore'):
      relative = np.where(scales > 0, blocks / scales, 0.0)
      codes = self.codes(relative, x).astype(np.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    stored = bits.astype('<u2')[:, None].view(np.uint8)
    return np.concatenate([stored, packed], axis=1).reshape(-1)

  def decode(self, data, n):
    rows = data.reshape(-1, self._block_bytes)
    stored = np.ascontiguousarray(rows[:, :SCALE_BYTES]).view('<u2')
    scales = (stored.astype('<u4') << 16).view('<f4')
    codes = np.stack(
      [rows[:, SCALE_BYTES:] & 15, rows[:, SCALE_BYTES:] >> 4], 2
    )
    with np.errstate(invalid='ignore'):
      values = np.array(self.values, np.float32)[codes] * scales[:, :, None]
    return values.reshape(-1)[:n].astype(np.float32)


def _nearest(relative, _):
  codes = np.searchsorted(MIDDLES, np.abs(relative)).clip(0, 7)
  return codes | np.where(relative < 0, 8, 0)


def _at_random(relative, x):
  # Of the vector alone: the same offer has the same bytes, in a replay too.
  draws = np.random.default_rng(zlib.crc32(x.tobytes())).random(relative.shape)
  levels = np.floor(np.nan_to_num(relative) * LEVEL_MAX + draws)
  return levels.clip(-LEVEL_MAX, LEVEL_MAX) + LEVEL_MAX


def e3m0(section) -> FourBits:
  return FourBits('e3m0', section.block_size, (*E3M0, *-E3M0), _nearest)


def at_random(section) -> FourBits:
  values = tuple((code - LEVEL_MAX) / LEVEL_MAX for code in range(16))
  return FourBits('int4_at_random', section.block_size, values, _at_random)
