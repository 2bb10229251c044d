# SPDX-License-Identifier: Apache-2.0
"""The bytes that each host of a learner moves, as the leading one tells it."""

import threading
from collections.abc import Sequence

import numpy as np

from diloco.learner import peer_bootstrap
from diloco.learner.device import Device
from diloco.learner.replica import ArrivedFragment, Replica, ReplicaCodec
from diloco.protocol import host_messages, messages
from diloco.run import payload_parts
from diloco.run.payload_parts import TransferPace
from diloco.run.spec import RunSpec
from diloco.transport.data_plane import Closed, DataPlane, Publisher

Shares = Sequence[np.ndarray]  # uint8, by shard of the syncer.
OFFERS_MAX = 8  # Per fragment: offers that the syncer has not released.
OF_SESSIONS = (
  host_messages.SyncerAt,
  host_messages.ShardMoved,
  host_messages.CloseSession,
  host_messages.HostRetire,
)


class HostTransfer:
  """Moves the bytes of one host; the `take_…` methods are for its loop.

  Donations and what is encoded are for one worker, the rest for the other. What
  is done for an order raises `TransferFailed` where bytes did not come, and
  `Mismatch` where they are not what was announced.

  Args:
    device: takes fragments of Θ.
    replica: the host's copy of Θ.
    plane: the data plane.

  Attributes:
    codec: gives the bytes of what the host offers.
    donations: what it gives to newcomers.
    sessions: what it has on offer to the syncer, and pulls of it.
  """

  def __init__(
    self, run_spec: RunSpec, device: Device, replica: Replica, plane: DataPlane
  ):
    self.codec = ReplicaCodec(run_spec, device, replica)
    self.donations = peer_bootstrap.Donations(self.codec, plane)
    self.sessions = HostSessions(plane, run_spec.owners.shards, replica.host)
    self._host = replica.host
    self._shards = run_spec.owners.shards
    self._run_spec = run_spec
    self._plane = plane
    self._pace = TransferPace(run_spec.config.protocol.patience)
    self._arrived: dict[tuple[int, int], ArrivedFragment] = {}
    # From a donor, until all hosts have theirs; then its inner state, until the
    # loop takes it.
    self._fetched: (
      tuple[host_messages.HostFetch, peer_bootstrap.FetchedState] | None
    ) = None
    self._adopted = None

  def take_arrived(self, fragment: int, version: int) -> ArrivedFragment | None:
    """Returns the fragment to apply and forgets older ones.

    It is None if the version came twice and was applied before.
    """
    taken = self._arrived.pop((fragment, version), None)
    for key in list(self._arrived):
      if key[0] == fragment and key[1] < version:
        del self._arrived[key]
    return taken

  def take_adopted(self):
    """Returns the inner state that a donor gave; None if there is none."""
    adopted, self._adopted = self._adopted, None
    return adopted

  def offer(
    self, session: int, fragment: int, handle: int, shares: Shares
  ) -> tuple[messages.Part, ...]:
    """Offers the syncer this host's bytes; returns what is on offer."""
    self.sessions.offer(session, fragment, handle, shares)
    return tuple(map(payload_parts.part_of, shares))

  def take(self, order: host_messages.HostTake):
    """Pulls this host's part into its copy and the devices'."""
    first = self._host * self._shards
    own = range(first, first + self._shards)
    data = self.sessions.fetchers(order.session).pull_each(
      [payload_parts.only(order.payload, i) for i in own], self._pace
    )
    self._put(
      self.codec.take_in(
        order.fragment,
        order.version,
        order.full,
        data,
        order.crc,
        order.part_crcs[first : first + self._shards],
      )
    )

  def fetch(self, order: host_messages.HostFetch):
    """Pulls this host's part of a donor's state without adopting it."""
    self._fetched = None
    fetched = peer_bootstrap.fetch(
      [payload_parts.only(each, self._host) for each in order.payloads],
      order.addresses[self._host],
      self.codec,
      len(self._run_spec.layout.fragments),
      self._run_spec.full.name,
      self._plane,
      self._pace,
    )
    self._fetched = order, fetched

  def end_fetch(self, taken: bool):
    """Makes what was fetched this host's copy, or discards it."""
    found, self._fetched = self._fetched, None
    if not taken:
      return
    order, fetched = found
    self.codec.adopt(order.versions, fetched.data, order.crcs)
    for p in range(len(order.versions)):
      self._put(self.codec.placed(p))
    self._adopted = fetched.inner_state

  def _put(self, arrived: ArrivedFragment):
    self._arrived[arrived.fragment, arrived.held.version] = arrived


