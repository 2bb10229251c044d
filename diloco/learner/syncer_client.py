# SPDX-License-Identifier: Apache-2.0
"""A learner's machine and the threads that perform its effects.

Events come from the train loop, from the control stream and from the two
workers, and are serialized by a lock: the machine takes microseconds, and the
loop must know at its very boundary what to do there. (A queue to a machine's
thread and back would cost a thread switch per inner step.)
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from absl import logging

from diloco.learner.connection import (
  SyncerAddress,
  SyncerConnection,
  SyncerSession,
)
from diloco.learner.exchange_programs import ExchangePrograms
from diloco.learner.hosts.host_group import HostGroup
from diloco.learner.replica import FragmentReplica, Replica
from diloco.learner.transfers import FragmentTransfer
from diloco.metrics.workdir import Workdir
from diloco.protocol import host_messages, messages
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner import state as learner_state
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.learner.machine import Learner
from diloco.run.spec import RunSpec
from diloco.run.threads import Worker
from diloco.transport.data_plane import Closed

JOBS_MAX = 64  # Per worker; beyond it an offer or a fetch is given up.
INTERRUPT = 'interrupt'  # Tells a waiting loop to look up, without an effect.


class SyncerClient:
  """Couples one learner's train loop with the syncer.

  Args:
    programs: take fragments of Θ to the devices.
    host: the host's copy of Θ.
    start: what the process holds; None: what its seed gives.
    hosts: the learner's other hosts.
    workdir: of the run, where peers save.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    learner: int,
    syncer: SyncerAddress,
    programs: ExchangePrograms,
    host: Replica,
    start: Start | None = None,
    hosts: HostGroup | None = None,
    workdir: Workdir | None = None,
  ):
    config = run_spec.config
    self._hosts = hosts or HostGroup()
    self._transfer = FragmentTransfer(
      run_spec, programs, host, syncer.plane, self._hosts, workdir
    )
    self.take_arrived = self._transfer.take_arrived
    self.take_adopted = self._transfer.take_adopted
    self.donation_handles = self._transfer.donation_handles
    self._machine = Learner(
      config.protocol,
      config.name,
      learner,
      run_spec.fingerprints,
      start or Start.from_seed(host.crcs()),
      config.checkpoint.bootstrap,
    )
    self._learner = learner
    self._lock = threading.Lock()
    self._todo: queue.SimpleQueue = queue.SimpleQueue()
    self._session: SyncerSession | None = None
    # In which the loop's effect of now was decided; a later one is not told.
    self._decided_in: SyncerSession | None = None
    self._newest: dict[int, int] = {}  # Handle to be encoded, by fragment.
    self._state_wanted: messages.StateAt | None = None  # The newest.
    # At the end every fragment is offered at one boundary.
    room = JOBS_MAX + 2 * config.protocol.fragments
    self._up = Worker('up', room, self.crash)
    self._down = Worker('down', JOBS_MAX, self.crash)
    self._connection = SyncerConnection(
      syncer, config.transport.connect_s, self
    )

  # For the training loop ----------------------------------------------------

  @property
  def global_step(self) -> int:
    return self._machine.global_step

  @property
  def waiting(self) -> bool:
    """True while the loop must wait.

    Once False, the event that ended the wait is among the next effects.
    """
    with self._lock:
      return self._machine.waiting

  @property
  def incarnation(self) -> int:
    return self._session.incarnation if self._session else 0

  @property
  def process(self) -> int:
    """This process's number; see `protocol.incarnation`."""
    return self._connection.process

  def open(self):
    self._connection.open()

  def handle(
    self, event: learner_events.Event, session: SyncerSession | None = None
  ):
    """Passes an event to the machine and starts its effects.

    Args:
      session: becomes the current session before the event is handled.
    """
    events = [event]
    with self._lock:
      self._session = session or self._session
      waiting = self._machine.waiting
      deadline = self._machine.deadline()
      while events:
        for effect in self._machine.handle(events.pop(0), time.monotonic()):
          events += self._perform(effect)
      changed = self._machine.deadline() != deadline
      if waiting and not self._machine.waiting:
        self._todo.put(INTERRUPT)  # The loop may wait there without an effect.
    if changed:
      self._connection.wake()

  def next_boundary(self, wait: bool):
    """Returns the next effect for the loop, or None if there is none yet.

    Raises:
      BaseException: whatever a thread of this process raised.
    """
    try:
      item = self._todo.get(block=wait)
    except queue.Empty:
      return None
    if isinstance(item, BaseException):
      raise item  # An error that ended a thread ends the process.
    if item is INTERRUPT:
      return item
    effect, self._decided_in = item
    return effect

  def interrupt(self):
    """Wakes a loop that waits for its next effect; signal-safe."""
    self._todo.put(INTERRUPT)

  def machine_state(self) -> learner_state.LearnerState:
    """Returns the machine's state; at a boundary it is consistent with θ."""
    return self._machine.snapshot()

  def prepare_offer(
    self, snapshot: learner_events.Snapshot
  ) -> SyncerSession | None:
    """Returns the session to offer in; None if the syncer is away."""
    session, p = self._decided_in, snapshot.fragment
    here = session is not None and session is self._session
    if here and self._transfer.has_room(session.incarnation, p):
      return session
    # The syncer is away; it gets a newer offer when it is back.
    self._not_offered(snapshot)
    return None

  def offer(
    self,
    session: SyncerSession,
    snapshot: learner_events.Snapshot,
    theta: Mapping[str, jax.Array],
    reference: Mapping[str, np.ndarray | jax.Array],
  ):
    """Encodes and offers a snapshot, on the worker for offers."""
    p = snapshot.fragment
    self._newest[p] = snapshot.handle

    def job():
      # If the syncer it was meant for is gone, so is its round.
      if session is not self._session:
        self._hosts.forget(snapshot.handle)
        return
      # The others have been told to offer theirs.
      if self._newest[p] != snapshot.handle and self._hosts.count == 1:
        self._not_offered(snapshot)  # A newer one waits behind it.
        return
      try:
        offer = self._transfer.offer(
          snapshot, theta, reference, session.incarnation
        )
      except Closed:
        return  # The session has just ended.
      session.client.send(offer)

    if not self._up.submit(job):
      logging.warning('%d snapshots wait to be encoded, one is lost', JOBS_MAX)
      self._hosts.forget(snapshot.handle)
      self._not_offered(snapshot)

  def _not_offered(self, snapshot: learner_events.Snapshot):
    self.handle(learner_events.OfferDropped(snapshot.fragment, snapshot.handle))

  def leave(self, reason: str):
    """Says goodbye, although the machine did not request it."""
    self._send(messages.Goodbye(reason))

  def say_after_offers(self, message):
    """Sends `message` once all offers before it have been made."""
    self._send_from_up(self._decided_in, lambda session: message)

  def donate(
    self,
    order: host_messages.DonateAt,
    step: int,
    held: Sequence[FragmentReplica],
    state,
  ):
    """Offers a newcomer Θ and the inner state of a boundary.

    Args:
      order: what the other hosts were told.
      step: own step at the boundary.
      held: Θ at the boundary, by fragment.
      state: a `HeldState`, released when the donation ends.
    """
    session = self._decided_in

    def job():
      gone = session is None or session is not self._session
      if gone and self._hosts.count == 1:
        state.release()
        return  # The syncer it was meant for is gone.
      offered = self._transfer.donate(order, step, held, state)
      if session is None or session is not self._session:
        self._transfer.end_donations((order.learner, order.incarnation))
      elif offered is not None:
        session.client.send(offered)

    self._queue_up(job)

  def crash(self, error: BaseException):
    """Ends the loop with `error`; from any thread."""
    self._todo.put(error)

  def close(self):
    """Ends the threads; queued messages are still sent."""
    self._connection.close(timeout_s=3.0)
    self._up.close(timeout_s=1.0)
    self._down.close(timeout_s=1.0)

  # For the connection -------------------------------------------------------

  def on_deadline(self):
    self.handle(learner_events.Tick())

  def deadline(self) -> float | None:
    """Returns when `on_deadline` is due, in seconds of `time.monotonic`."""
    return self._machine.deadline()

  def on_open(self, session: SyncerSession):
    addresses = self._transfer.open_session(session.incarnation)
    connected = learner_events.Connected(
      session.incarnation, addresses, self._transfer.partition
    )
    self.handle(connected, session)

  def on_message(self, message):
    try:
      if isinstance(message, messages.ShardAt):  # The machine is not concerned.
        self._transfer.tell(
          host_messages.ShardMoved(
            self.incarnation, message.shard, message.addresses
          )
        )
        return
      refused = isinstance(message, messages.Refusal)
      if refused and self._connection.rise(message.newest):
        return  # The syncer ends the session; the next one is newer.
      if isinstance(message, messages.Welcome):
        self._connection.let_in()
        self._transfer.tell(
          host_messages.SyncerAt(self.incarnation, message.addresses)
        )
      if isinstance(message, messages.NoState):
        logging.info('goes on without a peer: %s', message.reason)
      self.handle(learner_events.Heard(message))
    except Exception as error:  # noqa: BLE001 - handed on, not hidden.
      self.crash(error)  # gRPC's thread would swallow it.

  def on_close(self, reason: str):
    session, self._session = self._session, None
    if session is not None:
      self._transfer.tell(host_messages.CloseSession(session.incarnation))
    self.handle(learner_events.Disconnected(reason))

  # Effects ------------------------------------------------------------------

  def _perform(
    self, effect: learner_events.Effect
  ) -> list[learner_events.Event]:
    """Performs an effect under the lock without waiting; returns its events."""
    match effect:
      case learner_events.Send():
        self._send(effect.message)
      case learner_events.FetchUpdates():
        return self._fetch(effect.updates, full=False)
      case learner_events.FetchFragment():
        return self._fetch((effect.message,), full=True)
      case learner_events.FetchState():
        self._fetch_state(effect.state)
      case learner_events.ReadStored():
        self._queue_down(
          lambda: self.handle(self._transfer.read_stored(self._learner))
        )
      case learner_events.DonateFragment():
        self._send_from_up(
          self._session,
          lambda session: self._transfer.donate_fragment(
            effect.fragment, session.incarnation
          ),
        )
      case learner_events.EndDonation():
        newcomer = effect.learner, effect.incarnation
        self._queue_up(lambda: self._transfer.end_donations(newcomer))
      case learner_events.Forget():
        self._forget(effect.handles)
      case _:  # The loop performs it, in order, at its boundary.
        if isinstance(effect, learner_events.Leave):
          self._connection.leave()
        self._todo.put((effect, self._session))
    return []

  def _send(self, message):
    if (session := self._session) is not None:
      session.client.send(message)

  def _forget(self, handles: tuple[int, ...] | None):
    """Releases these offers; None: all, which end with the session."""
    session = self._session
    if session is not None and handles:
      self._transfer.tell(
        host_messages.HostRetire(session.incarnation, handles)
      )
    if handles is None:
      self._queue_up(self._transfer.end_donations)

  def _send_from_up(
    self, session: SyncerSession | None, make: Callable[[SyncerSession], object]
  ):
    """Makes a message for a session on the worker; sends it if it still is."""

    def job():
      if session is None or session is not self._session:
        return  # The syncer it was meant for is gone.
      try:
        message = make(session)
      except Closed:
        return  # The session has just ended.
      session.client.send(message)

    self._queue_up(job)

  def _queue_up(self, job: Callable[[], None]):
    if not self._up.submit(job):
      self.crash(RuntimeError('the worker has no room'))

  def _fetch(
    self,
    announced: Sequence[messages.Update | messages.FullFragment],
    full: bool,
  ) -> list[learner_events.Event]:
    """Queues a pull of bytes that the syncer offers."""
    session = self.incarnation

    def job():
      for event in self._transfer.pull(announced, full, session):
        self.handle(event)

    if self._down.submit(job):
      return []
    last = announced[-1]
    reason = f'{JOBS_MAX} fetches are waiting'
    return [learner_events.FetchFailed(last.fragment, last.version, reason)]

  def _fetch_state(self, state: messages.StateAt):
    """Queues the pull of what a donor offers, unless another offers it then."""

    def job():
      if state is self._state_wanted:
        self.handle(self._transfer.fetch_state(state))

    self._state_wanted = state
    self._queue_down(job)

  def _queue_down(self, job: Callable[[], None]):
    if not self._down.submit(job):
      self.crash(RuntimeError('no room to fetch a state'))
