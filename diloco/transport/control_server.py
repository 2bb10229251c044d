# SPDX-License-Identifier: Apache-2.0
"""The syncer's end of the control plane: a stream for each learner.

Each session has two threads: one of gRPC's pool sends, one of ours reads and
makes all callbacks, so that a session's messages, and its end, come in order.
"""

import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import grpc

from diloco.protocol import messages
from diloco.transport import access as access_lib
from diloco.transport import control_limits, listen, wire
from diloco.transport.outbox import Outbox

_SPARE_WORKERS = 16  # For who is refused, and for sessions that are ending.
# So much above the limit gRPC hands over, so that it is refused by name; what
# is larger ends the session as 'lost'.
_OVERSIZED_BYTES = 1 << 16
_STREAMS_MAX = 8  # Of one connection; a learner needs one.
_IDLE_S = 10.0  # A connection without a session is closed.
_REASON_CHARS_MAX = 512  # It travels in a header.

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


@dataclasses.dataclass(frozen=True)
class Tally:
  """What became of every message that has come.

  Attributes:
    accepted: those that were handed to `on_message`.
    refused: the others, by flaw (`wire.FLAWS`).
  """

  accepted: int
  refused: Mapping[str, int]


class Session:
  """One learner's stream; made by the server.

  Attributes:
    peer: the other side's address, as gRPC writes it.
    bytes_sent, bytes_received: bodies of messages handed to and by gRPC.
  """

  def __init__(
    self, context: grpc.ServicerContext, limits: control_limits.ControlLimits
  ):
    self.peer = context.peer()
    self.bytes_sent = 0
    self.bytes_received = 0
    self._context = context
    self._limits = limits
    self._outbox = Outbox(limits.outgoing_max)
    self._lock = threading.Lock()
    self._end: tuple[str, str] | None = None  # Cause and reason.
    self._greeted = threading.Event()
    self._giving_up = threading.Timer(limits.close_s, context.cancel)
    self._giving_up.daemon = True
    if not context.add_callback(self._outbox.discard):
      self._outbox.discard()  # Ended before it began.

  def send(self, message: wire.Message) -> bool:
    """Queues `message`; whether the session was still open. Never waits.

    A reader that leaves `outgoing_max` messages waiting is cut off.
    """
    try:
      return self._outbox.put(wire.encode(message))
    except queue.Full:
      self._close(
        'overflow', f'{self._limits.outgoing_max} messages are waiting'
      )
      self._outbox.discard()
      return False

  def close(self, reason: str) -> None:
    """Ends the session after what is queued; the learner hears `reason`."""
    self._close('closed', reason)

  def _close(self, cause: str, reason: str) -> None:
    with self._lock:
      if self._end is not None:
        return
      self._end = (cause, reason)
      self._giving_up.start()
    self._outbox.finish()

  def _bodies(self) -> Iterator[bytes]:
    """Runs on gRPC's thread: sends what is queued, then says why it ends."""
    deadline = time.monotonic() + self._limits.handshake_s
    while True:
      left_s = None
      if not self._greeted.is_set():
        left_s = max(0.0, deadline - time.monotonic())
      try:
        body = self._outbox.take(left_s)
      except queue.Empty:
        if not self._greeted.is_set():
          self._close(
            'handshake', f'no hello within {self._limits.handshake_s} s'
          )
        continue
      if body is None:
        break
      self.bytes_sent += len(body)
      yield body
    self._giving_up.cancel()
    if self._end is not None:
      _abort(self._context, *self._end)

  def _read(
    self,
    requests: Iterator[bytes],
    on_message: Callable[['Session', wire.Message], None],
    count: Callable[[str | None], None],
  ) -> None:
    """Hands over messages until the end, whose cause it sets.

    Calls `count` for each: with None, or with the flaw that refused it.
    """
    cause, reason = 'left', 'the learner ended the stream'
    try:
      for body in requests:
        self.bytes_received += len(body)
        message = self._judged(body)
        count(None)
        on_message(self, message)
    except wire.Malformed as error:
      cause, reason = 'malformed', str(error)
      count(error.flaw)
    except grpc.RpcError:
      cause, reason = 'lost', f'the connection to {self.peer} was lost'
    self._close(cause, reason)

  def _judged(self, body: bytes) -> wire.Message:
    """The message in `body`; raises `Malformed` where it may not come now."""
    if self._end is not None:
      raise wire.Malformed('too late', f'from {self.peer}: after the end')
    if len(body) > self._limits.message_bytes_max:
      raise wire.Malformed(
        'oversized',
        f'from {self.peer}: {len(body)} bytes, at most '
        f'{self._limits.message_bytes_max}',
      )
    message = wire.decode(body, messages.FROM_LEARNER, self.peer)
    hello = isinstance(message, messages.Hello)
    if hello == self._greeted.is_set():
      wrong = 'a second Hello' if hello else f'{message} before Hello'
      raise wire.Malformed('wrong order', f'from {self.peer}: {wrong}')
    if hello:
      self._greeted.set()
    return message

  def _settle(self, cause: str, reason: str) -> tuple[str, str]:
    """What ended the session: the first cause that was set, else this one."""
    self._close(cause, reason)
    return self._end

  @property
  def _was_announced(self) -> bool:
    return self._greeted.is_set()

  @property
  def _is_open(self) -> bool:
    return self._end is None


