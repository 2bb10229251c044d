# SPDX-License-Identifier: Apache-2.0
"""Converts between f32 and bfloat16 bits, the upper 16 bits of an f32."""

import numpy as np

_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_MAX_MIDPOINT = np.uint32(0x7F7F_8000)  # From here up, rounding gives Inf.


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
