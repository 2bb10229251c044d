# SPDX-License-Identifier: Apache-2.0
"""A shard's publishers and fetchers for one session of a learner."""

from collections.abc import Sequence

import numpy as np

from diloco.runtime.cuts import Cuts
from diloco.transport.interface import Inlet, Outlet


class PeerEnds:
  """A publisher and a fetcher for each host of the learner.

  Per fragment, it keeps one outer update and one full fragment on offer: a
  learner that is further behind needs the newest full fragment anyway.

  Args:
    outlets: by host.
    inlets: by host.
    cuts: what of a fragment each host has.
  """

  def __init__(
    self, outlets: Sequence[Outlet], inlets: Sequence[Inlet], cuts: Cuts
  ):
    self.inlets = tuple(inlets)
    self.cuts = cuts
    self.addresses = tuple(outlet.address for outlet in outlets)
    self._outlets = tuple(outlets)
    # (codec, fragment) → handle.
    self._offered: dict[tuple[str, int], int] = {}

  def offer(
    self, codec: str, fragment: int, handle: int, parts: Sequence[np.ndarray]
  ):
    """Offers each host its part, which replaces the last one of its kind."""
    before = self._offered.get((codec, fragment))
    for outlet, data in zip(self._outlets, parts, strict=True):
      if data.size:
        outlet.offer(handle, data)
    self._offered[codec, fragment] = handle
    if before is not None:
      self.retire(before)

  def retire(self, handle: int):
    """Withdraws an offer, if it is there."""
    for outlet in self._outlets:
      outlet.retire(handle)

  def close(self):
    """Ends the pulls and the offers."""
    for end in (*self.inlets, *self._outlets):
      end.close()
