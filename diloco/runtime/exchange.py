# SPDX-License-Identifier: Apache-2.0
"""A learner's machine and the threads that do what it wants.

Events come from the training loop, from the control stream and from the two
workers. A lock keeps them apart: the machine takes microseconds, and the loop
must know at its very boundary what to do there (a queue to a machine's thread
and back would cost a switch of threads for each inner step).
"""

import dataclasses
import itertools
import queue
import threading
import time
import zlib
from collections.abc import Callable, Mapping

import jax
import numpy as np
from absl import logging

from diloco.numerics import payload
from diloco.protocol import learner_io, messages
from diloco.protocol.learner import Learner
from diloco.runtime import contributions
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.device import Device
from diloco.runtime.host_copy import HostCopy, Mismatch
from diloco.runtime.link import Link, Session
from diloco.runtime.worker import Worker
from diloco.transport.interface import (
  Closed,
  DataPlane,
  Inlet,
  TransferFailed,
)

# What the training loop performs, in order, at its boundary.
BOUNDARY = (
  learner_io.Snapshot,
  learner_io.HandIn,
  learner_io.Apply,
  learner_io.Begin,
  learner_io.Cease,
  learner_io.Leave,
)
JOBS_MAX = 64  # Of each worker; beyond it an offer or a fetch is given up.
INTERRUPT = 'interrupt'  # For the loop: nothing to do, but look up.


@dataclasses.dataclass(frozen=True)
class Arrived:
  """A fragment of Θ at one version, in both places."""

  host: Mapping[str, np.ndarray]  # Piece name -> f32 array.
  device: Mapping[str, jax.Array]
  crc: int


