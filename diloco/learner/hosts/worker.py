# SPDX-License-Identifier: Apache-2.0
"""A process of a learner that does not lead: the same steps, its own bytes.

Its loop executes the leading host's orders in sequence; a thread reads them,
and two workers move bytes, as in the leading host's `SyncerClient`.
"""

import itertools
import json
import queue
import threading

import numpy as np

from diloco.checkpoint.learner_records import LearnerRecords, read_progress
from diloco.data import pipeline
from diloco.learner import peer_bootstrap
from diloco.learner.device import Device
from diloco.learner.held_state import StateHolder
from diloco.learner.own_progress import OwnProgress
from diloco.learner.replica import Mismatch
from diloco.learner.replica_codec import ArrivedFragments, make_part
from diloco.learner.restore import RestoredHostState
from diloco.protocol import host_messages
from diloco.run import payload_parts
from diloco.run.payload_parts import TransferPace
from diloco.run.spec import RunSpec
from diloco.run.threads import Worker
from diloco.transport.data_plane import (
  Closed,
  DataPlane,
  Publisher,
  TransferFailed,
)
from diloco.transport.host_channel import GroupLost, HostConnection

JOBS_MAX = 256  # Per worker; the leading host waits for what it requested.
CLOSE_S = 30.0  # Limit for writing the last checkpoint.
LOOP = (
  host_messages.MakeStep,
  host_messages.TakeSnapshot,
  host_messages.ApplyFragment,
  host_messages.ResetState,
  host_messages.DonateAt,
  host_messages.AdoptState,
  host_messages.BeginAt,
  host_messages.SaveAt,
  host_messages.EndAt,
)


