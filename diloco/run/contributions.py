# SPDX-License-Identifier: Apache-2.0
"""Encodes a learner's contributions, and decodes and checks them at the
syncer.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from diloco.numerics import merge, payload
from diloco.numerics.codec import Codec, EncodedArray
from diloco.numerics.fragments import Pieces
from diloco.protocol import messages
from diloco.run import payload_parts
from diloco.run.host_slices import Decode, SliceMap
from diloco.run.payload_parts import TransferPace, why_unfit
from diloco.transport.data_plane import Fetcher

Inspected = dict[str, np.ndarray | EncodedArray]

# Largest accepted magnitude: far beyond use, far below overflow.
LARGEST = 1e12


def encode(
  reference: Mapping[str, np.ndarray],
  theta: Mapping[str, np.ndarray],
  pieces: Pieces,
  codec: Codec,
) -> np.ndarray:
  """Returns the bytes of v = reference − θ of one fragment.

  There is one piece's v at a time: a learner encodes next to its steps, and
  memory that is touched first takes longer than the codec.
  """
  data = np.empty(payload.payload_bytes(pieces, codec), np.uint8)
  start = 0
  for piece in pieces:
    v = np.subtract(
      np.asarray(reference[piece.name], np.float32),
      np.asarray(theta[piece.name], np.float32),
    )
    part = payload.encode({piece.name: v}, (piece,), codec)
    data[start : start + part.size] = part
    start += part.size
  return data


class Unusable(Exception):
  """A contribution that must not be merged."""


def pull_parts(
  found: messages.Payload,
  fragment: int,
  shard: int,
  codec: Codec,
  fetchers: Sequence[Fetcher],
  slice_map: SliceMap,
  pace: TransferPace,
  decode: Decode = payload.decode,
) -> dict[str, np.ndarray]:
  """Pulls a shard's part of v_m, or of Θ_p: piece name -> f32 array.

  Args:
    codec: of the bytes; that of whole fragments for Θ_p.
    fetchers: by host of the learner.
    decode: see `SliceMap.join`.

  Raises:
    TransferFailed: the bytes did not come, or differ from those announced.
    Unusable: they have another codec or size than the fragment needs.
  """
  expected = slice_map.up_bytes(fragment, codec)
  reason = why_unfit(found, fragment, codec, expected)
  if reason is not None:
    raise Unusable(reason)
  shards = len(expected) // slice_map.hosts
  wanted = (
    payload_parts.only(found, h * shards + shard)
    for h in range(slice_map.hosts)
  )
  # What each host has for this shard: all of it, or nothing.
  parts = [
    pace.pull(fetcher, each) if each.nbytes else payload_parts.NOTHING
    for fetcher, each in zip(fetchers, wanted, strict=True)
  ]
  return slice_map.join(parts, fragment, shard, codec, decode)


def decode(
  data: np.ndarray, pieces: Pieces, codec: Codec
) -> tuple[dict[str, np.ndarray], float]:
  """Decodes v_m and returns it with its L2 norm; the inverse of `encode`.

  Raises:
    Unusable: values are not finite, or absurdly large.
  """
  return checked(payload.decode(data, pieces, codec))


def checked(v: Inspected) -> tuple[Inspected, float]:
  """Returns v_m and its L2 norm after checking its values.

  Raises:
    Unusable: values are not finite, or absurdly large.
  """
  largest = max(_largest(array) for array in v.values())
  if not math.isfinite(largest):
    raise Unusable('not finite')
  if largest > LARGEST:
    raise Unusable(f'a value of {largest:.3g}, at most {LARGEST:g} is merged')
  return v, merge.norm(*v.values())


def _largest(x: np.ndarray | EncodedArray) -> float:
  """Returns max |x|, infinite if a value is not finite."""
  found = x.largest if isinstance(x, EncodedArray) else float(
    max(x.max(), -x.min())  # Both are NaN if one value is.
  )
  return found if math.isfinite(found) else math.inf
