# SPDX-License-Identifier: Apache-2.0
"""The syncer's server of the control plane: a stream for each learner."""

import collections
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import grpc

from diloco.protocol import messages, shard_messages
from diloco.transport import auth, control_channel, wire
from diloco.transport.control_channel import Outbox

_REASON_CHARS_MAX = 512  # It is sent in a header.

# What starts a session, and what may follow it.
_FOLLOWING = {
  messages.Hello: messages.FROM_LEARNER,
  messages.Inquiry: (),
  shard_messages.ShardHello: shard_messages.FROM_SHARD,
}
_OPENING = (*messages.FROM_LEARNER, shard_messages.ShardHello)

_CODES = {
  'malformed': grpc.StatusCode.INVALID_ARGUMENT,
  'handshake': grpc.StatusCode.DEADLINE_EXCEEDED,
  'overflow': grpc.StatusCode.RESOURCE_EXHAUSTED,
  'crowded out': grpc.StatusCode.RESOURCE_EXHAUSTED,
  'full': grpc.StatusCode.RESOURCE_EXHAUSTED,
  'token': grpc.StatusCode.UNAUTHENTICATED,
  'closed': grpc.StatusCode.ABORTED,
  'left': grpc.StatusCode.OK,
  'lost': grpc.StatusCode.UNAVAILABLE,
  'failed': grpc.StatusCode.INTERNAL,
}
_SPARE_WORKERS = 16  # For refused calls, and for sessions that are ending.
# gRPC delivers messages up to this much above the limit, so that they are
# refused by name; a larger one ends the session as 'lost'.
_OVERSIZED_BYTES = 1 << 16


# One learner's stream at the syncer: its messages, and why it ends.
#
# It has two threads: one of gRPC's pool sends; one of its own reads and makes
# all callbacks, so that a session's messages, and its end, come in order.


class ControlSession:
  """One learner's stream, made by the server.

  Attributes:
    peer: the other side's address, as gRPC writes it.
  """

  def __init__(
    self, context: grpc.ServicerContext, limits: control_channel.ControlLimits
  ):
    self.peer = context.peer()
    self._context = context
    self._limits = limits
    self._outbox = Outbox(limits.outgoing_max)
    self._lock = threading.Lock()
    self._end: tuple[str, str] | None = None  # Cause and reason.
    self._greeted = threading.Event()
    self._allowed: tuple[type, ...] = _OPENING
    self._giving_up = threading.Timer(limits.close_s, context.cancel)
    self._giving_up.daemon = True
    if not context.add_callback(self._outbox.discard):
      self._outbox.discard()  # It ended before it began.

  def send(self, message: wire.Message) -> bool:
    """Queues `message`; returns True if the session was open. Never blocks.

    The session is cut off if its reader leaves `outgoing_max` messages waiting,
    or if a message would exceed the size limit.
    """
    try:
      body = wire.encode(message)
    except ValueError as error:
      self.end('overflow', str(error))
      return False
    try:
      return self._outbox.put(body)
    except queue.Full:
      self.end('overflow', f'{self._limits.outgoing_max} messages are waiting')
      self._outbox.discard()
      return False

  def close(self, reason: str) -> None:
    """Ends the session after what is queued; the learner receives `reason`."""
    self.end('closed', reason)

  def end(self, cause: str, reason: str) -> None:
    """Ends the session for a cause of `_CODES`; the first call counts."""
    with self._lock:
      if self._end is not None:
        return
      self._end = (cause, reason)
      self._giving_up.start()
    self._outbox.finish()

  def bodies(self) -> Iterator[bytes]:
    """Yields what is queued on gRPC's thread, then sends why it ends."""
    deadline = time.monotonic() + self._limits.handshake_s
    while True:
      left_s = None
      if not self._greeted.is_set():
        left_s = max(0.0, deadline - time.monotonic())
      try:
        body = self._outbox.take(left_s)
      except queue.Empty:
        if not self._greeted.is_set():
          self.end('handshake', f'no hello within {self._limits.handshake_s} s')
        continue
      if body is None:
        break
      yield body
    self._giving_up.cancel()
    if self._end is not None:
      abort(self._context, *self._end)

  def read(
    self,
    requests: Iterator[bytes],
    on_message: Callable[['ControlSession', wire.Message], None],
    count: Callable[[str | None], None],
  ) -> None:
    """Delivers messages until the end, and sets its cause.

    It calls `count` for each: with None, or with the flaw that refused it.
    """
    cause, reason = 'left', 'the learner ended the stream'
    try:
      for body in requests:
        message = self._judged(body)
        count(None)
        on_message(self, message)
    except wire.MalformedMessage as error:
      cause, reason = 'malformed', str(error)
      count(error.flaw)
    except grpc.RpcError:
      cause, reason = 'lost', f'the connection to {self.peer} was lost'
    self.end(cause, reason)

  def _judged(self, body: bytes) -> wire.Message:
    """Returns the message in `body`.

    Raises:
      MalformedMessage: it is not a message, or may not come now.
    """
    if self._end is not None:
      raise wire.MalformedMessage(
        'too late', f'from {self.peer}: after the end'
      )
    message = wire.decode(body, self._allowed, self.peer)
    hello = type(message) in _FOLLOWING
    if hello == self._greeted.is_set():
      wrong = 'a second Hello' if hello else f'{message} before Hello'
      raise wire.MalformedMessage('wrong order', f'from {self.peer}: {wrong}')
    if hello:
      self._allowed = _FOLLOWING[type(message)]
      self._greeted.set()
    return message

  def settle(self, cause: str, reason: str) -> tuple[str, str]:
    """Returns what ended the session: the first cause set, or else this."""
    self.end(cause, reason)
    return self._end

  @property
  def greeted(self) -> bool:
    """True once a `Hello` was delivered."""
    return self._greeted.is_set()

  @property
  def is_open(self) -> bool:
    """True until something ends the session."""
    return self._end is None


