# SPDX-License-Identifier: Apache-2.0
"""How one learner's hosts share fragments among them, seen from the bytes.

Part host·S + shard of a payload has the boxes that this host holds of the
pieces that this shard owns. A learner of one host has whole pieces.
"""

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from diloco.numerics import cutting, payload
from diloco.numerics.codec import Codec
from diloco.numerics.owners import Owners
from diloco.numerics.partition import Box, Partition, from_text
from diloco.runtime.blueprint import Blueprint

HOSTS_MAX = 1024  # Of one learner: bounds what a hello may ask for.

Boxes = tuple[Box, ...]
Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


class Cuts:
  """One partition against the owners of a layout.

  Args:
    owners: of the run's layout.
    partition: of a learner; None: it has one host, and whole pieces.
  """

  def __init__(self, owners: Owners, partition: Partition | None):
    self._owners = owners
    self._partition = partition
    self.hosts = partition.host_count if partition else 1
    self.offered = functools.cache(self._offered)
    self.needed = functools.cache(self._needed)

  @property
  def whole(self) -> bool:
    """Whether boxes are whole pieces."""
    return self._partition is None

  def up_bytes(self, fragment: int, codec: Codec) -> tuple[int, ...]:
    """Of what the learner offers, by part."""
    return self._by_part(
      lambda host, shard: payload.payload_bytes(
        self.offered(fragment, host, shard), codec
      )
    )

  def down_bytes(self, fragment: int, codec: Codec) -> tuple[int, ...]:
    """Of what it is offered, by part."""
    return self._by_part(
      lambda host, shard: (
        payload.payload_bytes if self.whole else cutting.cut_bytes
      )(self.needed(fragment, host, shard), codec)
    )

  def cut(
    self, data: np.ndarray, fragment: int, shard: int, codec: Codec
  ) -> tuple[np.ndarray, ...]:
    """What each host takes of what a shard has encoded of its pieces."""
    if self.whole:
      return (data,)
    pieces = self._owners.pieces(fragment, shard)
    return tuple(
      cutting.cut(data, pieces, self.needed(fragment, host, shard), codec)
      for host in range(self.hosts)
    )

  def crcs(self, theta: Arrays, fragment: int, shard: int) -> tuple[int, ...]:
    """By host, of its boxes of a shard's pieces; none for whole pieces.

    Args:
      theta: the pieces of the shard.
      fragment: which.
      shard: which.
    """
    if self.whole:
      return ()
    return tuple(
      payload.crc(boxes_of(boxes, theta), boxes) if boxes else 0
      for host in range(self.hosts)
      for boxes in [self.needed(fragment, host, shard)]
    )

  def join(
    self, parts: Sequence[np.ndarray], fragment: int, shard: int, codec: Codec
  ) -> dict[str, np.ndarray]:
    """A shard's pieces out of what each host has offered it.

    Args:
      parts: by host, of the sizes of `up_bytes`.
      fragment: which.
      shard: which.
      codec: that wrote them.
    """
    pieces = self._owners.pieces(fragment, shard)
    if self.whole:
      return payload.decode(parts[0], pieces, codec)
    arrays = {p.name: np.empty(p.shape, np.float32) for p in pieces}
    for host, data in enumerate(parts):
      boxes = self.offered(fragment, host, shard)
      if not boxes:
        continue
      found = payload.decode(data, boxes, codec)
      for box in boxes:
        arrays[box.piece.name][box.index] = found[box.name]
    return arrays

  def _offered(self, fragment: int, host: int, shard: int) -> Boxes:
    pieces = self._owners.pieces(fragment, shard)
    if self._partition is None:
      return pieces
    return self._partition.offered(pieces, host)

  def _needed(self, fragment: int, host: int, shard: int) -> Boxes:
    pieces = self._owners.pieces(fragment, shard)
    if self._partition is None:
      return pieces
    return self._partition.needed(pieces, host)

  def _by_part(self, nbytes_of) -> tuple[int, ...]:
    return tuple(
      nbytes_of(host, shard)
      for host in range(self.hosts)
      for shard in range(self._owners.shards)
    )


def boxes_of(boxes: Boxes, whole: Arrays) -> dict[str, np.ndarray]:
  """Box name -> its values, out of whole pieces."""
  return {box.name: whole[box.piece.name][box.index] for box in boxes}


def read_cuts(blueprint: Blueprint, text: str) -> Cuts:
  """Of a learner that says so in its hello; '': it has one host.

  Raises:
    ValueError: it is no partition of the run's parameters.
  """
  shapes = {path: spec.shape for path, spec in blueprint.specs.items()}
  hosts_max = min(HOSTS_MAX, blueprint.limits.hosts)
  partition = from_text(text, shapes, hosts_max) if text else None
  return Cuts(blueprint.owners, partition)
