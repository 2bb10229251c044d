# SPDX-License-Identifier: Apache-2.0
"""A payload in parts: one for each shard of the syncer, under one handle."""

import threading
import zlib
from collections.abc import Sequence

import numpy as np

from diloco.numerics import payload as payload_lib
from diloco.protocol.messages import Part, Payload
from diloco.runtime.transfer_pace import TransferPace
from diloco.transport.interface import Closed, DataPlane, Inlet, Unreachable

NOTHING = np.empty(0, np.uint8)


def announced(handle: int, codec: str, parts: Sequence[np.ndarray]) -> Payload:
  """Returns the payload that announces these parts; each may be empty."""
  return announced_parts(handle, codec, [part_of(data) for data in parts])


def part_of(data: np.ndarray) -> Part:
  """Returns size and CRC of one part."""
  return Part(data.nbytes, zlib.crc32(data))


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


class Inlets:
  """A learner's connections for pulling what the syncer's shards offer.

  Args:
    plane: makes the fetchers.
    addresses: by shard; '' if not known yet.

  Raises:
    ValueError: an address is malformed.
  """

  def __init__(self, plane: DataPlane, addresses: Sequence[str]):
    self._plane = plane
    self._lock = threading.Lock()
    self._closed = False
    self._inlets: list[Inlet | None] = [
      plane.inlet(address) if address else None for address in addresses
    ]

  def move(self, shard: int, address: str):
    """Sets the shard's new address."""
    inlet = self._plane.inlet(address)
    with self._lock:
      before, self._inlets[shard] = self._inlets[shard], inlet
      closed = self._closed
    for each in (before, inlet if closed else None):
      if each is not None:
        each.close()

  def pull(self, payload: Payload, pace: TransferPace) -> list[np.ndarray]:
    """Returns the bytes by shard, all verified.

    Raises:
      TransferFailed: as `Inlet.pull`, for the first part that did not come.
    """
    shards = range(len(self._inlets))
    return self.pull_each([only(payload, shard) for shard in shards], pace)

  def pull_each(
    self, payloads: Sequence[Payload], pace: TransferPace
  ) -> list[np.ndarray]:
    """Returns the bytes by shard, given one payload for each shard."""
    parts = []
    for shard, wanted in enumerate(payloads):
      if wanted.nbytes:
        parts.append(pace.pull(self._inlet(shard), wanted))
      else:
        parts.append(NOTHING)
    return parts

  def close(self):
    """Ends the pulls in progress."""
    with self._lock:
      self._closed = True
      inlets = list(self._inlets)
    for inlet in inlets:
      if inlet is not None:
        inlet.close()

  def _inlet(self, shard: int) -> Inlet:
    with self._lock:
      inlet = self._inlets[shard]
      if self._closed:
        raise Closed('the session has ended')
    if inlet is None:
      raise Unreachable(f'shard {shard} has not said where it is')
    return inlet
