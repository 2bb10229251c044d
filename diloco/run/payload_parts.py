# SPDX-License-Identifier: Apache-2.0
"""Payloads: what of each fragment a host holds, cut into parts, one for each
shard of the syncer; contributions encoded and checked; the pace of pulls.
"""

import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from absl import logging

from diloco.numerics import boxes, merge, native
from diloco.numerics import payload as payload_lib
from diloco.numerics.codec import Codec, EncodedArray
from diloco.numerics.fragments import Layout, Pieces
from diloco.numerics.mesh_partition import (
  Partition,
  Slice,
  from_text,
  of_one_host,
)
from diloco.numerics.shard_assignment import ShardAssignment
from diloco.protocol import messages, timeouts
from diloco.protocol.messages import Part, Payload
from diloco.protocol.timeouts import TransferTime
from diloco.run.spec import RunSpec
from diloco.transport.data_plane import (
  Closed,
  DataPlane,
  Fetcher,
  TimedOut,
  Unreachable,
)

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
    offered: by fragment, the slices that the host offers; together, the hosts
      offer every value once.
  """

  def __init__(self, layout: Layout, partition: Partition, host: int):
    self.host = host
    self.partition = partition
    self.needed: tuple[Boxes, ...] = tuple(
      partition.needed(pieces, host) for pieces in layout.fragments
    )
    self.offered: tuple[Boxes, ...] = tuple(
      partition.offered(pieces, host) for pieces in layout.fragments
    )

  def offered_of(self, fragment: int, held: Arrays) -> dict[str, np.ndarray]:
    """Returns the slices that the host offers, as views of what it holds.

    Args:
      held: box name -> array, of all that is `needed`.
    """
    return read_slices(self.offered[fragment], self.needed[fragment], held)


# Maps a payload's bytes to the hosts of a learner and the shards of a syncer.
#
# Part host·S + shard of a payload has the slices of the pieces that the shard
# owns, as far as the host holds them. A learner of one host has whole pieces.


def held_boxes(slices: Boxes, arrays: Arrays) -> dict[str, list]:
  """Returns (box, values) of the slices by name of the piece; see `boxes`."""
  held: dict[str, list] = {}
  for each in slices:
    box = each.ranges, arrays[each.name]
    held.setdefault(each.piece.name, []).append(box)
  return held


def read_slices(
  wanted: Boxes, slices: Boxes, arrays: Arrays
) -> dict[str, np.ndarray]:
  """Returns slices of which others hold all values; views where one does.

  Args:
    slices: those that are held.
    arrays: their values, by name.
  """
  held = held_boxes(slices, arrays)
  return {x.name: boxes.read(held[x.piece.name], x.ranges) for x in wanted}


class SliceMap:
  """One learner's partition, set against the shards of a syncer.

  Attributes:
    hosts: N of the learner.
    whole: True if every slice is a whole piece: there is one host.
  """

  def __init__(self, owners: ShardAssignment, partition: Partition):
    self._owners = owners
    self._partition = partition
    self.hosts = partition.host_count
    self.whole = self.hosts == 1
    self.offered = functools.cache(
      functools.partial(self._boxes, Partition.offered)
    )
    self.needed = functools.cache(
      functools.partial(self._boxes, Partition.needed)
    )

  def up_bytes(self, fragment: int, codec: Codec) -> tuple[int, ...]:
    """Returns the bytes of what the learner offers, by part."""
    return self._by_part(
      lambda host, shard: payload_lib.payload_bytes(
        self.offered(fragment, host, shard), codec
      )
    )

  def down_bytes(self, fragment: int, codec: Codec) -> tuple[int, ...]:
    """Returns the bytes of what the learner is offered, by part."""
    return self._by_part(
      lambda host, shard: (
        payload_lib.payload_bytes if self.whole else payload_lib.cut_bytes
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
      payload_lib.cut(data, pieces, self.needed(fragment, host, shard), codec)
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
      payload_lib.crc(boxes_of(boxes, theta), boxes) if boxes else 0
      for host in range(self.hosts)
      for boxes in [self.needed(fragment, host, shard)]
    )

  def join(
    self,
    parts: Sequence[np.ndarray],
    fragment: int,
    shard: int,
    codec: Codec,
    decode: Decode = payload_lib.decode,
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
      values = payload_lib.decode(data, boxes, codec)
      for box in boxes:
        arrays[box.piece.name][box.index] = values[box.name]
    return arrays

  def _boxes(self, select, fragment: int, host: int, shard: int) -> Boxes:
    return select(self._partition, self._owners.pieces(fragment, shard), host)

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
  return SliceMap(run_spec.owners, read_partition(run_spec, text))


def read_partition(run_spec: RunSpec, text: str) -> Partition:
  """Returns the partition of a learner from its text; '': it has one host.

  Raises:
    ValueError: the text is not a partition of the run's parameters.
  """
  shapes = {path: spec.shape for path, spec in run_spec.specs.items()}
  if not text:
    return of_one_host(shapes)
  return from_text(text, shapes, min(HOSTS_MAX, run_spec.limits.hosts))


# Parts and their pace --------------------------------------------------------


TELL_FACTOR = 2.0  # A smaller change is not worth a log line.
NOTHING = np.empty(0, np.uint8)


def why_unfit(
  payload: messages.Payload, fragment: int, codec: Codec, parts: Sequence[int]
) -> str | None:
  """Returns which codec or sizes the payload should have; None if it has them.

  Args:
    payload: the payload as the peer announced it.
    codec: the codec that must have written it.
    parts: expected bytes of each part; see `SliceMap`.
  """
  nbytes = sum(parts)
  parts = () if len(parts) == 1 else tuple(parts)
  found_parts = tuple(part.nbytes for part in payload.parts)
  if (payload.codec, payload.nbytes) == (codec.name, nbytes):
    if found_parts == parts:
      return None
    return (
      f'parts of {found_parts} bytes are announced, fragment {fragment} has '
      f'{parts}'
    )
  return (
    f'{payload.nbytes} bytes of {payload.codec} are announced, fragment '
    f'{fragment} takes {nbytes} of {codec.name}'
  )


class TransferPace:
  """Measured durations of pulls from one peer, or from equivalent ones.

  Args:
    knob: `ProtocolConfig.patience`, the run's factor on time-outs.
    clock: seconds, monotonic.
  """

  def __init__(self, knob: float, clock: Callable[[], float] = time.monotonic):
    self._patience = knob
    self._clock = clock
    self._lock = threading.Lock()
    self._time = TransferTime()
    self._told_s = 0.0

  def limit_s(self, nbytes: int) -> float:
    """Returns how many seconds a pull of `nbytes` may take."""
    with self._lock:
      return timeouts.transfer_max_s(self._time, nbytes, self._patience)

  def pull(self, fetcher: Fetcher, payload: Payload) -> np.ndarray:
    """Pulls within the limit, and adds the duration to the measurements.

    Raises:
      TransferFailed: as `Fetcher.pull`.
    """
    began_s, limit_s = self._clock(), self.limit_s(payload.nbytes)
    try:
      data = fetcher.pull(payload, limit_s)
    except TimedOut:
      with self._lock:  # The next limit is longer.
        self._time = timeouts.after_transfer_failed(
          self._time, payload.nbytes, limit_s, self._patience
        )
      raise
    self._note(payload.nbytes, self._clock() - began_s)
    return data

  def _note(self, nbytes: int, took_s: float):
    with self._lock:
      self._time = self._time.add(nbytes, took_s)
      limit_s = timeouts.transfer_max_s(self._time, nbytes, self._patience)
      told_s, changed = self._told_s, max(limit_s, 1e-9)
      if 1 / TELL_FACTOR < told_s / changed < TELL_FACTOR:
        return
      self._told_s = limit_s
    logging.info(
      'time-out of a pull: %.1f s (%d bytes took %.3f s)',
      limit_s,
      nbytes,
      took_s,
    )


def announced(handle: int, codec: str, parts: Sequence[np.ndarray]) -> Payload:
  """Returns the payload that announces these parts; each may be empty."""
  return announced_parts(handle, codec, [part_of(data) for data in parts])


def part_of(data: np.ndarray) -> Part:
  """Returns size and CRC of one part."""
  return Part(data.nbytes, native.crc32(data))


def announced_parts(handle: int, codec: str, parts: Sequence[Part]) -> Payload:
  """Returns the payload for parts of which only sizes and CRCs are known."""
  if len(parts) == 1:
    return Payload(handle, codec, parts[0].nbytes, parts[0].crc)
  nbytes = sum(part.nbytes for part in parts)
  crc = payload_lib.crc_of([part.crc for part in parts])
  return Payload(handle, codec, nbytes, crc, tuple(parts))


def only(payload: Payload, index: int) -> Payload:
  """Returns one part as a payload to be pulled."""
  if not payload.parts:
    return payload
  part = payload.parts[index]
  return Payload(payload.handle, payload.codec, part.nbytes, part.crc)


class Fetchers:
  """A learner's connections for pulling what the syncer's shards offer.

  Args:
    addresses: by shard; '' if not known yet.

  Raises:
    ValueError: an address is malformed.
  """

  def __init__(self, plane: DataPlane, addresses: Sequence[str]):
    self._plane = plane
    self._lock = threading.Lock()
    self._closed = False
    self._fetchers: list[Fetcher | None] = [
      plane.fetcher(address) if address else None for address in addresses
    ]

  def move(self, shard: int, address: str):
    """Sets the shard's new address."""
    fetcher = self._plane.fetcher(address)
    with self._lock:
      before, self._fetchers[shard] = self._fetchers[shard], fetcher
      closed = self._closed
    for each in (before, fetcher if closed else None):
      if each is not None:
        each.close()

  def pull_each(
    self, payloads: Sequence[Payload], pace: TransferPace
  ) -> list[np.ndarray]:
    """Returns the bytes by shard, all verified, given a payload for each.

    Raises:
      TransferFailed: as `Fetcher.pull`, for the first part that did not come.
    """
    parts = []
    for shard, wanted in enumerate(payloads):
      if wanted.nbytes:
        parts.append(pace.pull(self._fetcher(shard), wanted))
      else:
        parts.append(NOTHING)
    return parts

  def close(self):
    """Ends the pulls in progress."""
    with self._lock:
      self._closed = True
      fetchers = list(self._fetchers)
    for fetcher in fetchers:
      if fetcher is not None:
        fetcher.close()

  def _fetcher(self, shard: int) -> Fetcher:
    with self._lock:
      fetcher = self._fetchers[shard]
      if self._closed:
        raise Closed('the session has ended')
    if fetcher is None:
      raise Unreachable(f'shard {shard} has not said where it is')
    return fetcher


