# SPDX-License-Identifier: Apache-2.0
"""The syncer's side of its sessions: what is offered to whom, pulled from."""

import itertools

import numpy as np

from diloco.transport.control_server import Session
from diloco.transport.interface import Inlet, Outlet


class Peer:
  """One session of one learner.

  Keeps one outer update and one full fragment per fragment on offer: whoever
  is further behind than that needs the newest full one anyway.
  """

  def __init__(
    self,
    session: Session,
    outlet: Outlet,
    inlet: Inlet,
    handles: 'itertools.count[int]',
  ):
    self.session = session
    self.inlet = inlet
    self.address = outlet.address
    self._outlet = outlet
    self._handles = handles
    self._offered: dict[
      tuple[str, int], int
    ] = {}  # (codec, fragment) → handle.
    self._nbytes: dict[int, int] = {}

  def offer(self, codec: str, fragment: int, data: np.ndarray) -> int:
    """Offers `data` in place of the last of its kind; returns the handle."""
    handle = next(self._handles)
    before = self._offered.get((codec, fragment))
    self._outlet.offer(handle, data)
    self._offered[codec, fragment] = handle
    self._nbytes[handle] = data.nbytes
    if before is not None:
      self.retire(before)
    return handle

  def retire(self, handle: int) -> int:
    """Withdraws an offer; how many bytes it was, 0 where it is gone."""
    nbytes = self._nbytes.pop(handle, 0)
    self._outlet.retire(handle)
    return nbytes

  def close(self, reason: str):
    """Ends the stream, the pulls and the offers."""
    self.session.close(reason)
    self.inlet.close()
    self._outlet.close()