class HostWorker:
  """One of the hosts 1 … N−1.

  Args:
    device: the compiled device.
    restored: what the process starts from; it is consumed.
    records: takes this host's checkpoints.
    plane: the data plane.
    connection: to the leading host; its messages go to `hear`, its end to
      `lost`.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    learner: int,
    device: Device,
    restored: RestoredHostState,
    records: LearnerRecords,
    plane: DataPlane,
    connection: HostConnection,
  ):
    self._run_spec = run_spec
    self._learner = learner
    self._device = device
    self._holder = StateHolder(device)
    self._records = records
    self._plane = plane
    self._params, self._state = restored.params, restored.inner_state
    self._part = make_part(run_spec, device, restored.copy)
    self._own = OwnProgress(
      device,
      run_spec.config.protocol.blend,
      {p: x.theta for p, x in enumerate(restored.copy.held())},
      self._params,
    )
    self._arrivals = ArrivedFragments()
    self._pace = TransferPace(run_spec.config.protocol.patience)
    self._dataset = run_spec.dataset(learner)
    self._batches = iter(())
    self._next_position = itertools.count()
    self._todo: queue.SimpleQueue = queue.SimpleQueue()
    self._sessions = HostSessions(plane, run_spec.owners.shards)
    self._donations = peer_bootstrap.Donations(self._part, plane)
    self._fetched: (
      tuple[host_messages.HostFetch, peer_bootstrap.FetchedState] | None
    )
    self._fetched = None  # From a donor; for the worker 'down'.
    self._adopted = None  # The donor's inner state, until the loop takes it.
    self._up = Worker('up', JOBS_MAX, self._todo.put)
    self._down = Worker('down', JOBS_MAX, self._todo.put)
    self._connection = connection

  def run(self) -> host_messages.EndAt:
    """Executes orders until it is told to end.

    Raises:
      GroupLost: the leading host is gone.
    """
    while True:
      said = self._todo.get()
      if isinstance(said, BaseException):
        raise said
      if isinstance(said, host_messages.EndAt):
        self._records.close(CLOSE_S)
        return said
      self._do(said)

  def close(self):
    """Ends threads and sessions."""
    self._up.close(1.0)
    self._down.close(1.0)
    self._donations.end_all()
    self._sessions.close()

  def lost(self, error: GroupLost):
    """Reports the end of the connection to the loop."""
    self._todo.put(error)

  # On the reading thread ------------------------------------------------------

  def hear(self, message):
    """Handles a message of the leading host."""
    if isinstance(message, LOOP):
      self._todo.put(message)
      return
    match message:
      case host_messages.OpenSession():
        addresses = self._sessions.open(message.session)
        self._say(host_messages.SessionAt(message.session, addresses))
      case host_messages.SyncerAt():
        self._sessions.find_syncer(message.session, message.addresses)
      case host_messages.ShardMoved():
        self._sessions.move(message.session, message.shard, message.address)
      case host_messages.CloseSession():
        self._sessions.end(message.session)
      case host_messages.HostRetire():
        self._sessions.retire(message.session, message.handles)
      case host_messages.OfferHeld():
        p = message.fragment
        self._offer(message, lambda: self._part.encode_held(p))
      case host_messages.HostTake():
        self._submit(self._down, lambda: self._take(message))
      case host_messages.HostFetch():
        self._submit(self._down, lambda: self._fetch(message))
      case host_messages.FetchOver():
        self._submit(self._down, lambda: self._end_fetch(message.taken))
      case host_messages.HostDonationOver():
        newcomer = message.learner, message.incarnation
        self._submit(self._up, lambda: self._donations.end(newcomer))
      case host_messages.HostDonationsOver():
        self._submit(self._up, self._donations.end_all)
      case _:
        raise TypeError(f'Not for another host: {message!r}.')

  def _say(self, message):
    self._connection.send(message)

  def _submit(self, worker: Worker, job):
    if not worker.submit(job):
      self._todo.put(RuntimeError('a worker has no room'))

  # On the workers -------------------------------------------------------------

  def _offer(self, order, encode):
    """Offers this host's parts; reports success or failure."""

    def job():
      shares = encode()
      said = tuple(payload_parts.part_of(data) for data in shares)
      try:
        self._sessions.offer(order.session, order.handle, shares)
      except Closed:
        said = ()
      self._say(host_messages.HostOffered(order.handle, said))

    self._submit(self._up, job)

  def _take(self, order: host_messages.HostTake):
    p, version, reason = order.fragment, order.version, ''
    try:
      data = self._sessions.pull(order.session, order.payloads, self._pace)
      self._part.take_in(
        p, version, order.full, data, order.crc, order.part_crcs
      )
      self._arrivals.put(p, version, self._part.placed(p))
    except (TransferFailed, Mismatch) as error:
      reason = f'{type(error).__name__}: {error}'
    self._say(host_messages.HostTook(p, version, reason))

  def _fetch(self, order: host_messages.HostFetch):
    """Fetches this host's part of a donor's state without adopting it."""
    self._fetched, reason = None, ''
    try:
      fetched = peer_bootstrap.fetch(
        order.payloads,
        order.address,
        self._part,
        len(self._run_spec.layout.fragments),
        self._run_spec.full.name,
        self._plane,
        self._pace,
      )
      self._fetched = order, fetched
    except (TransferFailed, Mismatch) as error:
      reason = f'{type(error).__name__}: {error}'
    self._say(host_messages.HostFetched(reason))

  def _end_fetch(self, taken: bool):
    """Ends a fetch on all hosts together; adopts it before reporting it."""
    fetched, self._fetched = self._fetched, None
    if not taken:
      return
    order, found = fetched
    self._part.adopt(order.versions, found.data, order.crcs)
    for p, version in enumerate(order.versions):
      self._arrivals.put(p, version, self._part.placed(p))
    self._adopted = found.inner_state
    self._say(host_messages.HostAdopted())

  # On the loop ----------------------------------------------------------------

  def _do(self, said):
    match said:
      case host_messages.MakeStep():
        self._step(said)
      case host_messages.TakeSnapshot():
        self._snapshot(said)
      case host_messages.ApplyFragment():
        self._apply(said)
      case host_messages.ResetState():
        self._state = self._device.fresh_state(self._params)
      case host_messages.DonateAt():
        self._donate(said)
      case host_messages.AdoptState():
        adopted, self._adopted = self._adopted, None
        self._state = self._device.put_state(adopted)
      case host_messages.BeginAt():
        threads = self._run_spec.config.data.threads
        self._batches = pipeline.batches(self._dataset, said.position, threads)
        self._next_position = itertools.count(said.position)
      case host_messages.SaveAt():
        self._save(said)
      case _:
        raise TypeError(f'Not for the loop: {said!r}.')

  def _step(self, said: host_messages.MakeStep):
    position = next(self._next_position)
    assert position == said.position, f'{position=}, told {said.position}'
    placed = self._device.put_batch(next(self._batches))
    draw = self._learner, position
    self._params, self._state, _ = self._holder.step(
      self._params, self._state, placed, said.lr, draw
    )

  def _snapshot(self, said: host_messages.TakeSnapshot):
    p = said.fragment
    theta = self._own.snapshot(p, self._params, said.handle, said.keep)
    if said.session:
      reference = self._own.reference(p)
      self._offer(said, lambda: self._part.encode_delta(p, theta, reference))

  def _donate(self, said: host_messages.DonateAt):
    state = self._holder.hold_state(self._state)
    thetas = [self._own.bases[p] for p in sorted(self._own.bases)]
    newcomer = said.learner, said.incarnation

    def job():
      try:
        offered = self._donations.offer(
          newcomer, said.handles, thetas, state.inner_state
        )
      except Closed:
        offered = peer_bootstrap.OfferedState('', ())
      finally:
        state.release()
      self._say(
        host_messages.HostDonated(*newcomer, offered.address, offered.parts)
      )

    self._submit(self._up, job)

  def _apply(self, said: host_messages.ApplyFragment):
    p = said.fragment
    arrived = self._arrivals.take(p, said.version)
    assert arrived is not None, f'{said} has not arrived here'
    params = self._holder.to_blend(self._params)
    self._params = self._own.take_in(
      p, params, arrived.host, arrived.device, said, said.blended
    )

  def _save(self, said: host_messages.SaveAt):
    self._records.save(
      said.step,
      self._holder.hold(self._params, self._state),
      self._own.bases,
      read_progress(json.loads(said.progress)),
      said.loss,
    )


