# SPDX-License-Identifier: Apache-2.0
"""The interface of a data plane, and what all implementations share.

A *publisher* is what this process offers to exactly one peer; a *fetcher* pulls
from exactly one incarnation of one peer. Both carry flat uint8 arrays; their
meaning, and the CRC that verifies them, are sent on the control plane.

The contract, which every implementation passes (`tests/transport`):

* An offer can be pulled once. A failed pull uses it up.
* `offer` keeps the array itself: the caller must not write to it again.
* A function may be offered instead, which makes the array: it is called once,
  on any thread, when it is pulled or shortly before. Where it raises
  `NotOffered`, there is no offer. Such offers are pulled in their order.
* A handle in use can't be offered again: `ValueError`.
* `retire` is idempotent and frees the bytes; so does `close`.
* `pull` returns the bytes or raises a `TransferFailed` before its time-out plus
  one second, whatever the peer does; afterwards the fetcher still works.
* One peer that stalls delays no other.
* `close` unblocks the pulls in progress; a closed one stays closed.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from diloco.numerics import native
from diloco.protocol.messages import Payload
from diloco.transport import sockets

Data = np.ndarray | Callable[[], np.ndarray]
PAYLOAD_BYTES_MAX = 1 << 36  # Larger announcements are not believed.
PROBE_S = 1.0
HANDLE_MAX = (1 << 60) - 1  # Two uuids of 63 bits fit above it.


class TransferFailed(Exception):
  """A pull did not bring the bytes; the subclass says why."""


class Unreachable(TransferFailed):
  """No process listens at the peer's address."""


class PeerLost(TransferFailed):
  """The peer died, or cut the connection, before the last byte."""


class TimedOut(TransferFailed):
  """The peer did not answer in time: stopped, stalled or cut off."""


class NotOffered(TransferFailed):
  """The peer is alive and has no such offer (never, no longer, or used up)."""


class WrongSize(TransferFailed):
  """The number of bytes differs from the announced one."""


class Corrupt(TransferFailed):
  """The CRC of the bytes differs from the announced one."""


class Closed(TransferFailed):
  """The fetcher was closed while, or before, the pull waited."""


class Publisher(Protocol):
  """Offers of this process to one peer."""

  address: str

  def offer(self, handle: int, data: Data) -> None:
    """Makes `data` (1-D uint8, not empty) available under `handle`."""

  def retire(self, handle: int) -> None:
    """Withdraws an offer; does nothing if there is none."""

  def close(self) -> None:
    """Withdraws everything and cuts the peer off."""


class Fetcher(Protocol):
  """Pulls from one incarnation of one peer."""

  def pull(self, payload: Payload, timeout_s: float) -> np.ndarray:
    """Returns the bytes of `payload`, 1-D uint8, with size and CRC verified."""

  def close(self) -> None:
    """Ends the pulls in progress; they raise `Closed`."""


class DataPlane(Protocol):
  """Makes publishers and fetchers; there is one per process."""

  def publisher(self, peer: str) -> Publisher:
    """Makes a publisher for `peer`, with an address of its own."""

  def fetcher(self, address: str) -> Fetcher:
    """Makes a fetcher from the publisher at `address`; does not connect yet."""

  def close(self) -> None:
    """Closes every publisher and fetcher, and what they share."""


class OpenEnds:
  """A thread-safe set of open ends; closed ones leave it."""

  def __init__(self):
    self._lock = threading.Lock()
    self._ends: set[Publisher | Fetcher] = set()

  def add(self, end):
    """Returns `end`, after adding it."""
    with self._lock:
      self._ends.add(end)
    return end

  def discard(self, end: Publisher | Fetcher) -> None:
    with self._lock:
      self._ends.discard(end)

  def close_all(self) -> None:
    """Closes each; an end may call `discard` meanwhile."""
    with self._lock:
      ends = list(self._ends)
    for end in ends:
      end.close()


