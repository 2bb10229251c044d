# SPDX-License-Identifier: Apache-2.0
"""What a learner's two workers do with bytes: encode, offer, pull, prove."""

import dataclasses
import itertools
from collections.abc import Mapping

import jax
import numpy as np
from absl import logging

from diloco.numerics import payload
from diloco.numerics.codec import Codec
from diloco.protocol import learner_io, messages
from diloco.runtime import contributions, donations, parts
from diloco.runtime.announced import why_unfit
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.device import Device
from diloco.runtime.host_copy import HostCopy, Mismatch
from diloco.runtime.incarnation import process_of
from diloco.runtime.link import Session
from diloco.runtime.tape_lines import Source
from diloco.runtime.transfer_pace import TransferPace
from diloco.transport.interface import DataPlane, TransferFailed


@dataclasses.dataclass(frozen=True)
class Arrived:
  """A fragment of Θ at one version, in both places."""

  host: Mapping[str, np.ndarray]  # Piece name -> f32 array.
  device: Mapping[str, jax.Array]
  crc: int  # Of the host's bytes.


@dataclasses.dataclass(frozen=True)
class Adopted:
  """A donor's inner state, and where it is from."""

  inner_state: object  # A pytree of host arrays.
  source: Source


class Carrier:
  """The bytes of one learner; `take_…` are for its training loop.

  `offer…` and `donate…` run on one worker, `pull` and `fetch_state` on the
  other.

  Args:
    blueprint: of the run.
    device: takes fragments of Θ.
    host: the copy of Θ.
    plane: carries the bytes.
  """

  def __init__(
    self, blueprint: Blueprint, device: Device, host: HostCopy, plane: DataPlane
  ):
    self._blueprint = blueprint
    self._device = device
    self._host = host
    self._plane = plane
    self._pace = TransferPace(blueprint.config.protocol.patience)
    self._handles = itertools.count(1)
    self._arrived: dict[tuple[int, int], Arrived] = {}
    self._adopted: Adopted | None = None
    self.donations = donations.Donations(blueprint, plane, self._handles)

  # For the loop -------------------------------------------------------------

  def take_arrived(self, fragment: int, version: int) -> Arrived | None:
    """What is to be applied, and forgets what is older.

    None where the same version has come twice, and was applied before.
    """
    taken = self._arrived.pop((fragment, version), None)
    for key in list(self._arrived):
      if key[0] == fragment and key[1] < version:
        del self._arrived[key]
    return taken

  def take_adopted(self) -> Adopted:
    """The inner state that a donor gave."""
    adopted, self._adopted = self._adopted, None
    return adopted

  # Out ----------------------------------------------------------------------

  def offer(
    self,
    snapshot: learner_io.Snapshot,
    theta: Mapping[str, jax.Array],
    base: Mapping[str, np.ndarray],
    session: Session,
  ) -> messages.Offer:
    """v = base − θ, encoded and offered; what to say of it.

    Raises:
      Closed: the session has ended.
    """
    p = snapshot.fragment
    pieces = self._blueprint.layout.fragments[p]
    codec = self._blueprint.up
    data = contributions.encode(base, theta, pieces, codec)
    return messages.Offer(
      round=snapshot.round,
      fragment=p,
      base_version=snapshot.base_version,
      c_steps=snapshot.c_steps,
      c_tokens=snapshot.c_tokens,
      step=snapshot.step,
      payload=self._offered(p, codec, data, session),
    )

  def donate_fragment(
    self, fragment: int, session: Session
  ) -> messages.FragmentOffered:
    """The host's copy of a fragment, for a syncer that has lost it.

    Raises:
      Closed: the session has ended.
    """
    held = self._host.held()[fragment]
    pieces = self._blueprint.layout.fragments[fragment]
    full = self._blueprint.full
    data = payload.encode(held.theta, pieces, full)
    found = self._offered(fragment, full, data, session)
    return messages.FragmentOffered(fragment, held.version, found)

  def _offered(
    self, fragment: int, codec: Codec, data: np.ndarray, session: Session
  ) -> messages.Payload:
    handle = next(self._handles)
    shares = self._blueprint.owners.split(data, fragment, codec)
    session.offer(fragment, handle, shares)
    return parts.announced(handle, codec.name, shares)

  # In -----------------------------------------------------------------------

  def pull_update(
    self, update: messages.Update, inlets: parts.Inlets | None
  ) -> learner_io.Event:
    """An outer update: to the host's copy and to the devices."""
    return self._pull(update, self._host.update, self._blueprint.down, inlets)

  def pull_fragment(
    self, message: messages.FullFragment, inlets: parts.Inlets | None
  ) -> learner_io.Event:
    """A full fragment, likewise."""
    return self._pull(message, self._host.replace, self._blueprint.full, inlets)

  def _pull(self, message, take_in, codec, inlets) -> learner_io.Event:
    p, version = message.fragment, message.version
    owners = self._blueprint.owners
    try:
      reason = why_unfit(message.payload, p, codec, owners)
      if reason is None and inlets is None:
        reason = 'the session has ended'
      if reason is not None:
        raise Mismatch(reason)
      pulled = inlets.pull(message.payload, self._pace)
      data = owners.join(pulled, p, codec)
      take_in(p, version, data, message.crc)
    except (TransferFailed, Mismatch) as error:
      reason = f'{type(error).__name__}: {error}'
      logging.warning('fragment %d version %d: %s', p, version, reason)
      return learner_io.FetchFailed(p, version, reason)
    self._place(p)
    return learner_io.Rebuilt(p, version, message.crc, message.payload.handle)

  def fetch_state(self, state: messages.StateAt) -> learner_io.Event:
    """A donor's Θ and inner state."""
    offered = state.offered
    try:
      inner_state = donations.fetch(
        offered,
        self._blueprint,
        self._plane,
        self._pace,
        self._host,
        self._device.state_like,
      )
    except (TransferFailed, Mismatch) as error:
      reason = f'donor {state.donor}: {type(error).__name__}: {error}'
      logging.warning('%s', reason)
      return learner_io.StateFailed(reason)
    donor = process_of(state.incarnation)
    source = Source(
      *('peer', state.donor, donor, offered.step),
      versions=offered.versions,
      crcs=offered.crcs,
    )
    self._adopted = Adopted(inner_state, source)
    for p in range(len(self._blueprint.layout.fragments)):
      self._place(p)
    logging.info(
      'took Θ and the inner state of learner %d, at its step %d',
      state.donor,
      offered.step,
    )
    return learner_io.StateFetched(offered, state.donor)

  def _place(self, fragment: int):
    """The host's copy of a fragment, ready to be applied."""
    held = self._host.held()[fragment]
    device = self._device.put_fragment(fragment, held.theta)
    arrived = Arrived(held.theta, device, held.crc)
    self._arrived[fragment, held.version] = arrived