class HostSessions:
  """This host's publishers and fetchers, by session with the syncer.

  Args:
    plane: makes them.
    shards: S, the number of the syncer's shards.
  """

  def __init__(self, plane: DataPlane, shards: int):
    self._plane = plane
    self._shards = shards
    self._lock = threading.Lock()
    self._publishers: dict[int, list[Publisher]] = {}
    self._fetchers: dict[int, payload_parts.Fetchers] = {}

  def open(self, session: int) -> tuple[str, ...]:
    """Opens publishers for a new session; returns where the shards find
    them.
    """
    publishers = [self._plane.publisher('syncer') for _ in range(self._shards)]
    with self._lock:
      self._publishers[session] = publishers
    return tuple(publisher.address for publisher in publishers)

  def find_syncer(self, session: int, addresses: tuple[str, ...]):
    """Notes where the syncer's offers to this host are, by shard."""
    fetchers = payload_parts.Fetchers(self._plane, addresses)
    with self._lock:
      self._fetchers[session] = fetchers

  def move(self, session: int, shard: int, address: str):
    """Notes the new address of a restarted shard."""
    with self._lock:
      fetchers = self._fetchers.get(session)
    if fetchers is not None:
      fetchers.move(shard, address)

  def end(self, session: int):
    """Ends a session."""
    with self._lock:
      publishers = self._publishers.pop(session, [])
      fetchers = self._fetchers.pop(session, None)
    for each in (*publishers, *([fetchers] if fetchers else [])):
      each.close()

  def offer(self, session: int, handle: int, shares):
    """Offers each shard its part; raises `Closed` if the session has ended."""
    with self._lock:
      publishers = self._publishers.get(session)
    if publishers is None:
      raise Closed('the session has ended')
    for publisher, data in zip(publishers, shares, strict=True):
      if data.size:
        publisher.offer(handle, data)

  def retire(self, session: int, handles: tuple[int, ...]):
    """Releases offers that will not be pulled (any more)."""
    with self._lock:
      publishers = self._publishers.get(session, [])
    for publisher in publishers:
      for handle in handles:
        publisher.retire(handle)

  def pull(
    self, session: int, payloads, pace: TransferPace
  ) -> list[np.ndarray]:
    """Pulls this host's parts, by shard; raises `TransferFailed`."""
    with self._lock:
      fetchers = self._fetchers.get(session)
    if fetchers is None:
      raise Closed('the session has ended')
    return fetchers.pull_each(payloads, pace)

  def close(self):
    for session in list(self._publishers):
      self.end(session)