# Contributions ---------------------------------------------------------------


Inspected = dict[str, np.ndarray | EncodedArray]

# Largest accepted magnitude: far beyond use, far below overflow.
LARGEST = 1e12


def encode(
  reference: Mapping[str, np.ndarray],
  theta: Mapping[str, np.ndarray],
  pieces: Pieces,
  codec: Codec,
) -> np.ndarray:
  """Returns the bytes of v = reference − θ of one fragment.

  There is one piece's v at a time: a learner encodes next to its steps, and
  memory that is touched first takes longer than the codec.
  """
  data = np.empty(payload_lib.payload_bytes(pieces, codec), np.uint8)
  start = 0
  for piece in pieces:
    v = np.subtract(
      np.asarray(reference[piece.name], np.float32),
      np.asarray(theta[piece.name], np.float32),
    )
    part = payload_lib.encode({piece.name: v}, (piece,), codec)
    data[start : start + part.size] = part
    start += part.size
  return data


class Unusable(Exception):
  """A contribution that must not be merged."""


def pull_parts(
  payload: messages.Payload,
  fragment: int,
  shard: int,
  codec: Codec,
  fetchers: Sequence[Fetcher],
  slice_map: SliceMap,
  pace: TransferPace,
  decode: Decode = payload_lib.decode,
) -> dict[str, np.ndarray]:
  """Pulls a shard's part of v_m, or of Θ_p: piece name -> f32 array.

  Args:
    codec: of the bytes; that of whole fragments for Θ_p.
    fetchers: by host of the learner.
    decode: see `SliceMap.join`.

  Raises:
    TransferFailed: the bytes did not come, or differ from those announced.
    Unusable: they have another codec or size than the fragment needs.
  """
  expected = slice_map.up_bytes(fragment, codec)
  reason = why_unfit(payload, fragment, codec, expected)
  if reason is not None:
    raise Unusable(reason)
  shards = len(expected) // slice_map.hosts
  wanted = (only(payload, h * shards + shard) for h in range(slice_map.hosts))
  # What each host has for this shard: all of it, or nothing.
  parts = [
    pace.pull(fetcher, part) if part.nbytes else NOTHING
    for fetcher, part in zip(fetchers, wanted, strict=True)
  ]
  return slice_map.join(parts, fragment, shard, codec, decode)


def decode(
  data: np.ndarray, pieces: Pieces, codec: Codec
) -> tuple[dict[str, np.ndarray], float]:
  """Decodes v_m and returns it with its L2 norm; the inverse of `encode`.

  Raises:
    Unusable: values are not finite, or absurdly large.
  """
  return checked(payload_lib.decode(data, pieces, codec))


def checked(v: Inspected) -> tuple[Inspected, float]:
  """Returns v_m and its L2 norm after checking its values.

  Raises:
    Unusable: values are not finite, or absurdly large.
  """
  largest = max(_largest(array) for array in v.values())
  if not math.isfinite(largest):
    raise Unusable('not finite')
  if largest > LARGEST:
    raise Unusable(f'a value of {largest:.3g}, at most {LARGEST:g} is merged')
  return v, merge.norm(*v.values())


def _largest(x: np.ndarray | EncodedArray) -> float:
  """Returns max |x|, infinite if a value is not finite."""
  largest = (
    x.largest
    if isinstance(x, EncodedArray)
    else float(
      max(x.max(), -x.min())  # Both are NaN if one value is.
    )
  )
  return largest if math.isfinite(largest) else math.inf
