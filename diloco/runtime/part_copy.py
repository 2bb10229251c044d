# SPDX-License-Identifier: Apache-2.0
"""One host's part of a learner's copy of Θ, if the learner has several hosts.

It corresponds to `host_copy.HostCopy` of a learner of one host. A host verifies
its own slices; the CRC of the whole fragment, which it cannot compute, is taken
from the syncer, and stands for what all hosts have verified together.
"""

from collections.abc import Sequence

import numpy as np

from diloco.numerics import cutting, payload
from diloco.numerics.outer import add
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.cuts import Cuts
from diloco.runtime.host_copy import Arrays, Held, Mismatch


class PartCopy:
  """One set of slices and version per fragment; arrays are never written to.

  Args:
    cuts: how the learner's hosts share fragments.
    host: index of this host.
    held: by fragment, the slices that the host needs.
  """

  def __init__(
    self, blueprint: Blueprint, cuts: Cuts, host: int, held: Sequence[Held]
  ):
    self._blueprint = blueprint
    self.cuts = cuts
    self.host = host
    self._held = list(held)

  def held(self) -> list[Held]:
    """Returns all fragments, each consistent in itself."""
    return list(self._held)

  def crcs(self) -> tuple[int, ...]:
    """Returns the CRC of every whole fragment's bytes."""
    return tuple(held.crc for held in self._held)

  def take_over(self, held: Sequence[Held]):
    """Takes a donor's whole part, whose bytes the data plane has verified."""
    self._held = list(held)

  def update(
    self,
    fragment: int,
    version: int,
    parts: Sequence[np.ndarray],
    crc: int,
    part_crcs: Sequence[int],
  ):
    """Applies an outer update to the version before, which gives `version`.

    Args:
      parts: bytes by shard of the syncer.
      crc: CRC of the whole Θ_p.
      part_crcs: CRCs of this host's slices of Θ_p, by shard.

    Raises:
      Mismatch: the host has another version, or a CRC does not match.
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
    """Replaces this host's part of a fragment; arguments as for `update`."""
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
