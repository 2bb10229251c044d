# SPDX-License-Identifier: Apache-2.0
"""The data plane within one process, for the lab and for tests."""

import itertools
import threading

import numpy as np

from diloco.protocol.messages import Payload
from diloco.transport import data_plane, sockets
from diloco.transport.data_plane import OfferTable

SCHEME = 'memory'


class MemoryNetwork(dict):
  """The publishers of all planes that were made on it, by address.

  Its operations are those of a dictionary, each of which is atomic.
  """

  def __init__(self):
    super().__init__()
    self.numbers = itertools.count(1)


# All memory planes of a process share it; its addresses are never reused.
PROCESS_WIDE = MemoryNetwork()


class MemoryPublisher(OfferTable):
  """Offers to one peer of the same process."""

  def __init__(
    self, network: MemoryNetwork, peer: str, open_ends: data_plane.OpenEnds
  ):
    self._open_ends = open_ends
    self._network = network
    super().__init__(f'{SCHEME}://{peer}/{next(network.numbers)}')
    network[self.address] = self

  def close(self) -> None:
    self._open_ends.discard(self)
    self._network.pop(self.address, None)
    self.clear()


class MemoryFetcher:
  """Pulls from one publisher of the same process; never blocks."""

  def __init__(
    self, network: MemoryNetwork, address: str, open_ends: data_plane.OpenEnds
  ):
    self._open_ends = open_ends
    self._network = network
    self._address = address
    self._closed = threading.Event()

  def pull(self, payload: Payload, timeout_s: float) -> np.ndarray:
    if self._closed.is_set():
      raise data_plane.Closed(f'fetcher from {self._address} is closed')
    data_plane.check_request(payload, self._address)
    publisher = self._network.get(self._address)
    if publisher is None:
      raise data_plane.Unreachable(f'no publisher at {self._address}')
    data = publisher.take(payload.handle)
    data_plane.check_arrival(payload, data, self._address)
    return data

  def close(self) -> None:
    self._open_ends.discard(self)
    self._closed.set()


class MemoryPlane:
  """The publishers and fetchers of one role, on a `MemoryNetwork`."""

  def __init__(self, network: MemoryNetwork):
    self._network = network
    self._ends = data_plane.OpenEnds()

  def publisher(self, peer: str) -> MemoryPublisher:
    return self._ends.add(MemoryPublisher(self._network, peer, self._ends))

  def fetcher(self, address: str) -> MemoryFetcher:
    if not address.startswith(f'{SCHEME}://'):
      raise sockets.BadAddress(
        f'address {address!r}: must start with {SCHEME}://'
      )
    return self._ends.add(MemoryFetcher(self._network, address, self._ends))

  def close(self) -> None:
    self._ends.close_all()
