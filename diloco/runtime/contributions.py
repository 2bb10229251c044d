# SPDX-License-Identifier: Apache-2.0
"""An outer gradient: made bytes at the learner, checked at the syncer."""

import math
from collections.abc import Mapping

import numpy as np

from diloco.numerics import payload
from diloco.numerics.codec import Codec
from diloco.numerics.fragments import Pieces
from diloco.protocol import messages
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.transfer_pace import TransferPace
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


def pull_fragment(
  offered: messages.FragmentOffered,
  crc: int,
  inlet: Inlet,
  blueprint: Blueprint,
  pace: TransferPace,
) -> dict[str, np.ndarray]:
  """A learner's copy of Θ_p: piece name -> f32 array.

  Raises:
    TransferFailed: as in `pull`.
    Unusable: it has another size, or is not the fragment with this CRC.
  """
  pieces = blueprint.layout.fragments[offered.fragment]
  found, full = offered.payload, blueprint.full
  expected = payload.payload_bytes(pieces, full)
  if (found.codec, found.nbytes) != (full.name, expected):
    raise Unusable(
      f'{found.nbytes} bytes of {found.codec} are offered, fragment '
      f'{offered.fragment} takes {expected} of {full.name}'
    )
  theta = payload.decode(pace.pull(inlet, found), pieces, full)
  if payload.crc(theta, pieces) != crc:
    raise Unusable(
      f'CRC {payload.crc(theta, pieces):08x} of fragment {offered.fragment}, '
      f'the run has {crc:08x}'
    )
  return theta


def pull(
  offer: messages.Offer, inlet: Inlet, blueprint: Blueprint, pace: TransferPace
) -> tuple[dict[str, np.ndarray], float]:
  """v_m of one fragment, piece name -> f32 array; and its L2 norm.

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
  v = payload.decode(pace.pull(inlet, found), pieces, codec)
  if not payload.is_finite(v):
    raise Unusable('not finite')
  largest = max(float(np.abs(array).max()) for array in v.values())
  if largest > LARGEST:
    raise Unusable(f'a value of {largest:.3g}, at most {LARGEST:g} is merged')
  squares = (float(np.vdot(x, x)) for x in v.values())
  return v, math.sqrt(math.fsum(squares))
