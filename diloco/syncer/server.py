# SPDX-License-Identifier: Apache-2.0
"""The syncer's process around its machine.

One thread owns the machine and talks to the learners, in the order of the
machine's effects. The shards do the work on bytes; their answers become events.
"""

import collections
import math
import queue
import threading
import time
from collections.abc import Callable

from absl import logging

from diloco.metrics.status import RunStatus
from diloco.metrics.workdir import Workdir
from diloco.numerics import payload
from diloco.protocol import messages
from diloco.protocol import shard_messages as orders
from diloco.protocol.config import UPDATES_KEPT
from diloco.protocol.syncer import events as syncer_events
from diloco.run.event_log import Started, SyncerEventLog, closing_line, line_of
from diloco.run.payload_parts import read_partition
from diloco.run.spec import RunSpec
from diloco.run.threads import Inbox, Worker
from diloco.syncer.results import ResultCollector, ResultLost, Results
from diloco.syncer.shard import Shard
from diloco.syncer.shard_coordinator import ShardAnswer, ShardCoordinator
from diloco.syncer.stats import RunStats
from diloco.syncer.storage import LedgerWriteFailed, SyncerDisk
from diloco.transport import auth
from diloco.transport.control_channel import ControlLimits
from diloco.transport.control_server import ControlServer, ControlSession
from diloco.transport.data_plane import DataPlane

INBOX_MAX = 1 << 14  # Events; a full inbox holds back the sessions' readers.
SHARE_MAX = 64  # Of these, messages of one session.
STATUS_EVERY_S = 1.0
FAREWELL_S = 15.0  # How long learners may take to fetch the last updates.

Key = tuple[int, int]  # (learner, incarnation)


class LearnerSession:
  """One session of one learner, with its messages in order.

  A message about bytes that a shard has yet to offer keeps its place in the
  order; later messages wait for it.

  Args:
    hello: its first message.
    offers_max: how many can be on offer at once.

  Attributes:
    admitted: False until the machine has admitted it.
  """

  def __init__(
    self,
    session: ControlSession,
    hello: messages.Hello | messages.Inquiry,
    offers_max: int,
  ):
    self.session = session
    self.hello = hello
    self.admitted = False
    self._offers_max = offers_max
    # Each is empty until there is a message to be sent in its place.
    self._waiting: collections.deque[list] = collections.deque()
    # Bytes on offer, by handle in the order of the offers.
    self._nbytes: dict[int, int] = {}

  def send(self, message):
    """Sends a message after all that were sent, or reserved a place, before."""
    self.reserve()(message)

  def reserve(self) -> Callable[[object], None]:
    """Reserves the place of a message; returns what sends it there."""
    place = []
    self._waiting.append(place)

    def send(message):
      place.append(message)
      while self._waiting and self._waiting[0]:
        self.session.send(*self._waiting.popleft())

    return send

  def note_offer(self, offered: messages.Payload):
    """Notes an offer that can be fetched now."""
    self._nbytes[offered.handle] = offered.nbytes
    if len(self._nbytes) > self._offers_max:
      del self._nbytes[next(iter(self._nbytes))]

  def retire(self, handle: int) -> int:
    """Drops a fetched offer; returns its bytes, or 0 if unknown."""
    return self._nbytes.pop(handle, 0)


