# SPDX-License-Identifier: Apache-2.0
"""The bytes of a bootstrap: what a donor offers, what a newcomer pulls.

A donation is the donor's copy of Θ in f32, fragment by fragment, and its inner
optimizer state, both at one of its boundaries. It has a publisher of its own,
which closes when the newcomer no longer needs it. If the learner has several
hosts, each offers its part in this way, and each host of the newcomer pulls
from the donor's host of the same number.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from diloco.learner import inner_device
from diloco.learner.replica import Arrays, Mismatch, ReplicaCodec
from diloco.protocol import messages
from diloco.run import payload_parts
from diloco.run.payload_parts import TransferPace
from diloco.run.spec import RunSpec
from diloco.transport.data_plane import DataPlane, Publisher

INNER = 'inner'  # The inner state's codec: its raw bytes.
NOTHING = messages.Part(0, 0)
Newcomer = tuple[int, int]  # (learner, incarnation).


@dataclasses.dataclass(frozen=True)
class FetchedState:
  """The bytes that one host has pulled from a donor; none is in use yet.

  Attributes:
    data: bytes of Θ_p in f32, by fragment.
    inner_state: for `Device.put_state`.
  """

  data: tuple[np.ndarray, ...]
  inner_state: object


class Donations:
  """The donations of this process to newcomers; for one thread.

  Args:
    part: the learner's arrays that this process has.
    plane: makes a publisher for each newcomer.
  """

  def __init__(self, part: ReplicaCodec, plane: DataPlane):
    self._part = part
    self._plane = plane
    self._publishers: dict[Newcomer, Publisher] = {}

  def offer(
    self,
    newcomer: Newcomer,
    handles: Sequence[int],
    thetas: Sequence[Arrays],
    state,
  ) -> tuple[str, tuple[messages.Part, ...]]:
    """Offers this process's part of Θ and of the inner state.

    Args:
      newcomer: the learner and incarnation that receives it.
      handles: one for each payload, in order; there may be more.
      thetas: Θ_p by fragment.
      state: a copy of the inner state.

    Returns:
      Where it is pulled, and its payloads: P fragments, then the inner state.
    """
    self.end(newcomer)
    publisher = self._plane.publisher(f'newcomer {newcomer[0]}')
    self._publishers[newcomer] = publisher
    encoded = (
      self._part.encode_donated(p, theta) for p, theta in enumerate(thetas)
    )
    said, left = [], iter(handles)
    for data in encoded:
      said.append(_offered(publisher, next(left), data))
    for data in self._part.state_chunks(state):
      said.append(_offered(publisher, next(left), data))
    return publisher.address, tuple(said)

  def end(self, newcomer: tuple[int, ...] = ()):
    """Withdraws what was offered to a newcomer, if anything was, or to all."""
    for each in [newcomer] if newcomer else list(self._publishers):
      publisher = self._publishers.pop(each, None)
      if publisher is not None:
        publisher.close()


def _offered(
  publisher: Publisher, handle: int, data: np.ndarray
) -> messages.Part:
  if data.size:
    publisher.offer(handle, data)
  return payload_parts.part_of(data)


def payloads_max(run_spec: RunSpec, state_like) -> int:
  """Returns how many handles a donation can need, on any host."""
  nbytes = inner_device.size_bytes(state_like)
  chunks = math.ceil(nbytes / inner_device.CHUNK_BYTES_MAX)
  return len(run_spec.layout.fragments) + chunks


def announced(
  handles: Sequence[int],
  codec: str,
  fragments: int,
  hosts: Sequence[Sequence[messages.Part]],
) -> tuple[messages.Payload, ...]:
  """Returns the payloads that announce all hosts' parts.

  Args:
    handles: the handles, the same for each host.
    codec: codec of Θ.
    fragments: P.
    hosts: what each host offers, from host 0 on, as `Donations.offer` says.
  """
  rows = itertools.zip_longest(*hosts, fillvalue=NOTHING)
  return tuple(
    payload_parts.announced_parts(
      handle, codec if i < fragments else INNER, row
    )
    for i, (handle, row) in enumerate(zip(handles, rows))
  )


def fetch(
  payloads: Sequence[messages.Payload],
  address: str,
  part: ReplicaCodec,
  fragments: int,
  codec: str,
  plane: DataPlane,
  pace: TransferPace,
) -> FetchedState:
  """Pulls one host's part of a donation, and verifies it.

  Args:
    payloads: that part, as `parts.only` gives it.
    address: of the donor's host.
    part: the arrays that this process has.
    fragments: P.
    codec: codec of Θ.
    plane: reaches the donor.
    pace: knows how long a pull may take.

  Raises:
    TransferFailed: bytes did not come.
    Mismatch: this process cannot use them.
  """
  _check(payloads, part, fragments, codec)
  try:
    fetcher = plane.fetcher(address)
  except ValueError as error:
    raise Mismatch(f'donor at {address!r}: {error}') from error
  try:
    data = [
      pace.pull(fetcher, each) if each.nbytes else payload_parts.NOTHING
      for each in payloads
    ]
  finally:
    fetcher.close()
  state = part.state_from_chunks(data[fragments:])
  if not inner_device.is_finite(state):
    raise Mismatch("the donor's inner state is not finite")
  return FetchedState(tuple(data[:fragments]), state)


def _check(
  payloads: Sequence[messages.Payload],
  part: ReplicaCodec,
  fragments: int,
  codec: str,
) -> None:
  """Checks, before any byte is pulled, that a donor of this run would offer
  this.
  """
  expected = [(codec, part.donated_bytes(p)) for p in range(fragments)]
  found = [(each.codec, each.nbytes) for each in payloads]
  inner = found[fragments:]
  total = sum(nbytes for _, nbytes in inner)
  sound = (
    found[:fragments] == expected
    and all(
      name == INNER and 0 <= nbytes <= inner_device.CHUNK_BYTES_MAX
      for name, nbytes in inner
    )
    and total == part.state_bytes()
  )
  if not sound:
    raise Mismatch(
      f'{len(found)} payloads with {total} bytes of inner state are offered; '
      f'this learner takes {fragments} fragments and {part.state_bytes()} bytes'
    )