class ControlServer(grpc.GenericRpcHandler):
  """Listens for learners.

  Args:
    bind: host:port; port 0 for a free one.
    on_message: called with each message, the `Hello` first; the calls for one
      session come one after another, those for several at the same time.
    on_closed: called once for each session whose `Hello` was handed over,
      after its last message, with the reason.
    limits: see there.
    access: what each learner must show.

  Raises:
    listen.BindFailed: the address is in use or not of this machine.
    addresses.HostUnknown: its host name does not resolve.
  """

  def __init__(
    self,
    bind: str,
    on_message: Callable[[Session, wire.Message], None],
    on_closed: Callable[[Session, str], None],
    limits: control_limits.ControlLimits = control_limits.DEFAULT,
    access: access_lib.Access = access_lib.OPEN,
  ):
    self._on_message = on_message
    self._on_closed = on_closed
    self._limits = limits
    self._access = access
    self._lock = threading.Lock()
    self._sessions: dict[Session, threading.Thread] = {}
    self._ended: collections.Counter[str] = collections.Counter()
    self._accepted = 0
    self._refused: collections.Counter[str] = collections.Counter()
    self._closing = False
    self._server = listen.ListeningServer(
      bind,
      self,
      workers_max=limits.sessions_max + _SPARE_WORKERS,
      message_bytes_max=limits.message_bytes_max + _OVERSIZED_BYTES,
      access=access,
      options=(
        *limits.channel_options(),
        ('grpc.http2.min_ping_interval_without_data_ms', 1_000),
        ('grpc.max_concurrent_streams', _STREAMS_MAX),
        ('grpc.max_connection_idle_ms', int(_IDLE_S * 1000)),
      ),
    )
    self.address = self._server.address

  def ended(self) -> dict[str, int]:
    """How many sessions ended so far, by cause; refused ones included."""
    with self._lock:
      return dict(self._ended)

  def heard(self) -> Tally:
    """What became of the messages so far; each is in it once."""
    with self._lock:
      return Tally(self._accepted, dict(self._refused))

  def close(self) -> None:
    """Ends every session and every thread; idempotent.

    Not to be called from a callback: it waits for the callbacks to end.
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
    """gRPC asks here who answers a call."""
    if call.method != control_limits.METHOD:
      return None
    return grpc.stream_stream_rpc_method_handler(self._converse)

  def _converse(
    self, requests: Iterator[bytes], context: grpc.ServicerContext
  ) -> Iterator[bytes]:
    self._check_token(context)
    session = Session(context, self._limits)
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
    context.send_initial_metadata(control_limits.ACCEPTED)
    yield from session._bodies()

  def _has_room(self) -> bool:
    """Whether one more session may be; who said no hello yet makes room.

    So connections that stay silent keep nobody out, however many they are.
    The oldest goes, of the machine that has most of them.
    """
    open_ = [session for session in self._sessions if session._is_open]
    if len(open_) < self._limits.sessions_max:
      return True
    silent = [s for s in open_ if not s._was_announced]  # The oldest first.
    if not silent:
      return False
    machines = collections.Counter(map(_machine, silent))
    oldest = max(silent, key=lambda s: machines[_machine(s)])
    oldest._close('crowded out', 'another came, and no hello from you yet')
    return True

  def _count(self, flaw: str | None) -> None:
    with self._lock:
      if flaw is None:
        self._accepted += 1
      else:
        self._refused[flaw] += 1

  def _read(self, session: Session, requests: Iterator[bytes]) -> None:
    try:
      session._read(requests, self._on_message, self._count)
    finally:
      cause, reason = session._settle('failed', 'on_message raised')
      with self._lock:
        del self._sessions[session]
        self._ended[cause] += 1
      if session._was_announced:
        self._on_closed(session, reason)

  def _check_token(self, context: grpc.ServicerContext) -> None:
    if not self._access.admits(context.invocation_metadata()):
      self._refuse(context, 'token', 'the token is missing or wrong')

  def _refuse(
    self, context: grpc.ServicerContext, cause: str, reason: str
  ) -> None:
    with self._lock:
      self._ended[cause] += 1
    _abort(context, cause, reason)


def _machine(session: Session) -> str:
  """Of the peer: gRPC's name of its address, without the port."""
  return session.peer.rpartition(':')[0]


def _abort(context: grpc.ServicerContext, cause: str, reason: str) -> None:
  """Ends the call with a status that the client can show."""
  code = _CODES[cause]
  if code is not grpc.StatusCode.OK:  # abort() takes no OK.
    context.abort(code, reason[:_REASON_CHARS_MAX])