def abort(context: grpc.ServicerContext, cause: str, reason: str) -> None:
  """Ends the call with a status that the client can show."""
  code = _CODES[cause]
  if code is not grpc.StatusCode.OK:  # abort() takes no OK.
    context.abort(code, reason[:_REASON_CHARS_MAX])


class MessageCounts(NamedTuple):
  """Counts of messages."""

  accepted: int  # Passed to `on_message`.
  refused: Mapping[str, int]  # By flaw, see `wire.FLAWS`.


class ControlServer(grpc.GenericRpcHandler):
  """A server that listens for learners.

  Args:
    bind: host:port; port 0 for a free one.
    on_message: called with each message, the `Hello` first; calls for one
      session are sequential, those for several concurrent.
    on_closed: called once for each session whose `Hello` was delivered, after
      its last message, with the reason.

  Raises:
    control_channel.BindFailed: the address is in use or not of this machine.
    addresses.HostUnknown: its host name does not resolve.
  """

  def __init__(
    self,
    bind: str,
    on_message: Callable[[ControlSession, wire.Message], None],
    on_closed: Callable[[ControlSession, str], None],
    limits: control_channel.ControlLimits = control_channel.DEFAULT,
    access: auth.Access = auth.OPEN,
  ):
    self._on_message = on_message
    self._on_closed = on_closed
    self._limits = limits
    self._access = access
    self._lock = threading.Lock()
    self._sessions: dict[ControlSession, threading.Thread] = {}
    self._ended: collections.Counter[str] = collections.Counter()
    self._accepted = 0
    self._refused: collections.Counter[str] = collections.Counter()
    self._closing = False
    self._server = control_channel.ListeningServer(
      bind,
      self,
      workers_max=limits.sessions_max + _SPARE_WORKERS,
      message_bytes_max=wire.MESSAGE_BYTES_MAX + _OVERSIZED_BYTES,
      access=access,
      options=(
        *control_channel.KEEPALIVE,
        ('grpc.http2.min_ping_interval_without_data_ms', 1_000),
      ),
    )
    self.address = self._server.address

  def ended(self) -> dict[str, int]:
    """Returns how many sessions have ended, by cause; includes refused ones."""
    with self._lock:
      return dict(self._ended)

  def heard(self) -> MessageCounts:
    """Returns the counts of messages so far; each message counts once."""
    with self._lock:
      return MessageCounts(self._accepted, dict(self._refused))

  def close(self) -> None:
    """Ends every session and every thread; idempotent.

    Do not call it from a callback: it waits for the callbacks to end.
    """
    with self._lock:
      self._closing = True
      sessions = dict(self._sessions)
    for session in sessions:
      session.close('the server closes')
    self._server.close(grace_s=self._limits.close_s)
    for reader in sessions.values():
      reader.join()

  def service(self, call):
    """Returns the handler of a call, for gRPC."""
    if call.method != control_channel.METHOD:
      return None
    return grpc.stream_stream_rpc_method_handler(self._converse)

  def _converse(
    self, requests: Iterator[bytes], context: grpc.ServicerContext
  ) -> Iterator[bytes]:
    if not self._access.admits(context.invocation_metadata()):
      self._refuse(context, 'token', 'the token is missing or wrong')
    session = ControlSession(context, self._limits)
    reader = threading.Thread(
      target=self._read, args=(session, requests), name='control session'
    )
    with self._lock:
      full = self._closing or not self._has_room()
      if not full:
        self._sessions[session] = reader
        reader.start()
    if full:
      self._refuse(context, 'full', f'{self._limits.sessions_max} sessions')
    context.send_initial_metadata(control_channel.ACCEPTED)
    yield from session.bodies()

  def _has_room(self) -> bool:
    """Returns True if there is room for one more session.

    If there is not, a session without a hello makes room, so that silent
    connections keep no learner out, however many they are. The oldest one of
    the machine with the most of them is ended.
    """
    open_ = [session for session in self._sessions if session.is_open]
    if len(open_) < self._limits.sessions_max:
      return True
    silent = [s for s in open_ if not s.greeted]  # The oldest first.
    if not silent:
      return False
    machines = collections.Counter(map(_machine, silent))
    oldest = max(silent, key=lambda s: machines[_machine(s)])
    oldest.end('crowded out', 'another came, and no hello from you yet')
    return True

  def _count(self, flaw: str | None) -> None:
    with self._lock:
      if flaw is None:
        self._accepted += 1
      else:
        self._refused[flaw] += 1

  def _read(self, session: ControlSession, requests: Iterator[bytes]) -> None:
    try:
      session.read(requests, self._on_message, self._count)
    finally:
      cause, reason = session.settle('failed', 'on_message raised')
      with self._lock:
        del self._sessions[session]
        self._ended[cause] += 1
      if session.greeted:
        self._on_closed(session, reason)

  def _refuse(
    self, context: grpc.ServicerContext, cause: str, reason: str
  ) -> None:
    with self._lock:
      self._ended[cause] += 1
    abort(context, cause, reason)


def _machine(session: ControlSession) -> str:
  """Returns gRPC's name of the peer's address, without the port."""
  return session.peer.rpartition(':')[0]
