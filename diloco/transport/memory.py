# SPDX-License-Identifier: Apache-2.0
"""The data plane within one process, for the lab and for tests."""

import itertools
import threading

import numpy as np

from diloco.protocol.messages import Payload
from diloco.transport import data_plane, sockets
from diloco.transport.data_plane import OfferTable

SCHEME = 'memory'


class MemoryNetwork:
  """The outlets of all planes that were made on it; thread-safe."""

  def __init__(self):
    self._lock = threading.Lock()
    self._numbers = itertools.count(1)
    self._outlets: dict[str, MemoryOutlet] = {}

  def add(self, outlet: 'MemoryOutlet', peer: str) -> str:
    """Registers an outlet and returns its address."""
    with self._lock:
      address = f'{SCHEME}://{peer}/{next(self._numbers)}'
      self._outlets[address] = outlet
    return address

  def remove(self, address: str) -> None:
    """Forgets an outlet; does nothing if there is none."""
    with self._lock:
      self._outlets.pop(address, None)

  def find(self, address: str) -> 'MemoryOutlet':
    """Returns the outlet at `address`; raises `Unreachable`."""
    with self._lock:
      outlet = self._outlets.get(address)
    if outlet is None:
      raise data_plane.Unreachable(f'no outlet at {address}')
    return outlet


# All memory planes of a process share it; its addresses are never reused.
PROCESS_WIDE = MemoryNetwork()


class MemoryOutlet(OfferTable):
  """Offers to one peer of the same process."""

  def __init__(
    self, network: MemoryNetwork, peer: str, open_ends: data_plane.OpenEnds
  ):
    self._open_ends = open_ends
    self._network = network
    super().__init__(network.add(self, peer))

  def close(self) -> None:
    self._open_ends.discard(self)
    self._network.remove(self.address)
    self.clear()


class MemoryInlet:
  """Pulls from one outlet of the same process; never blocks."""

  def __init__(
    self, network: MemoryNetwork, address: str, open_ends: data_plane.OpenEnds
  ):
    self._open_ends = open_ends
    self._network = network
    self._address = address
    self._closed = threading.Event()

  def pull(self, payload: Payload, timeout_s: float) -> np.ndarray:
    if self._closed.is_set():
      raise data_plane.Closed(f'inlet from {self._address} is closed')
    data_plane.check_request(payload, self._address)
    data = self._network.find(self._address).take(payload.handle)
    data_plane.check_arrival(payload, data, self._address)
    return data

  def close(self) -> None:
    self._open_ends.discard(self)
    self._closed.set()


class MemoryPlane:
  """The outlets and inlets of one role in the process, on a `MemoryNetwork`."""

  def __init__(self, network: MemoryNetwork):
    self._network = network
    self._ends = data_plane.OpenEnds()

  def outlet(self, peer: str) -> MemoryOutlet:
    outlet = MemoryOutlet(self._network, peer, self._ends)
    self._ends.add(outlet)
    return outlet

  def inlet(self, address: str) -> MemoryInlet:
    if not address.startswith(f'{SCHEME}://'):
      raise sockets.BadAddress(
        f'address {address!r}: must start with {SCHEME}://'
      )
    inlet = MemoryInlet(self._network, address, self._ends)
    self._ends.add(inlet)
    return inlet

  def close(self) -> None:
    self._ends.close_all()
