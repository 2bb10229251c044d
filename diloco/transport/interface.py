# SPDX-License-Identifier: Apache-2.0
"""The interface of a data plane: offer bytes under a handle, pull them once.

An *outlet* is what this process offers to exactly one peer; an *inlet* pulls
from exactly one incarnation of one peer. Both carry flat uint8 arrays; their
meaning, and the CRC that verifies them, are sent on the control plane.

The contract, which every implementation passes (`tests/transport`):

* An offer can be pulled once. A failed pull uses it up.
* `offer` keeps the array itself: the caller must not write to it again.
* A handle in use can't be offered again: `ValueError`.
* `retire` is idempotent and frees the bytes; so does `close`.
* `pull` returns the bytes or raises a `TransferFailed` before its time-out plus
  one second, whatever the peer does; afterwards the inlet still works.
* One peer that stalls delays no other.
* `close` unblocks the pulls in progress; a closed one stays closed.
"""

from typing import Protocol

import numpy as np

from diloco.protocol.messages import Payload


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
  """The inlet was closed while, or before, the pull waited."""


class Outlet(Protocol):
  """Offers of this process to one peer."""

  address: str

  def offer(self, handle: int, data: np.ndarray) -> None:
    """Makes `data` (1-D uint8, not empty) available under `handle`."""

  def retire(self, handle: int) -> None:
    """Withdraws an offer; does nothing if there is none."""

  def close(self) -> None:
    """Withdraws everything and cuts the peer off."""


class Inlet(Protocol):
  """Pulls from one incarnation of one peer."""

  def pull(self, payload: Payload, timeout_s: float) -> np.ndarray:
    """Returns the bytes of `payload`, 1-D uint8, with size and CRC verified."""

  def close(self) -> None:
    """Ends the pulls in progress; they raise `Closed`."""


class DataPlane(Protocol):
  """Makes outlets and inlets; there is one per process."""

  def outlet(self, peer: str) -> Outlet:
    """Makes an outlet for `peer`, with an address of its own."""

  def inlet(self, address: str) -> Inlet:
    """Makes an inlet from the outlet at `address`; does not connect yet."""

  def close(self) -> None:
    """Closes every outlet and inlet, and what they share."""