class Exchange:
  """Couples one learner's training loop with the syncer.

  Args:
    blueprint: of the run.
    learner: the id.
    address: of the syncer, host:port.
    device: takes fragments of Θ.
    host: the copy of Θ.
    plane: carries the bytes.
    is_over: whether the results of the run are there, where that can be seen.
  """

  def __init__(
    self,
    blueprint: Blueprint,
    learner: int,
    address: str,
    device: Device,
    host: HostCopy,
    plane: DataPlane,
    is_over: Callable[[], bool] = lambda: False,
  ):
    config = blueprint.config
    self._blueprint = blueprint
    self._device = device
    self._host = host
    self._plane = plane
    self._timeout_s = config.transport.timeout_s
    self._machine = Learner(
      config.protocol,
      config.name,
      learner,
      blueprint.fingerprints,
      host.crcs(),
    )
    self._lock = threading.Lock()
    self._todo: queue.SimpleQueue = queue.SimpleQueue()
    self._handles = itertools.count(1)
    self._session: Session | None = None
    self._inlet: Inlet | None = None
    self._arrived: dict[tuple[int, int], Arrived] = {}
    # At the end every fragment is offered at one boundary.
    room = JOBS_MAX + 2 * config.protocol.fragments
    self._up = Worker('up', room, self._on_crash)
    self._down = Worker('down', JOBS_MAX, self._on_crash)
    self._link = Link(
      address,
      plane,
      config.transport.connect_s,
      on_open=self._on_open,
      on_message=self._on_message,
      on_close=self._on_close,
      on_deadline=lambda: self.handle(learner_io.Tick()),
      deadline=lambda: self._machine.deadline(),
      on_crash=self._on_crash,
      is_over=is_over,
    )

  # For the training loop ----------------------------------------------------

  @property
  def global_step(self) -> int:
    return self._machine.global_step

  @property
  def waiting(self) -> bool:
    """Once False, what ended the waiting is among the next effects."""
    with self._lock:
      return self._machine.waiting

  @property
  def incarnation(self) -> int:
    return self._session.incarnation if self._session else 0

  @property
  def process(self) -> int:
    """This process among the learner's, see `runtime.incarnation`."""
    return self._link.process

  def open(self):
    self._link.open()

  def handle(self, event: learner_io.Event, session: Session | None = None):
    """Feeds the machine; starts what it wants.

    Args:
      event: what happened.
      session: becomes the one that is spoken in, before the event is handled.
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
        self._todo.put(INTERRUPT)  # The loop may sit there without an effect.
    if changed:
      self._link.wake()

  def next_boundary(self, wait: bool):
    """The next effect for the loop, or None where there is none yet.

    Raises:
      BaseException: whatever a thread of this process raised.
    """
    try:
      effect = self._todo.get(block=wait)
    except queue.Empty:
      return None
    if isinstance(effect, BaseException):
      raise effect  # What ended a thread ends the process.
    return effect

  def interrupt(self):
    """Makes a loop that waits for its next effect look up; signal-safe."""
    self._todo.put(INTERRUPT)

  def take_arrived(self, fragment: int, version: int) -> 'Arrived | None':
    """What is to be applied, and forgets what is older.

    None where the same version has come twice, and was applied before.
    """
    taken = self._arrived.pop((fragment, version), None)
    for key in list(self._arrived):
      if key[0] == fragment and key[1] < version:
        del self._arrived[key]
    return taken

  def offer(
    self,
    snapshot: learner_io.Snapshot,
    theta: Mapping[str, jax.Array],
    base: Mapping[str, np.ndarray],
  ):
    """Encodes and offers a snapshot, on the worker for it."""
    session = self._session
    if session is None or not session.has_room(snapshot.fragment):
      return  # The syncer is away; it gets a newer one when it is back.
    if not self._up.submit(lambda: self._offer(snapshot, theta, base, session)):
      logging.warning('%d snapshots wait to be encoded, one is lost', JOBS_MAX)

  def hand_in(self):
    """Says that all offers before it have been made."""
    with self._lock:
      session = self._session

    def job():
      if session is not None and session is self._session:
        session.client.send(messages.HandedIn())

    if not self._up.submit(job):
      raise RuntimeError('no room to hand in')

  def leave(self, reason: str):
    """Says goodbye."""
    self._send(messages.Goodbye(reason))

  def close(self):
    """Ends the threads; what was said before is still sent."""
    self._link.close(timeout_s=3.0)
    self._up.close(timeout_s=1.0)
    self._down.close(timeout_s=1.0)

  # The session --------------------------------------------------------------

  def _on_open(self, session: Session):
    self.handle(
      learner_io.Connected(session.incarnation, session.outlet.address),
      session,
    )

  def _on_message(self, message):
    try:
      if isinstance(message, messages.Welcome):
        self._replace_inlet(self._plane.inlet(message.address))
      self.handle(learner_io.Heard(message))
    except Exception as error:  # noqa: BLE001 - handed on, not hidden.
      self._on_crash(error)  # gRPC's thread would keep it to itself.

  def _on_close(self, reason: str):
    self._session = None
    self._replace_inlet(None)
    self.handle(learner_io.Disconnected(reason))

  def _replace_inlet(self, inlet: Inlet | None):
    before, self._inlet = self._inlet, inlet
    if before is not None:
      before.close()

  def _on_crash(self, error: BaseException):
    self._todo.put(error)

  # Effects ------------------------------------------------------------------

  def _perform(self, effect: learner_io.Effect) -> list[learner_io.Event]:
    """Under the lock: nothing here may wait. Returns what came of it."""
    match effect:
      case learner_io.Send():
        self._send(effect.message)
      case learner_io.FetchUpdate():
        update = effect.update
        return self._fetch(update, self._host.update, self._blueprint.down.name)
      case learner_io.FetchFragment():
        return self._fetch(
          effect.message, self._host.replace, self._blueprint.full.name
        )
      case learner_io.Forget():
        self._forget(effect.handles)
      case _ if isinstance(effect, BOUNDARY):
        if isinstance(effect, learner_io.Leave):
          self._link.leave()
        self._todo.put(effect)
      case _:
        raise TypeError(f'Not a learner effect: {effect!r}.')
    return []

  def _send(self, message):
    session = self._session
    if session is not None:
      session.client.send(message)

  def _forget(self, handles: tuple[int, ...] | None):
    """None, all of them: the session's outlet closes by itself."""
    session = self._session
    for handle in handles or ():
      if session is not None:
        session.retire(handle)

  def _offer(self, snapshot, theta, base, session):
    """On the worker: v = base − θ, encoded, offered, announced."""
    pieces = self._blueprint.layout.fragments[snapshot.fragment]
    data = contributions.encode(base, theta, pieces, self._blueprint.up)
    if session is None or session is not self._session:
      return  # The syncer it was meant for is gone, and its round with it.
    handle = next(self._handles)
    try:
      session.offer(snapshot.fragment, handle, data)
    except Closed:
      return  # It has just ended.
    session.client.send(
      messages.Offer(
        round=snapshot.round,
        fragment=snapshot.fragment,
        base_version=snapshot.base_version,
        c_steps=snapshot.c_steps,
        c_tokens=snapshot.c_tokens,
        step=snapshot.step,
        payload=messages.Payload(
          handle, self._blueprint.up.name, data.nbytes, zlib.crc32(data)
        ),
      )
    )

  def _fetch(self, message, take_in, codec: str) -> list[learner_io.Event]:
    """Queues a pull; `take_in` is how the host copy takes the bytes."""
    inlet = self._inlet

    def job():
      self.handle(self._pull(message, take_in, codec, inlet))

    if self._down.submit(job):
      return []
    reason = f'{JOBS_MAX} fetches are waiting'
    return [learner_io.FetchFailed(message.fragment, message.version, reason)]

  def _pull(self, message, take_in, codec, inlet) -> learner_io.Event:
    """On the worker: bytes to the host's copy and to the devices."""
    p, version = message.fragment, message.version
    try:
      self._check(message.payload, p, codec)
      if inlet is None:
        raise Mismatch('the session has ended')
      data = inlet.pull(message.payload, self._timeout_s)
      take_in(p, version, data, message.crc)
    except (TransferFailed, Mismatch) as error:
      reason = f'{type(error).__name__}: {error}'
      logging.warning('fragment %d version %d: %s', p, version, reason)
      return learner_io.FetchFailed(p, version, reason)
    _, theta = self._host.fragment(p)
    device = self._device.put_fragment(p, theta)
    self._arrived[p, version] = Arrived(theta, device, message.crc)
    return learner_io.Rebuilt(p, version, message.crc, message.payload.handle)

  def _check(self, found: messages.Payload, fragment: int, codec: str):
    pieces = self._blueprint.layout.fragments[fragment]
    expected = {
      each.name: payload.payload_bytes(pieces, each)
      for each in (self._blueprint.down, self._blueprint.full)
    }
    if (found.codec, found.nbytes) != (codec, expected[codec]):
      raise Mismatch(
        f'{found.nbytes} bytes of {found.codec} are announced, fragment '
        f'{fragment} takes {expected[codec]} of {codec}'
      )