def probe(address: sockets.PublisherAddress, deadline: float) -> None:
  """Connects to a publisher's port, and disconnects.

  Raises:
    Unreachable: no process listens there.
    TimedOut: no connection was accepted before the deadline, or in `PROBE_S`.
  """
  left_s = max(0.001, deadline - time.monotonic())
  try:
    sockets.probe(address.host, address.port, min(PROBE_S, left_s))
  except TimeoutError as error:
    raise TimedOut(f'{address.endpoint} accepted no connection') from error
  except OSError as error:
    raise Unreachable(
      f'no process listens at {address.endpoint}: {error}'
    ) from error


def check_offer(handle: int, data: Data) -> None:
  """Raises `ValueError` if `data` cannot be offered under `handle`."""
  if not 0 <= handle <= HANDLE_MAX:
    raise ValueError(f'{handle=}, must be between 0 and 2^60 - 1')
  if callable(data):
    return
  if data.dtype != np.uint8 or data.ndim != 1 or not data.size:
    raise ValueError(
      f'offer {handle}: {data.dtype}{list(data.shape)}, must be uint8 of one '
      'dimension and not empty'
    )
  if not data.flags.c_contiguous:
    raise ValueError(f'offer {handle}: the array is strided, must be dense')


def check_request(payload: Payload, origin: str) -> None:
  """Raises `WrongSize` or `NotOffered` for an impossible payload."""
  if not 0 < payload.nbytes <= PAYLOAD_BYTES_MAX:
    raise WrongSize(
      f'payload {payload.handle} of {origin}: announced as {payload.nbytes} '
      f'bytes, must be between 1 and {PAYLOAD_BYTES_MAX}'
    )
  if not 0 <= payload.handle <= HANDLE_MAX:
    raise NotOffered(f'no handle {payload.handle} at {origin}')


def check_arrival(payload: Payload, data: np.ndarray, origin: str) -> None:
  """Raises `WrongSize` or `Corrupt` if `data` is not `payload`."""
  check_size(payload, data.nbytes, origin)
  crc = native.crc32(data)
  if crc != payload.crc:
    raise Corrupt(
      f'payload {payload.handle} of {origin}: crc {crc:#010x}, '
      f'announced {payload.crc:#010x}'
    )


def check_size(payload: Payload, nbytes: int, origin: str) -> None:
  """Raises `WrongSize` if the offer does not have the announced size."""
  if nbytes != payload.nbytes:
    raise WrongSize(
      f'payload {payload.handle} of {origin}: {nbytes} bytes, '
      f'announced {payload.nbytes}'
    )


class OfferTable:
  """Publisher that keeps the bytes itself; thread-safe."""

  def __init__(self, address: str):
    self.address = address
    self._lock = threading.Lock()
    self._offers: dict[int, Data | None] = {}  # None: used up.
    self._closed = False

  def offer(self, handle: int, data: Data) -> None:
    """Offers `data`, which must not be written to any more.

    Raises:
      ValueError: the handle is in use, or `data` is not a payload.
      interface.Closed: the publisher is closed.
    """
    check_offer(handle, data)
    with self._lock:
      if self._closed:
        raise Closed(f'publisher {self.address} is closed')
      if handle in self._offers:
        raise ValueError(f'handle {handle} is in use at {self.address}')
      self._offers[handle] = data

  def retire(self, handle: int) -> None:
    """Frees an offer; idempotent."""
    with self._lock:
      self._offers.pop(handle, None)

  def take(self, handle: int) -> np.ndarray:
    """Hands the bytes out, once.

    Raises:
      interface.PeerLost: the publisher is closed.
      interface.NotOffered: no such handle, or it is used up.
    """
    with self._lock:
      if self._closed:
        raise PeerLost(f'publisher {self.address} was closed')
      data = self._offers.get(handle)
      if data is None:
        raise NotOffered(f'no offer {handle} at {self.address}')
      self._offers[handle] = None
    return data() if callable(data) else data

  def clear(self) -> None:
    """Frees everything, and accepts nothing any more."""
    with self._lock:
      self._closed = True
      self._offers.clear()