class SyncerServer:
  """One run's syncer.

  Args:
    bind: host:port for the control plane.
    tell: takes the state of the run, about once a second.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    bind: str,
    plane: DataPlane,
    workdir: Workdir,
    access: auth.Access = auth.OPEN,
    tell: Callable[[RunStatus], None] | None = None,
  ):
    config = run_spec.config
    self._run_spec = run_spec
    self._config = config
    self._plane = plane
    self._workdir = workdir
    self._unwritten = True  # Whether the run's results are still to be written.
    self._stop = threading.Event()
    self._inbox = Inbox(INBOX_MAX, SHARE_MAX)
    self._leader = Shard(
      run_spec,
      plane,
      shard=0,
      answer=lambda answer: self._inbox.tell((ShardAnswer(0, answer), None)),
      crash=self._inbox.tell,
    )
    self._model = self._leader.model
    parameters = sum(math.prod(x.shape) for x in run_spec.specs.values())
    self._stats = RunStats(config, parameters)
    self._disk = SyncerDisk(
      run_spec, workdir, self._model, self._stats, self._stop
    )
    self._disk.occupy()
    # Of learners and of shards; changed by the sessions' threads.
    self._keys: dict[ControlSession, Key | int] = {}
    limits = ControlLimits(sessions_max=run_spec.limits.sessions)
    # Learners connect, and what they say waits, while Θ is read from the disk.
    self._control = ControlServer(
      bind, self._on_message, self._on_closed, limits, access
    )
    try:
      self._restore(tell)
    except BaseException:
      self._inbox.close()
      self._control.close()
      raise

  def _restore(self, tell: Callable[[RunStatus], None] | None):
    """Goes on from what the folder holds of the run, or begins it."""
    run_spec, workdir = self._run_spec, self._workdir
    self._machine = self._disk.begin()
    ledger = self._machine.ledger()
    self._ended = ledger.ended
    self._results = Results(run_spec, workdir, self._stats, self._stop, tell)
    self._shards = ShardCoordinator(
      run_spec,
      self._leader,
      ledger.versions,
      self._disk.crcs,
      say=lambda key, message: self._send(*key, message),
    )
    self._farewells: list[tuple[Key, messages.Done]] = []
    self._tape = SyncerEventLog(workdir.tape)
    self._stats.resume_work(self._tape.newest_first())
    if self._disk.published:
      self._tape.complete(self._disk.published)
    self._standing_said = False
    self._say_standing()
    self._peers: dict[Key, LearnerSession] = {}
    self._closer = Worker('closer', INBOX_MAX, self._inbox.tell)

  @property
  def address(self) -> str:
    """The host:port that learners connect to."""
    return self._control.address

  def stop(self, *_):
    """Leaves before the run is over; also serves as a signal handler."""
    self._stop.set()

  def run(self) -> bool:
    """Serves until the run is over; returns False if it was stopped before.

    Raises:
      ResultLost: the run has ended, and no process has its result any more.
    """
    try:
      self._serve_run()
      if not self._ended:
        self._disk.save_last(self._machine.ledger(), self._run_crcs())
        return False
      # First of all: a process that dies after this has not lost the run.
      self._write_results()
      self._say_farewell()
    except LedgerWriteFailed as error:
      logging.error('stopped: %s', error)
      return False
    if not self._stop.is_set():
      self._shards.depart()
    return not self._unwritten

  def _serve_run(self):
    told_s = 0.0
    while not self._ended and not self._stop.is_set():
      self._handle_next()
      if time.monotonic() - told_s >= STATUS_EVERY_S:
        told_s = time.monotonic()
        self._results.tell_status()

  def close(self):
    """Ends sessions and threads."""
    self._inbox.close()
    for peer in self._peers.values():
      peer.session.close('the syncer leaves')
    self._control.close()
    self._results.close()
    logging.info(
      'messages: %s; sessions ended: %s',
      self._control.heard(),
      self._control.ended(),
    )
    self._leader.close()
    self._closer.close(1.0)
    self._disk.close()
    self._tape.close()

  # Events -------------------------------------------------------------------

  def _on_message(self, session: ControlSession, message):
    """Queues a message on its session's thread; waits for room in the inbox."""
    if isinstance(message, messages.OPENING):
      self._keys[session] = message.learner, message.incarnation
    if isinstance(message, orders.ShardHello):
      self._keys[session] = message.shard
    event = self._event_of(self._keys[session], message, syncer_events.Heard)
    self._inbox.tell_from(session, (event, session))

  def _on_closed(self, session: ControlSession, reason: str):
    event = self._event_of(self._keys.pop(session), reason, syncer_events.Lost)
    self._inbox.tell((event, session))

  def _event_of(self, key: Key | int, message, of_learner: type):
    if isinstance(key, int):
      return ShardAnswer(key, message)
    return of_learner(*key, message)

  def _handle_next(self):
    """Handles one event, or the tick that the machine asked for."""
    deadline = self._machine.deadline()
    wait_s = STATUS_EVERY_S
    if deadline is not None:
      wait_s = min(max(0.0, deadline - time.monotonic()), wait_s)
    try:
      item = self._inbox.get(timeout=wait_s)
    except queue.Empty:
      item = syncer_events.Tick(), None
    if isinstance(item, BaseException):
      raise item
    event, session = item
    if isinstance(getattr(event, 'answer', event), str | syncer_events.Lost):
      self._inbox.forget(session)
    elif session is not None:
      self._inbox.was_read(session)
    if isinstance(event, ShardAnswer):
      for own in self._shards.events_of(self._machine, session, event):
        self._handle(own)
    elif session is None or self._may_speak(session, event):
      self._handle(event)
    for lost in self._shards.end_silent():
      self._handle(lost)

  def _may_speak(self, session: ControlSession, event) -> bool:
    """Returns True if a session's event counts: one session per incarnation."""
    key = event.learner, event.incarnation
    peer = self._peers.get(key)
    hello = getattr(event, 'message', None)
    if not isinstance(hello, messages.OPENING):
      return peer is None or peer.session is session
    ids, fragments = self._config.data.shards, self._config.protocol.fragments
    if not 0 <= hello.learner < ids:
      reason = f'learner={hello.learner}: must be in 0 … {ids - 1}'
    elif peer is not None:
      reason = f'learner {hello.learner} speaks in another session already'
    elif wrong := self._wrong_partition(hello):
      reason = wrong
    else:
      offers_max = (UPDATES_KEPT + 1) * fragments
      self._peers[key] = LearnerSession(session, hello, offers_max)
      return True
    session.send(messages.Refusal(reason, final=True))
    session.close(reason)
    return False

  def _wrong_partition(self, hello: messages.Opening) -> str | None:
    """Returns what is wrong with a learner's partition, which its donor reads,
    too.
    """
    try:
      read_partition(self._run_spec, getattr(hello, 'partition', ''))
    except ValueError as error:
      return messages.brief(str(error))
    return None

  def _admitted(self, key: Key) -> LearnerSession | None:
    peer = self._peers.get(key)
    return peer if peer is not None and peer.admitted else None

  def _handle(self, event: syncer_events.Event):
    effects = self._machine.handle(event, time.monotonic())
    if isinstance(event, syncer_events.ShardReturned):
      self._say_standing()
    self._stats.note_event(event)
    for effect in effects:
      self._perform(effect)
      at_s = self._tape.write(effect, self._shards.crcs())
      worked = self._stats.note_effect(effect, at_s)
      if worked is not None:
        self._tape.append(worked)

  # Effects ------------------------------------------------------------------

  def _perform(self, effect: syncer_events.Effect):
    match effect:
      case syncer_events.AdmitLearner():
        self._greet(effect)
      case syncer_events.Send():
        self._send(effect.learner, effect.incarnation, effect.message)
      case syncer_events.EndSession():
        self._drop(effect)
      case syncer_events.Pull():
        self._shards.pull(effect)
      case syncer_events.CancelPull():
        self._shards.cancel(effect)
      case syncer_events.Merge():
        self._shards.merge(effect)
      case syncer_events.KeepLedger():
        self._disk.commit(self._machine.ledger(), self._run_crcs())
      case syncer_events.Publish():
        self._publish(effect)
      case syncer_events.SendFull():
        self._serve(effect)
      case syncer_events.TakeFragment():
        self._shards.take(effect)
      case syncer_events.AdoptVersion():
        self._adopt_version(effect)
      case syncer_events.Retire():
        self._retire(effect)
      case syncer_events.LogDecision():
        logging.info(
          '%s: learner %d, %s', effect.kind, effect.learner, effect.reason
        )
      case syncer_events.LogReformed():
        logging.info(
          'learner %d goes on with %d of %d slices from step %d, %d steps lost',
          effect.learner,
          effect.slices,
          effect.slices_of,
          effect.step,
          effect.lost_steps,
        )
      case syncer_events.End():
        self._disk.keep(self._machine.ledger(), self._run_crcs())
        self._ended = True
      case _:
        raise TypeError(f'Not a syncer effect: {effect!r}.')

  def _greet(self, effect: syncer_events.AdmitLearner):
    key = effect.learner, effect.incarnation
    peer = self._peers[key]
    hello = peer.hello
    addresses = self._shards.admit(*key, hello.addresses, hello.partition)
    if addresses is None:  # The machine will get a `Lost` event.
      del self._peers[key]
      peer.session.close(f'addresses {hello.addresses} are of no use')
      return
    peer.admitted = True
    peer.send(
      messages.Welcome(
        step=effect.step,
        closed_round=effect.closed_round,
        versions=effect.versions,
        crcs=self._run_crcs(effect.lost_crcs),
        rows=effect.rows,
        live=effect.live,
        clean=effect.clean,
        addresses=addresses,
      )
    )

  def _send(self, learner: int, incarnation: int, message):
    if isinstance(message, messages.Done) and self._unwritten:
      # A learner that leaves could no longer help to recover lost fragments.
      self._farewells.append(((learner, incarnation), message))
      return
    peer = self._peers.get((learner, incarnation))
    if peer is not None:
      peer.send(message)

  def _drop(self, effect: syncer_events.EndSession):
    key = effect.learner, effect.incarnation
    peer = self._peers.pop(key, None)
    if peer is None:
      return
    if peer.admitted:
      self._shards.release(*key)
    # Not on this thread: it may wait for the peer's sockets.
    close = lambda: peer.session.close(effect.reason)  # noqa: E731
    if not self._closer.submit(close):
      close()

  def _retire(self, effect: syncer_events.Retire):
    self._shards.retire(effect)
    peer = self._admitted((effect.learner, effect.incarnation))
    for handle in effect.handles if peer else ():
      nbytes = peer.retire(handle)
      if nbytes:
        self._stats.note_fetched(effect.learner, nbytes)

  def _publish(self, effect: syncer_events.Publish):
    merged = self._shards.merged.pop(effect.round)
    crc = payload.crc_of(merged.crcs)
    self._shards.install(effect, merged, here=True)
    self._stats.note_publish(effect)
    # First save what must not be lost, then tell the others.
    published = line_of(closing_line(effect, crc))
    saved_round = self._disk.saved_round
    self._disk.keep(self._machine.ledger(), self._run_crcs(), published)
    self._shards.install(effect, merged, here=False)
    if self._disk.saved_round != saved_round:
      last = self._machine.ledger().ended
      self._shards.save(effect.round, last)
    # Sessions that are missing had unusable addresses; their `Lost` event is on
    # its way.
    places = {
      key: peer.reserve()
      for key in effect.recipients
      if (peer := self._admitted(key)) is not None
    }

    def say(key: Key, offered: messages.Payload, part_crcs: tuple[int, ...]):
      peer = self._admitted(key)
      if peer is not None:
        peer.note_offer(offered)
      places[key](effect.update(key, offered, crc, part_crcs))

    self._shards.offer(effect.fragment, merged, places, say)

  def _run_crcs(self, lost=None) -> tuple[int | None, ...]:
    """CRCs of the run's Θ; None: unknown. `lost`: those that are not here."""
    lost = self._machine.lost_crcs if lost is None else lost
    return tuple((dict(enumerate(self._shards.crcs())) | dict(lost)).values())

  def _serve(self, effect: syncer_events.SendFull):
    logging.info(
      'fragment %d in full to learner %d: %s',
      effect.fragment,
      effect.learner,
      effect.reason,
    )
    key = effect.learner, effect.incarnation
    peer = self._admitted(key)
    if peer is None:
      return
    p = effect.fragment
    version, crc = self._shards.versions()[p], self._shards.crcs()[p]
    place = peer.reserve()

    def say(_, full: messages.Payload, part_crcs: tuple[int, ...]):
      peer.note_offer(full)
      place(
        messages.FullFragment(p, version, full, crc, *effect.merged, part_crcs)
      )

    self._shards.offer(p, None, [key], say)

  # After a restart ----------------------------------------------------------

  def _adopt_version(self, effect: syncer_events.AdoptVersion):
    """Makes a donated fragment, or the one that is here, Θ_p.

    Raises:
      ResultLost: the run is over, and this is not its result.
    """
    ledger = self._machine.ledger()
    self._shards.relabel(effect)
    p, crcs = effect.fragment, self._shards.crcs()
    final = self._disk.final_crcs
    if final is not None and crcs[p] != final[p]:
      raise _lost_result(p)
    # The machine may know of two at once; here they follow in turn.
    if self._machine.whole and self._shards.versions() == ledger.versions:
      self._disk.commit(ledger, crcs)
      self._disk.save(ledger, crcs)
      self._say_standing()

  def _say_standing(self):
    """Records in the event log what this process continues from, once Θ is
    complete.

    It comes before anything is merged.
    """
    machine = self._machine
    if self._standing_said or not machine.whole or machine.away:
      return
    self._standing_said = True
    ledger = machine.ledger()
    outer = [self._shards.outer(p) for p in range(len(ledger.versions))]
    self._tape.append(
      Started(
        closed_round=ledger.closed_round,
        versions=ledger.versions,
        crcs=self._shards.crcs(),
        outer_versions=tuple(version for version, _ in outer),
        outer_crcs=tuple(crc for _, crc in outer),
        total_steps=self._disk.total_steps,
      )
    )

  # The end ------------------------------------------------------------------

  def _say_farewell(self):
    """Lets learners fetch the last updates and leave, for a limited time."""
    give_up = time.monotonic() + FAREWELL_S
    while not self._stop.is_set() and any(map(self._admitted, self._peers)):
      if time.monotonic() >= give_up:
        logging.warning('without a goodbye: %s', sorted(self._peers))
        return
      self._handle_next()

  def _write_results(self):
    """Writes the results; waits for lost fragments while learners may come."""
    give_up_s = time.monotonic() + self._config.transport.connect_s
    while self._machine.lost:
      if self._stop.is_set():
        return
      if time.monotonic() >= give_up_s:
        raise _lost_result(self._machine.lost[0])
      self._handle_next()
    parameters = self._model.parameters()
    gathering = ResultCollector(self._run_spec, self._plane, self._shards)
    while not gathering.done(self._machine, parameters):
      if self._stop.is_set():
        return
      self._handle_next()
    if not self._results.write(parameters, self._disk.final_crcs):
      return
    self._unwritten = False
    for key, message in self._farewells:
      self._send(*key, message)


def _lost_result(fragment: int) -> ResultLost:
  return ResultLost(
    f'fragment {fragment} of the final parameters: no process has it'
  )
