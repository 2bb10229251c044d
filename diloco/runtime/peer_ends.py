# SPDX-License-Identifier: Apache-2.0
"""What a shard offers to, and pulls from, one session of a learner."""

import numpy as np

from diloco.transport.interface import Inlet, Outlet


class PeerEnds:
  """An outlet and an inlet.

  Keeps one outer update and one full fragment per fragment on offer: whoever
  is further behind than that needs the newest full one anyway.
  """

  def __init__(self, outlet: Outlet, inlet: Inlet):
    self.inlet = inlet
    self.address = outlet.address
    self._outlet = outlet
    # (codec, fragment) → handle.
    self._offered: dict[tuple[str, int], int] = {}

  def offer(self, codec: str, fragment: int, handle: int, data: np.ndarray):
    """Offers `data` in place of the last of its kind."""
    before = self._offered.get((codec, fragment))
    self._outlet.offer(handle, data)
    self._offered[codec, fragment] = handle
    if before is not None:
      self.retire(before)

  def retire(self, handle: int):
    """Withdraws an offer, if it is there."""
    self._outlet.retire(handle)

  def close(self):
    """Ends the pulls and the offers."""
    self.inlet.close()
    self._outlet.close()
