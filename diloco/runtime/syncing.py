# SPDX-License-Identifier: Apache-2.0
"""The syncer's process around its machine.

One thread owns the machine and talks to the learners, in the order of the
machine's effects. Pulls run side by side on a pool; merges one after another
on a worker. Both answer with events.
"""

import concurrent.futures
import itertools
import queue
import threading
import time
import zlib

import numpy as np
from absl import logging

from diloco.checkpoint.parameters import write_parameters
from diloco.metrics.status import write_status
from diloco.metrics.summary import write_summary
from diloco.metrics.workdir import Workdir
from diloco.protocol import messages, syncer_io
from diloco.runtime import contributions
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.board import Board
from diloco.runtime.global_model import GlobalModel, Outcome
from diloco.runtime.inbox import Inbox
from diloco.runtime.peers import Key, Peer, Peers
from diloco.runtime.regaining import Regaining
from diloco.runtime.silence import SilenceLimits
from diloco.runtime.syncer_disk import SyncerDisk
from diloco.runtime.tape import Tape, closing_line, line_of
from diloco.runtime.transfer_pace import TransferPace
from diloco.runtime.worker import Worker
from diloco.transport import access as access_lib
from diloco.transport.control_server import ControlServer
from diloco.transport.control_session import Session
from diloco.transport.interface import DataPlane, TransferFailed

INBOX_MAX = 1 << 14  # Events; a full inbox holds back the sessions' readers.
SHARE_MAX = 64  # Of them, messages of one session.
MERGES_MAX = 64
STATUS_EVERY_S = 1.0
FAREWELL_S = 15.0  # How long learners may take to fetch the last updates.

Arrays = dict[str, np.ndarray]  # Piece name -> f32 array.


