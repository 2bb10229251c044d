# SPDX-License-Identifier: Apache-2.0
"""Wraps a data plane so that its pulls fail as a network would make them."""

import dataclasses
import random

import numpy as np

from diloco.protocol.messages import Payload
from diloco.transport import data_plane


@dataclasses.dataclass(frozen=True)
class Faults:
  """Probabilities of faults of a pull; the default is none.

  Attributes:
    lost: that the peer is lost after the last byte but one.
    corrupt: that one bit of the bytes is flipped.
  """

  lost: float = 0.0
  corrupt: float = 0.0


class FaultyFetcher:
  """A fetcher whose pulls suffer faults; a fault uses the offer up, too."""

  def __init__(
    self, fetcher: data_plane.Fetcher, faults: Faults, rng: random.Random
  ):
    self._fetcher = fetcher
    self._faults = faults
    self._rng = rng

  def pull(self, payload: Payload, timeout_s: float) -> np.ndarray:
    data = self._fetcher.pull(payload, timeout_s)
    if self._rng.random() < self._faults.lost:
      raise data_plane.PeerLost(f'fault: payload {payload.handle} was lost')
    if self._rng.random() < self._faults.corrupt:
      data = data.copy()
      data[self._rng.randrange(data.size)] ^= 1 << self._rng.randrange(8)
      data_plane.check_arrival(payload, data, 'a faulty link')
    return data

  def close(self) -> None:
    self._fetcher.close()


class FaultyPlane:
  """A data plane with faults on its fetchers; its publishers are sound.

  Args:
    rng: seeds the generator of each fetcher, in the order of their creation,
      so that threads cannot change each other's draws.
  """

  def __init__(
    self, plane: data_plane.DataPlane, faults: Faults, rng: random.Random
  ):
    self._plane = plane
    self._faults = faults
    self._rng = rng

  def publisher(self, peer: str) -> data_plane.Publisher:
    return self._plane.publisher(peer)

  def fetcher(self, address: str) -> FaultyFetcher:
    rng = random.Random(self._rng.getrandbits(64))
    return FaultyFetcher(self._plane.fetcher(address), self._faults, rng)

  def close(self) -> None:
    self._plane.close()
