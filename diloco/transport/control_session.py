# SPDX-License-Identifier: Apache-2.0
"""One learner's stream at the syncer: its messages, and why it ends.

It has two threads: one of gRPC's pool sends; one of its own reads and makes all
callbacks, so that a session's messages, and its end, come in order.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from diloco.protocol import messages, shard_messages
from diloco.transport import control_limits, wire
from diloco.transport.outbox import Outbox

_REASON_CHARS_MAX = 512  # It is sent in a header.

# What starts a session, and what may follow it.
_FOLLOWING = {
  messages.Hello: messages.FROM_LEARNER,
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


class Session:
  """One learner's stream, made by the server.

  Attributes:
    peer: the other side's address, as gRPC writes it.
    bytes_sent, bytes_received: message bytes passed to and from gRPC.
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
      self.bytes_sent += len(body)
      yield body
    self._giving_up.cancel()
    if self._end is not None:
      abort(self._context, *self._end)

  def read(
    self,
    requests: Iterator[bytes],
    on_message: Callable[['Session', wire.Message], None],
    count: Callable[[str | None], None],
  ) -> None:
    """Delivers messages until the end, and sets its cause.

    It calls `count` for each: with None, or with the flaw that refused it.
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
    self.end(cause, reason)

  def _judged(self, body: bytes) -> wire.Message:
    """Returns the message in `body`; raises `Malformed` if it may not come
    now.
    """
    if self._end is not None:
      raise wire.Malformed('too late', f'from {self.peer}: after the end')
    if len(body) > self._limits.message_bytes_max:
      raise wire.Malformed(
        'oversized',
        f'from {self.peer}: {len(body)} bytes, at most '
        f'{self._limits.message_bytes_max}',
      )
    message = wire.decode(body, self._allowed, self.peer)
    hello = type(message) in _FOLLOWING
    if hello == self._greeted.is_set():
      wrong = 'a second Hello' if hello else f'{message} before Hello'
      raise wire.Malformed('wrong order', f'from {self.peer}: {wrong}')
    if hello:
      self._allowed = _FOLLOWING[type(message)]
      self._greeted.set()
    return message

  def settle(self, cause: str, reason: str) -> tuple[str, str]:
    """Returns what ended the session: the first cause set, otherwise this
    one.
    """
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