class Syncing:
  """One run's syncer.

  Args:
    blueprint: of the run.
    bind: host:port for the control plane.
    plane: carries the bytes.
    workdir: of the run.
    access: what each learner must show.
  """

  def __init__(
    self,
    blueprint: Blueprint,
    bind: str,
    plane: DataPlane,
    workdir: Workdir,
    access: access_lib.Access = access_lib.OPEN,
  ):
    config = blueprint.config
    self._blueprint = blueprint
    self._config = config
    self._plane = plane
    self._workdir = workdir
    self._pace = TransferPace(config.protocol.patience)
    self._model = GlobalModel(blueprint)
    self._board = Board(config)
    self._disk = SyncerDisk(blueprint, workdir, self._model, self._board)
    found = self._disk.begin()
    self._machine, self._ended = found.machine, found.ended
    self._silence = SilenceLimits(self._machine)
    self._tape = Tape(workdir.tape)
    self._inbox = Inbox(INBOX_MAX, SHARE_MAX)
    self._regaining = Regaining(
      blueprint,
      self._model,
      self._disk,
      self._tape,
      found,
      self._pace,
      tell=lambda event: self._inbox.tell((event, None)),
    )
    self._keys: dict[Session, Key] = {}  # Changed by the sessions' threads.
    self._peers = Peers(ids=config.data.shards)
    self._handles = itertools.count(1)
    self._contributions: dict[tuple[int, int, int], Arrays] = {}
    self._outcomes: dict[int, Outcome] = {}  # By round.
    self._stop = threading.Event()
    self._pulls = concurrent.futures.ThreadPoolExecutor(
      max_workers=4 * config.protocol.learners, thread_name_prefix='pull'
    )
    self._merger = Worker('merger', MERGES_MAX, self._inbox.tell)
    self._closer = Worker('closer', INBOX_MAX, self._inbox.tell)
    self._control = ControlServer(
      bind, self._on_message, self._on_closed, access=access
    )

  @property
  def address(self) -> str:
    """host:port that learners connect to."""
    return self._control.address

  def stop(self, *_):
    """Leaves before the run is over; also as a signal handler."""
    self._stop.set()

  def run(self) -> bool:
    """Until the run is over; False where it was stopped before."""
    told_s = 0.0
    while not self._ended and not self._stop.is_set():
      self._handle_next()
      if time.monotonic() - told_s >= STATUS_EVERY_S:
        told_s = time.monotonic()
        write_status(self._workdir.status, self._board.status(False))
    if not self._ended:
      self._disk.save_last(self._machine.ledger())
    else:
      # First: whoever dies from here on has not lost the run.
      self._write_results()
      self._say_farewell()
    return self._ended

  def close(self):
    """Ends sessions and threads."""
    self._inbox.close()
    for key in list(self._peers):
      self._peers.take(key).close('the syncer leaves')
    self._pulls.shutdown(wait=False, cancel_futures=True)
    self._control.close()
    logging.info(
      'messages: %s; sessions ended: %s',
      self._control.heard(),
      self._control.ended(),
    )
    self._merger.close(1.0)
    self._closer.close(1.0)
    self._disk.close()
    self._tape.close()

  # Events -------------------------------------------------------------------

  def _on_message(self, session: Session, message):
    """On a thread of the session; waits where too much is unread."""
    if isinstance(message, messages.Hello):
      self._keys[session] = message.learner, message.incarnation
    event = syncer_io.Heard(*self._keys[session], message)
    self._inbox.tell_from(session, (event, session))

  def _on_closed(self, session: Session, reason: str):
    event = syncer_io.Lost(*self._keys.pop(session), reason)
    self._inbox.tell((event, session))

  def _handle_next(self):
    """One event, or the tick for which the machine asked."""
    deadline = self._machine.deadline()
    wait_s = STATUS_EVERY_S
    if deadline is not None:
      wait_s = min(max(0.0, deadline - time.monotonic()), wait_s)
    try:
      item = self._inbox.get(timeout=wait_s)
    except queue.Empty:
      item = syncer_io.Tick(), None
    if isinstance(item, BaseException):
      raise item
    event, session = item
    if isinstance(event, syncer_io.Lost):
      self._inbox.forget(session)
    elif session is not None:
      self._inbox.was_read(session)
    if session is not None and not self._may_speak(session, event):
      return
    effects = self._machine.handle(event, time.monotonic())
    self._board.note_event(event)
    self._silence.note_event(event)
    for effect in effects:
      self._perform(effect)
      self._board.note_effect(effect)
      self._tape.write(effect, self._model.crcs())

  def _may_speak(self, session: Session, event) -> bool:
    """Whether a session's event counts; who it is, only one may be."""
    key = event.learner, event.incarnation
    if not isinstance(getattr(event, 'message', None), messages.Hello):
      return self._peers.session(key) in (None, session)
    reason = self._peers.knock(session, event.message)
    if reason is not None:
      session.send(messages.Refusal(reason, final=True))
      session.close(reason)
    return reason is None

  # Effects ------------------------------------------------------------------

  def _perform(self, effect: syncer_io.Effect):
    match effect:
      case syncer_io.Greet():
        self._greet(effect)
      case syncer_io.Send():
        self._send(effect.learner, effect.incarnation, effect.message)
      case syncer_io.Drop():
        self._drop(effect)
      case syncer_io.Pull():
        self._start_pull(effect)
      case syncer_io.Merge():
        self._start_merge(effect)
      case syncer_io.Publish():
        self._publish(effect)
      case syncer_io.Serve():
        self._serve(effect)
      case syncer_io.TakeFragment():
        self._start_taking(effect)
      case syncer_io.Relabel():
        self._regaining.relabel(effect, self._machine)
      case syncer_io.Retire():
        self._retire(effect)
      case syncer_io.Record():
        logging.info(
          '%s: learner %d, %s', effect.kind, effect.learner, effect.reason
        )
      case syncer_io.End():
        self._disk.keep(self._machine.ledger(), self._model.crcs())
        self._ended = True
      case _:
        raise TypeError(f'Not a syncer effect: {effect!r}.')

  def _greet(self, effect: syncer_io.Greet):
    key = effect.learner, effect.incarnation
    session, hello = self._peers.take_stranger(key)
    try:
      inlet = self._plane.inlet(hello.address)
    except ValueError as error:  # Of a wrong form, or does not resolve.
      session.close(str(error))  # And the machine hears that it is lost.
      return
    outlet = self._plane.outlet(f'learner {effect.learner}')
    peer = Peer(session, outlet, inlet, self._handles)
    self._peers.add(key, peer)
    session.send(
      messages.Welcome(
        step=effect.step,
        closed_round=effect.closed_round,
        versions=effect.versions,
        crcs=self._crcs(effect.lost_crcs),
        position=effect.position,
        live=effect.live,
        clean=effect.clean,
        address=peer.address,
      )
    )

  def _send(self, learner: int, incarnation: int, message):
    session = self._peers.session((learner, incarnation))
    if session is not None:
      session.send(message)

  def _drop(self, effect: syncer_io.Drop):
    key = effect.learner, effect.incarnation
    peer, stranger = self._peers.take(key), self._peers.take_stranger(key)
    if stranger is not None:
      stranger[0].close(effect.reason)
    # Not here: it may wait for the peer's sockets.
    if peer and not self._closer.submit(lambda: peer.close(effect.reason)):
      peer.close(effect.reason)

  def _retire(self, effect: syncer_io.Retire):
    peer = self._peers.get((effect.learner, effect.incarnation))
    for handle in effect.handles if peer else ():
      nbytes = peer.retire(handle)
      if nbytes:
        self._board.note_fetched(effect.learner, nbytes)

  def _guarded(self, job, *arguments):
    """Runs a job of the pool; what it raises ends the syncer."""
    try:
      job(*arguments)
    except BaseException as error:  # noqa: BLE001 - handed on, not hidden.
      self._inbox.tell(error)

  def _start_pull(self, effect: syncer_io.Pull):
    peer = self._peers.get((effect.learner, effect.incarnation))
    if peer is not None:
      self._pulls.submit(self._guarded, self._pull, effect, peer.inlet)

  def _pull(self, effect: syncer_io.Pull, inlet):
    """On the pool: bytes to outer gradient, checked in full."""
    key = effect.round, effect.learner, effect.incarnation
    try:
      v, norm = contributions.pull(
        effect.offer, inlet, self._blueprint, self._pace
      )
    except (TransferFailed, contributions.Unusable) as error:
      reason = f'{type(error).__name__}: {error}'
      unusable = isinstance(error, contributions.Unusable)
      failed = syncer_io.PullFailed(*key, reason, unusable)
      self._inbox.tell((failed, None))
      return
    self._contributions[key] = v
    self._inbox.tell((syncer_io.Pulled(*key, norm), None))

  def _start_merge(self, effect: syncer_io.Merge):
    """Hands the contributions to the merger; drops what it does not take."""
    taken = {
      share.learner: self._contributions[
        effect.round, share.learner, share.incarnation
      ]
      for share in effect.shares
    }
    for key in list(self._contributions):  # The pool adds to it meanwhile.
      if key[0] <= effect.round:
        del self._contributions[key]
    weights = {share.learner: share.weight for share in effect.shares}

    def merge():
      outcome = self._model.outer_step(effect.fragment, taken, weights)
      self._outcomes[effect.round] = outcome
      self._inbox.tell((syncer_io.Merged(effect.round), None))

    if not self._merger.submit(merge):
      raise RuntimeError(f'{MERGES_MAX} merges are waiting')

  def _publish(self, effect: syncer_io.Publish):
    outcome = self._outcomes.pop(effect.round)
    self._model.install(effect.fragment, outcome)
    # First what must not be forgotten, then what others will know of.
    published = line_of(closing_line(effect, outcome.crc))
    self._disk.keep(self._machine.ledger(), self._model.crcs(), published)
    data, crc = outcome.data, outcome.crc
    codec, data_crc = self._blueprint.down.name, zlib.crc32(data)
    for key in effect.recipients:
      peer = self._peers.get(key)
      if peer is None:
        continue  # Its address was of no use; that it is lost is on its way.
      handle = peer.offer(codec, effect.fragment, data)
      peer.session.send(
        messages.Update(
          round=effect.round,
          fragment=effect.fragment,
          version=effect.version,
          step=effect.step,
          participants=tuple(s.learner for s in effect.shares),
          weights=tuple(s.weight for s in effect.shares),
          ages_s=tuple(s.age_s for s in effect.shares),
          payload=messages.Payload(handle, codec, data.nbytes, data_crc),
          crc=crc,
        )
      )

  def _crcs(self, lost_crcs: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Of Θ as the run has it; of what is lost, by the ledger."""
    return tuple(
      (dict(enumerate(self._model.crcs())) | dict(lost_crcs)).values()
    )

  def _start_taking(self, effect: syncer_io.TakeFragment):
    peer = self._peers.get((effect.learner, effect.incarnation))
    if peer is not None:
      self._pulls.submit(
        self._guarded, self._regaining.take, effect, peer.inlet
      )

  def _serve(self, effect: syncer_io.Serve):
    logging.info(
      'fragment %d in full to learner %d: %s',
      effect.fragment,
      effect.learner,
      effect.reason,
    )
    peer = self._peers.get((effect.learner, effect.incarnation))
    if peer is None:
      return
    version, data, crc = self._model.fragment(effect.fragment)
    codec = self._blueprint.full.name
    handle = peer.offer(codec, effect.fragment, data)
    found = messages.Payload(handle, codec, data.nbytes, zlib.crc32(data))
    peer.session.send(
      messages.FullFragment(effect.fragment, version, found, crc)
    )

  # The end ------------------------------------------------------------------

  def _say_farewell(self):
    """Learners fetch the last updates and say goodbye; not for ever."""
    give_up = time.monotonic() + FAREWELL_S
    while len(self._peers) and time.monotonic() < give_up:
      if self._stop.is_set():
        break
      self._handle_next()
    for learner, _ in self._peers:
      logging.warning('learner %d did not say goodbye', learner)

  def _write_results(self):
    write_parameters(self._workdir.parameters, self._model.parameters())
    write_status(self._workdir.status, self._board.status(True))
    write_summary(self._workdir.summary, self._board.summary())
