# SPDX-License-Identifier: Apache-2.0
"""The bytes of a bootstrap: what a donor offers, what a newcomer pulls.

A donation is the donor's copy of Θ in f32, fragment by fragment, and its inner
optimizer state, both of one of its boundaries. It has an outlet of its own,
which closes when the newcomer needs it no longer. Of a learner of several hosts
each offers its part so, and each host of the newcomer pulls that of the donor's
host of the same number.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from diloco.protocol import messages
from diloco.runtime import inner_state, parts
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.host_copy import Arrays, Mismatch
from diloco.runtime.host_part import Part
from diloco.runtime.transfer_pace import TransferPace
from diloco.transport.interface import DataPlane, Outlet

INNER = 'inner'  # The codec of the inner state: its bytes as they are.
NOTHING = messages.Part(0, 0)
Newcomer = tuple[int, int]  # (learner, incarnation).


@dataclasses.dataclass(frozen=True)
class Offered:
  """What one host offers to a newcomer.

  Attributes:
    address: where it is pulled.
    parts: P fragments, then the inner state.
  """

  address: str
  parts: tuple[messages.Part, ...]


@dataclasses.dataclass(frozen=True)
class Fetched:
  """What one host has pulled of a donor; nothing of it is in use yet.

  Attributes:
    data: the bytes of Θ_p in f32, by fragment.
    inner_state: for `Device.put_state`.
  """

  data: tuple[np.ndarray, ...]
  inner_state: object


class Donations:
  """What this process offers to newcomers; for one thread.

  Args:
    part: of the learner, that this process has.
    plane: makes an outlet for each newcomer.
  """

  def __init__(self, part: Part, plane: DataPlane):
    self._part = part
    self._plane = plane
    self._outlets: dict[Newcomer, Outlet] = {}

  def offer(
    self,
    newcomer: Newcomer,
    handles: Sequence[int],
    thetas: Sequence[Arrays],
    state,
  ) -> Offered:
    """Offers this process's part of Θ and of the inner state.

    Args:
      newcomer: who asked.
      handles: one for each part, in their order; there may be more.
      thetas: Θ_p by fragment.
      state: a copy of the inner state.
    """
    self.end(newcomer)
    outlet = self._plane.outlet(f'newcomer {newcomer[0]}')
    self._outlets[newcomer] = outlet
    encoded = (
      self._part.encode_donated(p, theta) for p, theta in enumerate(thetas)
    )
    said, left = [], iter(handles)
    for data in encoded:
      said.append(_offered(outlet, next(left), data))
    for data in self._part.state_chunks(state):
      said.append(_offered(outlet, next(left), data))
    return Offered(outlet.address, tuple(said))

  def end(self, newcomer: Newcomer):
    """Withdraws what was offered to a newcomer, if anything was."""
    outlet = self._outlets.pop(newcomer, None)
    if outlet is not None:
      outlet.close()

  def end_all(self):
    for newcomer in list(self._outlets):
      self.end(newcomer)


def _offered(outlet: Outlet, handle: int, data: np.ndarray) -> messages.Part:
  if data.size:
    outlet.offer(handle, data)
  return parts.part_of(data)


def payloads_max(blueprint: Blueprint, state_like) -> int:
  """How many handles a donation can need, of whichever host."""
  nbytes = inner_state.size_bytes(state_like)
  chunks = math.ceil(nbytes / inner_state.CHUNK_BYTES_MAX)
  return len(blueprint.layout.fragments) + chunks


def announced(
  handles: Sequence[int], codec: str, fragments: int, hosts: Sequence[Offered]
) -> tuple[messages.Payload, ...]:
  """What is said of all hosts' parts, which share their handles.

  Args:
    handles: as they were given to each host.
    codec: of Θ.
    fragments: P.
    hosts: what each offers, from host 0 on.
  """
  rows = itertools.zip_longest(
    *(each.parts for each in hosts), fillvalue=NOTHING
  )
  return tuple(
    parts.announced_parts(handle, codec if i < fragments else INNER, row)
    for i, (handle, row) in enumerate(zip(handles, rows))
  )


def fetch(
  payloads: Sequence[messages.Payload],
  address: str,
  part: Part,
  fragments: int,
  codec: str,
  plane: DataPlane,
  pace: TransferPace,
) -> Fetched:
  """Pulls one host's part of a donation, and proves it.

  Args:
    payloads: that part, as `parts.only` gives it.
    address: of the donor's host.
    part: that this process has.
    fragments: P.
    codec: of Θ.
    plane: reaches the donor.
    pace: knows how long a pull may take.

  Raises:
    TransferFailed: bytes did not come.
    Mismatch: they are not what this process can use.
  """
  _check(payloads, part, fragments, codec)
  try:
    inlet = plane.inlet(address)
  except ValueError as error:
    raise Mismatch(f'donor at {address!r}: {error}') from error
  try:
    data = [
      pace.pull(inlet, each) if each.nbytes else parts.NOTHING
      for each in payloads
    ]
  finally:
    inlet.close()
  state = part.state_from_chunks(data[fragments:])
  if not inner_state.is_finite(state):
    raise Mismatch("the donor's inner state is not finite")
  return Fetched(tuple(data[:fragments]), state)


def _check(
  payloads: Sequence[messages.Payload], part: Part, fragments: int, codec: str
) -> None:
  """Before a byte is pulled: is this what a donor of this run offers?"""
  expected = [(codec, part.donated_bytes(p)) for p in range(fragments)]
  found = [(each.codec, each.nbytes) for each in payloads]
  inner = found[fragments:]
  total = sum(nbytes for _, nbytes in inner)
  sound = (
    found[:fragments] == expected
    and all(
      name == INNER and 0 <= nbytes <= inner_state.CHUNK_BYTES_MAX
      for name, nbytes in inner
    )
    and total == part.state_bytes()
  )
  if not sound:
    raise Mismatch(
      f'{len(found)} payloads with {total} bytes of inner state are offered; '
      f'this learner takes {fragments} fragments and {part.state_bytes()} bytes'
    )