class _HostSession:
  """The open ends of one session on one host."""

  def __init__(self, publishers: Sequence[Publisher]):
    self.publishers = tuple(publishers)
    self.fetchers: payload_parts.Fetchers | None = None
    self.unretired: dict[int, int] = {}  # Handle -> fragment.

  def close(self):
    fetchers = (self.fetchers,) if self.fetchers else ()
    for each in (*self.publishers, *fetchers):
      each.close()


class HostSessions:
  """One host's sessions with the syncer, by number; for any thread.

  Args:
    plane: makes publishers and fetchers.
    shards: S, the number of the syncer's shards.
    host: index of this host.
  """

  def __init__(self, plane: DataPlane, shards: int, host: int = 0):
    self._plane = plane
    self._host = host
    self._shards = shards
    self._lock = threading.Lock()
    self._open: dict[int, _HostSession] = {}

  def open(self, session: int) -> tuple[str, ...]:
    """Opens publishers for a new session; returns where the shards find
    them.
    """
    opened = _HostSession(
      [self._plane.publisher('syncer') for _ in range(self._shards)]
    )
    with self._lock:
      self._open[session] = opened
    return tuple(publisher.address for publisher in opened.publishers)

  def perform(self, said):
    """Performs one of `OF_SESSIONS`; nothing if the session has ended."""
    found = self._found(said.session)
    if found is None:
      return
    match said:
      case host_messages.SyncerAt():
        before, first = found.fetchers, self._host * self._shards
        own = said.addresses[first : first + self._shards]
        found.fetchers = payload_parts.Fetchers(self._plane, own)
        if before is not None:
          before.close()
      case host_messages.ShardMoved():
        if found.fetchers is not None:
          found.fetchers.move(said.shard, said.addresses[self._host])
      case host_messages.CloseSession():
        with self._lock:
          self._open.pop(said.session, None)
        found.close()
      case host_messages.HostRetire():
        for handle in said.handles:
          found.unretired.pop(handle, None)
          for publisher in found.publishers:
            publisher.retire(handle)

  def has_room(self, session: int, fragment: int) -> bool:
    """Returns True if one more offer of the fragment may be made.

    A stopped syncer releases nothing: offers to it must not fill this host, and
    what it finds when it resumes must still be there to be pulled.
    """
    found = self._found(session)
    if found is None:
      return False
    return list(found.unretired.values()).count(fragment) < OFFERS_MAX

  def offer(self, session: int, fragment: int, handle: int, parts: Shares):
    """Offers each shard its part; raises `Closed` if the session has ended."""
    found = self._found(session)
    if found is None:
      raise Closed('the session has ended')
    for publisher, data in zip(found.publishers, parts, strict=True):
      if data.size:
        publisher.offer(handle, data)
    found.unretired[handle] = fragment

  def fetchers(self, session: int) -> payload_parts.Fetchers:
    """Returns what pulls in a session; raises `Closed` if it has ended."""
    found = self._found(session)
    if found is None or found.fetchers is None:
      raise Closed('the session has ended')
    return found.fetchers

  def close(self):
    for session in list(self._open):
      self.perform(host_messages.CloseSession(session))

  def _found(self, session: int) -> _HostSession | None:
    with self._lock:
      return self._open.get(session)
