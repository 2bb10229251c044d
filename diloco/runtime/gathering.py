# SPDX-License-Identifier: Apache-2.0
"""Collects the fragments of other shards at the lead, at the end of a run."""

import numpy as np
from absl import logging

from diloco.numerics import fragments, payload
from diloco.protocol import messages
from diloco.protocol.syncer import Syncer
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.shards import Shards
from diloco.transport.interface import DataPlane, TransferFailed

GATHER_S = 120.0  # Limit for the bytes of a fragment.

Offered = dict[int, tuple[str, messages.Payload]]  # By shard.


class Gathering:
  """Collects fragment by fragment, again if a shard dies meanwhile.

  Args:
    plane: the data plane.
    shards: the shards that offer them.
    fragments_: the fragments to collect.
  """

  def __init__(
    self,
    blueprint: Blueprint,
    plane: DataPlane,
    shards: Shards,
    fragments_: tuple[int, ...],
  ):
    self._blueprint = blueprint
    self._plane = plane
    self._shards = shards
    self._left = list(fragments_)
    self._asked = False
    self._found: Offered | None = None

  def done(self, machine: Syncer, parameters: dict[str, np.ndarray]) -> bool:
    """Collects as much as is possible now; call it again after each event.

    Args:
      machine: knows what is away, and what is lost.
      parameters: path -> f32 array; receives the pieces.
    """
    if self._shards.unsaved:
      return False  # A shard that dies from here on has lost nothing.
    while self._left:
      p = self._left[0]
      if not self._asked:
        if p in machine.away or p in machine.lost:
          return False
        self._asked = True
        self._shards.collect(p, self._take)
      if self._found is None:
        return False
      found, self._found, self._asked = self._found, None, False
      if not self._put(p, found, parameters):
        return False  # A shard has died meanwhile: try again.
      self._left.pop(0)
    return True

  def _take(self, offered: Offered):
    self._found = offered

  def _put(self, p: int, found: Offered, parameters) -> bool:
    """Returns True if all pieces of a fragment have come."""
    owners = self._blueprint.owners
    if sorted(found) != [s for s in owners.of_fragment(p) if s]:
      return False
    for shard, (address, offered) in found.items():
      pieces = owners.pieces(p, shard)
      try:
        inlet = self._plane.inlet(address)
        try:
          data = inlet.pull(offered, GATHER_S)
        finally:
          inlet.close()
      except (TransferFailed, ValueError) as error:
        logging.warning('fragment %d of shard %d: %s', p, shard, error)
        return False
      arrays = payload.decode(data, pieces, self._blueprint.full)
      parameters.update(fragments.put(parameters, pieces, arrays))
    return True
