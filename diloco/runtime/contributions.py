# SPDX-License-Identifier: Apache-2.0
"""An outer gradient: made bytes at the learner, checked at the syncer."""

from collections.abc import Mapping

import numpy as np

from diloco.numerics import payload
from diloco.numerics.codec import Codec
from diloco.numerics.fragments import Pieces
from diloco.protocol import messages
from diloco.runtime.blueprint import Blueprint
from diloco.transport.interface import Inlet

LARGEST = 1e12  # Of any value: far beyond use, far below overflow.


def encode(
  base: Mapping[str, np.ndarray],
  theta: Mapping[str, np.ndarray],
  pieces: Pieces,
  codec: Codec,
) -> np.ndarray:
  """The bytes of v = base − θ of one fragment."""
  delta = {
    name: base[name] - np.asarray(theta[name], np.float32) for name in base
  }
  return payload.encode(delta, pieces, codec)


class Unusable(Exception):
  """A contribution that must not be merged."""


def pull(
  offer: messages.Offer, inlet: Inlet, blueprint: Blueprint, timeout_s: float
) -> dict[str, np.ndarray]:
  """v_m of one fragment: piece name -> f32 array.

  Raises:
    TransferFailed: the bytes did not come, or are not those announced.
    Unusable: they have another codec or size than the fragment takes, or
      decode to values that are not finite, or absurd.
  """
  codec = blueprint.up
  pieces = blueprint.layout.fragments[offer.fragment]
  expected = payload.payload_bytes(pieces, codec)
  found = offer.payload
  if (found.codec, found.nbytes) != (codec.name, expected):
    raise Unusable(
      f'{found.nbytes} bytes of {found.codec} are offered, fragment '
      f'{offer.fragment} takes {expected} of {codec.name}'
    )
  v = payload.decode(inlet.pull(found, timeout_s), pieces, codec)
  if not payload.is_finite(v):
    raise Unusable('not finite')
  largest = max(float(np.abs(array).max()) for array in v.values())
  if largest > LARGEST:
    raise Unusable(f'a value of {largest:.3g}, at most {LARGEST:g} is merged')
  return v
