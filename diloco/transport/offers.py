# SPDX-License-Identifier: Apache-2.0
"""The offers of one outlet: each array is handed out at most once."""

import threading

import numpy as np

from diloco.transport import interface, proof


class OfferTable:
  """Outlet that keeps the bytes itself; thread-safe.

  Args:
    address: address of the outlet.
  """

  def __init__(self, address: str):
    self.address = address
    self._lock = threading.Lock()
    self._offers: dict[int, np.ndarray | None] = {}  # None: used up.
    self._closed = False

  def offer(self, handle: int, data: np.ndarray) -> None:
    """Offers `data`, which must not be written to any more.

    Raises:
      ValueError: the handle is in use, or `data` is not a payload.
      interface.Closed: the outlet is closed.
    """
    proof.check_offer(handle, data)
    with self._lock:
      if self._closed:
        raise interface.Closed(f'outlet {self.address} is closed')
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
      interface.PeerLost: the outlet is closed.
      interface.NotOffered: no such handle, or it is used up.
    """
    with self._lock:
      if self._closed:
        raise interface.PeerLost(f'outlet {self.address} was closed')
      data = self._offers.get(handle)
      if data is None:
        raise interface.NotOffered(f'no offer {handle} at {self.address}')
      self._offers[handle] = None
    return data

  def clear(self) -> None:
    """Frees everything, and accepts nothing any more."""
    with self._lock:
      self._closed = True
      self._offers.clear()
