# SPDX-License-Identifier: Apache-2.0
"""Payloads in parts, one for each shard of the syncer, and their pace."""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from absl import logging

from diloco.numerics import native
from diloco.numerics import payload as payload_lib
from diloco.numerics.codec import Codec
from diloco.protocol import messages, timeouts
from diloco.protocol.messages import Part, Payload
from diloco.protocol.timeouts import TransferTime
from diloco.transport.data_plane import (
  Closed,
  DataPlane,
  Fetcher,
  TimedOut,
  Unreachable,
)

TELL_FACTOR = 2.0  # A smaller change is not worth a log line.
NOTHING = np.empty(0, np.uint8)


def why_unfit(
  found: messages.Payload,
  fragment: int,
  codec: Codec,
  parts: Sequence[int],
) -> str | None:
  """Returns which codec or sizes the payload should have; None if it has them.

  Args:
    found: the payload as the peer announced it.
    codec: the codec that must have written it.
    parts: expected bytes of each part; see `SliceMap`.
  """
  nbytes = sum(parts)
  parts = () if len(parts) == 1 else tuple(parts)
  found_parts = tuple(part.nbytes for part in found.parts)
  if (found.codec, found.nbytes) == (codec.name, nbytes):
    if found_parts == parts:
      return None
    return (
      f'parts of {found_parts} bytes are announced, fragment {fragment} has '
      f'{parts}'
    )
  return (
    f'{found.nbytes} bytes of {found.codec} are announced, fragment {fragment} '
    f'takes {nbytes} of {codec.name}'
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

  def pull(self, payload: Payload, pace: TransferPace) -> list[np.ndarray]:
    """Returns the bytes by shard, all verified.

    Raises:
      TransferFailed: as `Fetcher.pull`, for the first part that did not come.
    """
    shards = range(len(self._fetchers))
    return self.pull_each([only(payload, shard) for shard in shards], pace)

  def pull_each(
    self, payloads: Sequence[Payload], pace: TransferPace
  ) -> list[np.ndarray]:
    """Returns the bytes by shard, given one payload for each shard."""
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
