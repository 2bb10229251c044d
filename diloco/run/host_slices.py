# SPDX-License-Identifier: Apache-2.0
"""The slices of each fragment that a host of a learner holds, as bytes."""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from diloco.numerics import payload
from diloco.numerics.codec import Codec
from diloco.numerics.fragments import Layout, Pieces
from diloco.numerics.mesh_partition import Partition, Slice, from_text
from diloco.numerics.shard_assignment import ShardAssignment
from diloco.run.spec import RunSpec

HOSTS_MAX = 1024  # Per learner: bounds what a hello may request.

Boxes = tuple[Slice, ...]
Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.
# `payload.decode`, or one that leaves encoded what can be merged so.
Decode = Callable[[np.ndarray, Pieces, Codec], dict]


class HostSlices:
  """The slices of one host; a learner's only process holds whole pieces.

  Args:
    partition: how the learner's hosts share the parameters.

  Attributes:
    needed: by fragment, the slices that the host's devices hold.
    by_piece: `needed` by fragment and name of the piece.
    offered: by fragment, the slices that the host offers; together, the hosts
      offer every value once.
  """

  def __init__(self, layout: Layout, partition: Partition, host: int):
    self.host = host
    self.partition = partition
    self.needed: tuple[Boxes, ...] = tuple(
      partition.needed(pieces, host) for pieces in layout.fragments
    )
    self.by_piece = [_grouped(boxes) for boxes in self.needed]
    self.offered: tuple[Boxes, ...] = tuple(
      partition.offered(pieces, host) for pieces in layout.fragments
    )

  def needed_of(self, fragment: int, whole: Arrays) -> dict[str, np.ndarray]:
    """Returns this host's slices of a whole fragment.

    Args:
      whole: piece name -> array.
    """
    return {
      box.name: np.asarray(whole[box.piece.name][box.index], order='C')
      for box in self.needed[fragment]
    }

  def offered_of(self, fragment: int, held: Arrays) -> dict[str, np.ndarray]:
    """Returns the slices that the host offers, as views of what it holds.

    Args:
      held: box name -> array, as from `needed_of`.
    """
    return {
      box.name: held[outer.name][_inside(box, outer)]
      for box in self.offered[fragment]
      for outer in [_around(box, self.by_piece[fragment][box.piece.name])]
    }


def _grouped(boxes: Boxes) -> dict[str, list[Slice]]:
  groups: dict[str, list[Slice]] = {}
  for box in boxes:
    groups.setdefault(box.piece.name, []).append(box)
  return groups


def _around(box: Slice, held: Sequence[Slice]) -> Slice:
  for outer in held:
    if all(
      first <= a and b <= last
      for (a, b), (first, last) in zip(box.ranges, outer.ranges)
    ):
      return outer
  raise AssertionError(f'{box.name} is offered, and none of {held}')


def _inside(box: Slice, outer: Slice):
  return (
    *(
      slice(a - first, b - first)
      for (a, b), (first, _) in zip(box.ranges, outer.ranges)
    ),
    ...,
  )


# Maps a payload's bytes to the hosts of a learner and the shards of a syncer.
#
# Part host·S + shard of a payload has the slices of the pieces that the shard
# owns, as far as the host holds them. A learner of one host has whole pieces.


class SliceMap:
  """One learner's partition, set against the shards of a syncer.

  Args:
    partition: the learner's partition; None: it has one host, and whole pieces.
  """

  def __init__(self, owners: ShardAssignment, partition: Partition | None):
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
        payload.payload_bytes if self.whole else payload.cut_bytes
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
      payload.cut(data, pieces, self.needed(fragment, host, shard), codec)
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
    self,
    parts: Sequence[np.ndarray],
    fragment: int,
    shard: int,
    codec: Codec,
    decode: Decode = payload.decode,
  ) -> dict[str, np.ndarray]:
    """Assembles a shard's pieces from what each host has offered it.

    Args:
      parts: by host, of the sizes of `up_bytes`.
      decode: takes the bytes of whole pieces; those of slices are decoded.
    """
    pieces = self._owners.pieces(fragment, shard)
    if self.whole:
      return decode(parts[0], pieces, codec)
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


def read_slice_map(run_spec: RunSpec, text: str) -> SliceMap:
  """Returns the cuts of a learner from the partition text of its hello.

  An empty text means that it has one host.

  Raises:
    ValueError: the text is not a partition of the run's parameters.
  """
  shapes = {path: spec.shape for path, spec in run_spec.specs.items()}
  hosts_max = min(HOSTS_MAX, run_spec.limits.hosts)
  partition = from_text(text, shapes, hosts_max) if text else None
  return SliceMap(run_spec.owners, partition)
