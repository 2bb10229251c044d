# SPDX-License-Identifier: Apache-2.0
"""The bytes of a bootstrap: what a donor offers, what a newcomer pulls.

A donation is the donor's copy of Θ in f32, fragment by fragment, and its
inner optimizer state at one of its boundaries. It has an outlet of its own,
which closes when the newcomer needs it no longer.
"""

import itertools
import zlib
from collections.abc import Sequence

import numpy as np

from diloco.numerics import payload
from diloco.protocol import learner_io, messages
from diloco.runtime import inner_state
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.host_copy import Held, HostCopy, Mismatch
from diloco.runtime.transfer_pace import TransferPace
from diloco.transport.interface import DataPlane, Outlet

INNER = 'inner'  # The codec of the inner state: its bytes as they are.
Session = tuple[int, int]  # (learner, incarnation) of a newcomer.


class Donations:
  """What this process offers to newcomers; for one thread.

  Args:
    blueprint: of the run.
    plane: makes an outlet for each newcomer.
    handles: numbers that no other offer of the process has.
  """

  def __init__(
    self,
    blueprint: Blueprint,
    plane: DataPlane,
    handles: 'itertools.count[int]',
  ):
    self._blueprint = blueprint
    self._plane = plane
    self._handles = handles
    self._outlets: dict[Session, Outlet] = {}

  def offer(
    self, effect: learner_io.DonateState, held: Sequence[Held], state
  ) -> messages.StateOffered:
    """Offers Θ and the inner state to a newcomer; what to say of it."""
    session = effect.learner, effect.incarnation
    self.end(session)
    outlet = self._plane.outlet(f'newcomer {effect.learner}')
    self._outlets[session] = outlet
    full, layout = self._blueprint.full, self._blueprint.layout
    payloads = []
    for each, pieces in zip(held, layout.fragments):
      data = payload.encode(each.theta, pieces, full)
      payloads.append(self._offered(outlet, full.name, data))
    for chunk in inner_state.to_chunks(state):
      payloads.append(self._offered(outlet, INNER, chunk))
    return messages.StateOffered(
      learner=effect.learner,
      incarnation=effect.incarnation,
      versions=tuple(each.version for each in held),
      crcs=tuple(each.crc for each in held),
      step=effect.step,
      payloads=tuple(payloads),
      address=outlet.address,
    )

  def end(self, session: Session):
    """Withdraws what was offered to a newcomer, if anything was."""
    outlet = self._outlets.pop(session, None)
    if outlet is not None:
      outlet.close()

  def end_all(self):
    for session in list(self._outlets):
      self.end(session)

  def _offered(
    self, outlet: Outlet, codec: str, data: np.ndarray
  ) -> messages.Payload:
    handle = next(self._handles)
    outlet.offer(handle, data)
    return messages.Payload(handle, codec, data.nbytes, zlib.crc32(data))


def fetch(
  offered: messages.StateOffered,
  blueprint: Blueprint,
  plane: DataPlane,
  pace: TransferPace,
  host: HostCopy,
  like,
):
  """Pulls a donation; the host's copy is the donor's afterwards, or as before.

  Args:
    offered: by the donor.
    blueprint: of the run.
    plane: reaches the donor.
    pace: knows how long a pull may take.
    host: takes Θ.
    like: the structure of the inner state.

  Returns:
    The inner state, a pytree of host arrays.

  Raises:
    TransferFailed: bytes did not come.
    Mismatch: they are not what this learner can use.
  """
  fragments = len(blueprint.layout.fragments)
  _check(offered.payloads, blueprint, like)
  try:
    inlet = plane.inlet(offered.address)
  except ValueError as error:
    raise Mismatch(f'donor at {offered.address!r}: {error}') from error
  try:
    data = [pace.pull(inlet, each) for each in offered.payloads]
  finally:
    inlet.close()
  state = inner_state.from_chunks(data[fragments:], like)
  if not inner_state.is_finite(state):
    raise Mismatch("the donor's inner state is not finite")
  host.adopt(offered.versions, data[:fragments], offered.crcs)
  return state


def _check(
  payloads: Sequence[messages.Payload], blueprint: Blueprint, like
) -> None:
  """Before a byte is pulled: is this what a donor of this run offers?"""
  full, layout = blueprint.full, blueprint.layout
  expected = [
    (full.name, payload.payload_bytes(pieces, full))
    for pieces in layout.fragments
  ]
  found = [(each.codec, each.nbytes) for each in payloads]
  inner = found[len(expected) :]
  total = sum(nbytes for _, nbytes in inner)
  sound = (
    found[: len(expected)] == expected
    and all(
      codec == INNER and 0 < nbytes <= inner_state.CHUNK_BYTES_MAX
      for codec, nbytes in inner
    )
    and total == inner_state.size_bytes(like)
  )
  if not sound:
    raise Mismatch(
      f'{len(found)} payloads with {total} bytes of inner state are offered; '
      f'this learner takes {len(expected)} fragments and '
      f'{inner_state.size_bytes(like)} bytes'
    )
