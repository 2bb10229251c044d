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
  """What is said of bytes that are offered in parts; each may be empty."""
  return announced_parts(handle, codec, [part_of(data) for data in parts])


def part_of(data: np.ndarray) -> Part:
  """What is said of one part."""
  return Part(data.nbytes, zlib.crc32(data))


def announced_parts(handle: int, codec: str, parts: Sequence[Part]) -> Payload:
  """The same where only sizes and CRCs are here."""
  if len(parts) == 1:
    return Payload(handle, codec, parts[0].nbytes, parts[0].crc)
  nbytes = sum(part.nbytes for part in parts)
  crc = payload_lib.crc_of([part.crc for part in parts])
  return Payload(handle, codec, nbytes, crc, tuple(parts))


def only(payload: Payload, index: int) -> Payload:
  """One part, as it is pulled."""
  if not payload.parts:
    return payload
  part = payload.parts[index]
  return Payload(payload.handle, payload.codec, part.nbytes, part.crc)


class Inlets:
  """Where a learner pulls what the shards of the syncer offer.

  Args:
    plane: makes the inlets.
    addresses: by shard; '' where it is not known yet.

  Raises:
    ValueError: an address is of a wrong form.
  """

  def __init__(self, plane: DataPlane, addresses: Sequence[str]):
    self._plane = plane
    self._lock = threading.Lock()
    self._closed = False
    self._inlets: list[Inlet | None] = [
      plane.inlet(address) if address else None for address in addresses
    ]

  def move(self, shard: int, address: str):
    """The shard's offers are elsewhere from now on."""
    inlet = self._plane.inlet(address)
    with self._lock:
      before, self._inlets[shard] = self._inlets[shard], inlet
      closed = self._closed
    for each in (before, inlet if closed else None):
      if each is not None:
        each.close()

  def pull(self, payload: Payload, pace: TransferPace) -> list[np.ndarray]:
    """The bytes by shard, all of them proven.

    Raises:
      TransferFailed: as `Inlet.pull`, of the first part that did not come.
    """
    shards = range(len(self._inlets))
    return self.pull_each([only(payload, shard) for shard in shards], pace)

  def pull_each(
    self, payloads: Sequence[Payload], pace: TransferPace
  ) -> list[np.ndarray]:
    """The same of one payload for each shard."""
    parts = []
    for shard, wanted in enumerate(payloads):
      if wanted.nbytes:
        parts.append(pace.pull(self._inlet(shard), wanted))
      else:
        parts.append(NOTHING)
    return parts

  def close(self):
    """Ends the pulls that are waiting."""
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
