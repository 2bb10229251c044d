# SPDX-License-Identifier: Apache-2.0
"""A codec of one's own: E3M0, four bits of which three are an exponent.

  config.codec.up = config.codec.down = 'experiments.e3m0:make'

A value is 0 or ± s · 2^-6 … s · 2^0, with the scale s of its block: the largest
magnitude, as bf16. What the paper's Table 10 compares; `codecs.py` does here.
"""

import dataclasses

import numpy as np

LEVELS = np.array([0.0, *2.0 ** np.arange(-6, 1)], np.float32)
MIDDLES = (LEVELS[:-1] + LEVELS[1:]) / 2
SCALE_BYTES = 2


@dataclasses.dataclass(frozen=True)
class E3M0:
  """Blocks of a scale and codes, two to a byte; the last one is filled up."""

  name: str = 'e3m0'
  block_values: int = 128

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
      codes = np.searchsorted(MIDDLES, np.abs(relative)).clip(0, 7)
      codes = (codes | np.where(relative < 0, 8, 0)).astype(np.uint8)
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
    signs = np.where(codes & 8, np.float32(-1), np.float32(1))
    with np.errstate(invalid='ignore'):
      values = signs * LEVELS[codes & 7] * scales[:, :, None]
    return values.reshape(-1)[:n].astype(np.float32)


def make(section) -> E3M0:
  return E3M0(block_values=section.block_size)
