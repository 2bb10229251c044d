# SPDX-License-Identifier: Apache-2.0
"""The work of a learner's two transfer threads: encode, offer, pull, verify.

The leading host has all hosts do it, itself among them; see
`hosts.host_transfer` for what each of them does.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from absl import logging

from diloco.checkpoint.learner_records import HeldState
from diloco.learner.exchange_programs import ExchangePrograms
from diloco.learner.hosts.host_group import ANSWER_S, STATE_S, HostGroup
from diloco.learner.hosts.host_transfer import (
  HostTransfer,
  announced,
  payloads_max,
)
from diloco.learner.replica import (
  FragmentReplica,
  Mismatch,
  Replica,
  VersionGap,
)
from diloco.metrics.workdir import Workdir
from diloco.numerics.codec import Codec
from diloco.protocol import host_messages, messages
from diloco.protocol.incarnation import process_of
from diloco.protocol.learner import events as learner_events
from diloco.run import payload_parts
from diloco.run.event_log import Source
from diloco.run.payload_parts import read_partition, why_unfit
from diloco.run.spec import RunSpec
from diloco.transport.data_plane import (
  Closed,
  DataPlane,
  NotOffered,
  TransferFailed,
)

# First handle of other payloads; the machine assigns smaller ones.
OTHER_HANDLES = 1 << 40


def logged_reason(where: str, error: Exception) -> str:
  """Logs why a pull failed, and returns the reason.

  A learner that joins is sent updates to versions that it does not have yet,
  and offers that it is late for: it asks for whole fragments, and all is well.
  """
  kind = Mismatch if isinstance(error, Mismatch) else type(error)
  reason = f'{kind.__name__}: {error}'
  is_usual = isinstance(error, VersionGap | NotOffered)
  level = logging.INFO if is_usual else logging.WARNING
  logging.log(level, '%s: %s', where, reason)
  return reason


class FragmentTransfer:
  """Moves the bytes of one learner; the `take_…` methods are for its train
  loop.

  `offer…` and `donate…` run on one worker, `pull` and `fetch_state` on the
  other.

  Args:
    programs: take fragments of Θ to the devices.
    replica: the leading host's copy of Θ.
    plane: the data plane.
    hosts: the learner's other hosts, which transfer their own parts.
    workdir: where peers save; None: that is not known.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    programs: ExchangePrograms,
    replica: Replica,
    plane: DataPlane,
    hosts: HostGroup,
    workdir: Workdir | None = None,
  ):
    self._run_spec = run_spec
    self._programs = programs
    self._host = HostTransfer(run_spec, programs, replica, plane, workdir)
    self._replica = replica
    self._hosts = hosts
    self._next_handle = functools.partial(next, itertools.count(OTHER_HANDLES))
    self._source: Source | None = None  # Of what was adopted.
    # As text, for the hello; '': there is one host.
    self.partition = programs.partition.to_text() if hosts.count > 1 else ''
    self.take_arrived = self._host.take_arrived
    self.has_room = self._host.sessions.has_room

  # For the loop -------------------------------------------------------------

  def donation_handles(self, partition: str) -> tuple[int, ...]:
    """Returns enough handles for a donation by any host.

    Args:
      partition: the newcomer's, as text.
    """
    hosts = read_partition(self._run_spec, partition).host_count
    most = payloads_max(self._run_spec, self._programs.state_like, hosts)
    return tuple(self._next_handle() for _ in range(most))

  def take_adopted(self) -> tuple[object, Source]:
    """Returns the inner state that a donor gave, and its origin."""
    return self._host.take_adopted(), self._source

  # Sessions with the syncer --------------------------------------------------

  def open_session(self, session: int) -> tuple[str, ...]:
    """Opens a session on each host; returns where each offers, by shard."""
    order = host_messages.OpenSession(self._next_handle(), session)
    self._hosts.tell(order)
    own = self._host.sessions.open(session)
    done = self._done(host_messages.HostDone(order.job, addresses=own))
    return sum((host.addresses for host in done), ())

  def tell(self, order):
    """Has all hosts perform a message about a session."""
    self._hosts.tell(order)
    self._host.sessions.perform(order)

  # Out ----------------------------------------------------------------------

  def offer(
    self,
    snapshot: learner_events.Snapshot,
    theta: Mapping[str, jax.Array],
    reference: Mapping[str, np.ndarray | jax.Array],
    session: int,
  ) -> messages.Offer:
    """Encodes and offers v = reference − θ; returns the message that says so.

    The other hosts, told by the loop, offer their parts under the same handle.

    Raises:
      Closed: the session has ended.
    """
    p, handle = snapshot.fragment, snapshot.handle
    shares = self._host.encode_delta(p, theta, reference)
    return snapshot.offer(
      self._offered(p, self._run_spec.up, shares, session, handle)
    )

  def donate(
    self,
    order: host_messages.DonateAt,
    step: int,
    held: Sequence[FragmentReplica],
    state: HeldState,
  ) -> messages.StateOffered | None:
    """Offers a newcomer Θ and the inner state of this boundary.

    The other hosts, told by the loop, offer their parts under the same handles.

    Args:
      order: what the other hosts were told.
      step: own step of this learner at the boundary.
      held: Θ at the boundary, by fragment.
      state: the inner state at the boundary, released when the donation ends.

    Returns:
      The message that announces it; None if a host failed and nothing is on
      offer.
    """
    handles = order.handles
    address, parts = self._host.donate(order, held, state)
    own = host_messages.HostDone(handles[0], '', (address,), parts)
    done = self._done(own, STATE_S)
    if any(each.reason for each in done):
      self.end_donations((order.learner, order.incarnation))
      return None
    address, *others = (each.addresses[0] for each in done)
    return messages.StateOffered(
      learner=order.learner,
      incarnation=order.incarnation,
      versions=tuple(each.version for each in held),
      crcs=tuple(each.crc for each in held),
      step=step,
      payloads=announced(
        handles,
        self._run_spec.full.name,
        len(held) * read_partition(self._run_spec, order.partition).host_count,
        [each.parts for each in done],
      ),
      address=address,
      other_addresses=tuple(others),
      partition=self.partition,
    )

  def end_donations(self, newcomer: tuple[int, ...] = ()):
    """Withdraws, on all hosts, what was offered to a newcomer, or to all."""
    self._host.end_donations(newcomer)
    self._hosts.tell(host_messages.EndDonations(newcomer))

  def donate_fragment(
    self, fragment: int, session: int
  ) -> messages.FragmentOffered | messages.NoFragment:
    """Offers the host's copy of a fragment to a syncer that has lost it.

    The other hosts offer their parts of it; if one has left the session, there
    is nothing on offer, and the answer says so.
    """
    handle = self._next_handle()
    self._hosts.tell(host_messages.OfferHeld(session, fragment, handle))
    version = self._replica.held()[fragment].version
    shares = self._host.encode_held(fragment)
    full = self._run_spec.full
    try:
      offered = self._offered(fragment, full, shares, session, handle)
    except Closed as error:
      self.tell(host_messages.HostRetire(session, (handle,)))
      return messages.NoFragment(fragment, messages.brief(str(error)))
    crc = self._replica.held()[fragment].crc
    return messages.FragmentOffered(fragment, version, offered, crc)

  def _offered(
    self,
    fragment: int,
    codec: Codec,
    shares: Sequence[np.ndarray],
    session: int,
    handle: int,
  ) -> messages.Payload:
    """Offers own parts and collects those of the other hosts: all, or none."""
    try:
      own = self._host.sessions.offer(session, fragment, handle, shares)
    finally:
      others = self._hosts.answers(handle)
    for host, host_done in others.items():
      if host_done.reason:
        raise Closed(f'host {host}: {host_done.reason}')
    done = self._in_order(host_messages.HostDone(handle, parts=own), others)
    parts = sum((host_done.parts for host_done in done), ())
    return payload_parts.announced_parts(handle, codec.name, parts)

  def _done(
    self, own: host_messages.HostDone, timeout_s: float = ANSWER_S
  ) -> list[host_messages.HostDone]:
    """Waits for what the other hosts answer; returns all answers, by host."""
    return self._in_order(own, self._hosts.answers(own.job, timeout_s))

  def _in_order(self, own, others) -> list[host_messages.HostDone]:
    by_host = {**others, self._replica.host: own}
    return [by_host[host] for host in sorted(by_host)]

  # In -----------------------------------------------------------------------

  def pull(
    self,
    announced: Sequence[messages.Update | messages.FullFragment],
    full: bool,
    session: int,
  ) -> list[learner_events.Event]:
    """Pulls outer updates of one fragment, or a full fragment.

    They go into the host's copy and the devices', one after another; see
    `learner_events.FetchUpdates`.
    """
    came: list[learner_events.Event] = []
    for message in announced:
      p, version = message.fragment, message.version
      try:
        self._pull(message, full, session)
      except (TransferFailed, Mismatch) as error:
        reason = logged_reason(f'fragment {p} version {version}', error)
        last = announced[-1].version
        return [*came, learner_events.FetchFailed(p, last, reason)]
      came = [learner_events.Rebuilt(p, version, message.crc)]
    return came

  def _pull(self, message, full: bool, session: int):
    """Checks what is announced, looks whether its base is here, and pulls."""
    p, codec = message.fragment, self._run_spec.full
    if not full:
      codec = self._run_spec.down
      self._replica.check_base(p, message.version)
    expected = self._replica.slice_map.down_bytes(p, codec)
    reason = why_unfit(message.payload, p, codec, expected)
    crcs, slice_map = len(message.part_crcs), self._replica.slice_map
    parts = slice_map.hosts * self._run_spec.owners.shards
    if reason is None and crcs != (0 if slice_map.whole else parts):
      reason = f'{crcs} CRCs of parts are announced'
    if reason is not None:
      raise Mismatch(reason)
    order = host_messages.HostTake(
      self._next_handle(),
      session,
      p,
      message.version,
      full,
      message.payload,
      message.crc,
      message.part_crcs,
    )
    with self._hosts.together(order):
      self._host.take(order)

  def fetch_state(self, state: messages.StateAt) -> learner_events.Event:
    """Pulls a donor's Θ and inner state: all hosts' parts of it, or nothing."""
    offered = state.offered
    try:
      self._fetch(offered)
    except (TransferFailed, Mismatch) as error:
      donor = f'donor {state.donor}'
      reason = f'{donor}: {logged_reason(donor, error)}'
      return learner_events.StateFailed(state, reason)
    donor = process_of(state.incarnation)
    self._source = Source(
      *('peer', state.donor, donor, offered.step),
      versions=offered.versions,
      crcs=offered.crcs,
    )
    logging.info(
      'took Θ and the inner state of learner %d, at its step %d',
      state.donor,
      offered.step,
    )
    return learner_events.StateFetched(offered, state.donor)

  def _fetch(self, offered: messages.StateOffered):
    """Has every host fetch its own parts concurrently; then all adopt them."""
    addresses = (offered.address, *offered.other_addresses)
    fragments = len(self._run_spec.layout.fragments)
    if not len(offered.versions) == len(offered.crcs) == fragments:
      raise Mismatch(
        f'{len(offered.versions)} versions and {len(offered.crcs)} CRCs, the '
        f'run has {fragments} fragments'
      )
    order = host_messages.HostFetch(
      self._next_handle(),
      addresses,
      offered.payloads,
      offered.partition,
      offered.versions,
      offered.crcs,
    )
    self._adopt_together(order, self._host.fetch)

  def read_stored(self, learner: int) -> learner_events.Event:
    """Reads the newest checkpoint of a peer that fits, on all hosts.

    Args:
      learner: id of this one.
    """
    here, reasons = self._replica.held(), []
    for donor, step, progress in self._host.stored(learner):
      versions, crcs = progress['versions'], progress['crcs']
      if any(v < held.version for v, held in zip(versions, here)):
        reasons.append(f'that of learner {donor} is older than what is here')
        continue
      order = host_messages.ReadSaved(self._next_handle(), donor, step)
      try:
        self._adopt_together(order, self._host.read)
      except Mismatch as error:
        reasons.append(f'learner {donor}: {error}')
        continue
      self._source = Source(
        *('peer_checkpoint', donor, progress['process'], step),
        versions=tuple(versions),
        crcs=tuple(crcs),
      )
      logging.info(
        'took Θ and the inner state of learner %d, of its checkpoint of step '
        '%d',
        donor,
        step,
      )
      offered = messages.StateOffered(
        learner, 0, tuple(versions), tuple(crcs), step, (), ''
      )
      return learner_events.StateFetched(offered, donor, stored=True)
    reason = '; '.join(reasons) or 'no peer has saved one'
    logging.info('no checkpoint of a peer: %s', reason)
    return learner_events.NothingStored(reason)

  def _adopt_together(self, order, perform: Callable[..., None]):
    """Has every host get its boxes of a state; then all of them adopt it."""
    try:
      with self._hosts.together(order, STATE_S):
        perform(order)
      self._host.end_fetch(taken=True)
    except (TransferFailed, Mismatch):
      self._hosts.tell(host_messages.FetchOver(self._next_handle(), False))
      raise
    over = host_messages.FetchOver(self._next_handle(), True)
    self._hosts.tell(over)
    self._hosts.answers(over.job)
