# SPDX-License-Identifier: Apache-2.0
"""One host's part of a learner's copy of Θ, where the learner has several.

What `host_copy.HostCopy` is to a learner of one host. A host proves its own
boxes; the CRC of the whole fragment, which it can't compute, is the syncer's
word, and stands for what all hosts have proven together.
"""

from collections.abc import Sequence

import numpy as np

from diloco.numerics import cutting, payload
from diloco.numerics.outer import add
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.cuts import Cuts
from diloco.runtime.host_copy import Arrays, Held, Mismatch


class PartCopy:
  """One set of boxes and version per fragment; arrays are never written to.

  Args:
    blueprint: of the run.
    cuts: of the learner.
    host: which of its hosts.
    held: by fragment: the boxes that the host needs.

  Attributes:
    cuts: as given.
    host: as given.
  """

  def __init__(
    self, blueprint: Blueprint, cuts: Cuts, host: int, held: Sequence[Held]
  ):
    self._blueprint = blueprint
    self.cuts = cuts
    self.host = host
    self._held = list(held)

  def held(self) -> list[Held]:
    """All fragments, each belonging together."""
    return list(self._held)

  def crcs(self) -> tuple[int, ...]:
    """Of the bytes of every whole fragment."""
    return tuple(held.crc for held in self._held)

  def take_over(self, held: Sequence[Held]):
    """A donor's whole part, of which the data plane has proven the bytes."""
    self._held = list(held)

  def update(
    self,
    fragment: int,
    version: int,
    parts: Sequence[np.ndarray],
    crc: int,
    part_crcs: Sequence[int],
  ):
    """Takes in an outer update: Θ_p at `version` from that before.

    Args:
      fragment: which.
      version: that it leads to.
      parts: by shard of the syncer.
      crc: of the whole Θ_p.
      part_crcs: of this host's boxes of it, by shard.

    Raises:
      Mismatch: the host has another version, or a CRC is another.
    """
    held = self._held[fragment]
    if held.version != version - 1:
      raise Mismatch(
        f'version {held.version} is here, the update needs {version - 1}'
      )
    sent = self._decode(fragment, parts, self._blueprint.down)
    theta = add(held.theta, sent)
    self._keep(fragment, version, theta, crc, part_crcs)

  def replace(
    self,
    fragment: int,
    version: int,
    parts: Sequence[np.ndarray],
    crc: int,
    part_crcs: Sequence[int],
  ):
    """Takes in a full fragment; as `update`."""
    theta = self._decode(fragment, parts, self._blueprint.full)
    self._keep(fragment, version, theta, crc, part_crcs)

  def _decode(self, fragment: int, parts, codec) -> dict[str, np.ndarray]:
    found = {}
    for shard, data in enumerate(parts):
      boxes = self.cuts.needed(fragment, self.host, shard)
      try:
        found |= cutting.decode_cut(data, boxes, codec)
      except ValueError as error:
        raise Mismatch(str(error)) from error
    return found

  def _keep(
    self,
    fragment: int,
    version: int,
    theta: Arrays,
    crc: int,
    part_crcs: Sequence[int],
  ):
    for shard, announced in enumerate(part_crcs):
      boxes = self.cuts.needed(fragment, self.host, shard)
      found = payload.crc(theta, boxes) if boxes else 0
      if found != announced:
        raise Mismatch(
          f'CRC {found:08x} of part {shard} of fragment {fragment} version '
          f'{version}, announced {announced:08x}'
        )
    self._held[fragment] = Held(version, theta, crc)
