# SPDX-License-Identifier: Apache-2.0
"""Maps a payload's bytes to the hosts of a learner and the shards of a syncer.

Part host·S + shard of a payload has the slices of the pieces that the shard
owns, as far as the host holds them. A learner of one host has whole pieces.
"""

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from diloco.numerics import cutting, payload
from diloco.numerics.codec import Codec
from diloco.numerics.owners import Owners
from diloco.numerics.partition import Box, Partition, from_text
from diloco.runtime.blueprint import Blueprint

HOSTS_MAX = 1024  # Per learner: bounds what a hello may request.

Boxes = tuple[Box, ...]
Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


class Cuts:
  """One learner's partition, set against the shards of a syncer.

  Args:
    owners: which shard owns which piece.
    partition: the learner's partition; None: it has one host, and whole pieces.
  """

  def __init__(self, owners: Owners, partition: Partition | None):
    self._owners = owners
    self._partition = partition
    self.hosts = partition.host_count if partition else 1
    self.offered = functools.cache(self._offered)
    self.needed = functools.cache(self._needed)

  @property
  def whole(self) -> bool:
    """True if every slice is a whole piece."""
    return self._partition is None

  def up_bytes(self, fragment: int, codec: Codec) -> tuple[int, ...]:
    """Returns the bytes of what the learner offers, by part."""
    return self._by_part(
      lambda host, shard: payload.payload_bytes(
        self.offered(fragment, host, shard), codec
      )
    )

  def down_bytes(self, fragment: int, codec: Codec) -> tuple[int, ...]:
    """Returns the bytes of what the learner is offered, by part."""
    return self._by_part(
      lambda host, shard: (
        payload.payload_bytes if self.whole else cutting.cut_bytes
      )(self.needed(fragment, host, shard), codec)
    )

  def cut(
    self, data: np.ndarray, fragment: int, shard: int, codec: Codec
  ) -> tuple[np.ndarray, ...]:
    """Returns what each host takes of the bytes that a shard has encoded."""
    if self.whole:
      return (data,)
    pieces = self._owners.pieces(fragment, shard)
    return tuple(
      cutting.cut(data, pieces, self.needed(fragment, host, shard), codec)
      for host in range(self.hosts)
    )

  def crcs(self, theta: Arrays, fragment: int, shard: int) -> tuple[int, ...]:
    """Returns the CRCs of each host's slices of a shard's pieces.

    Whole pieces have none.

    Args:
      theta: the pieces of the shard.
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
    """Assembles a shard's pieces from what each host has offered it.

    Args:
      parts: by host, of the sizes of `up_bytes`.
      codec: the codec that wrote them.
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
  """Returns box name -> its values, taken from whole pieces."""
  return {box.name: whole[box.piece.name][box.index] for box in boxes}


def read_cuts(blueprint: Blueprint, text: str) -> Cuts:
  """Returns the cuts of a learner from the partition text of its hello.

  An empty text means that it has one host.

  Raises:
    ValueError: the text is not a partition of the run's parameters.
  """
  shapes = {path: spec.shape for path, spec in blueprint.specs.items()}
  hosts_max = min(HOSTS_MAX, blueprint.limits.hosts)
  partition = from_text(text, shapes, hosts_max) if text else None
  return Cuts(blueprint.owners, partition)
