# SPDX-License-Identifier: Apache-2.0
"""One learner's stream at the syncer: what it says, hears, and why it ends.

It has two threads: one of gRPC's pool sends, one of ours reads and makes all
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

_REASON_CHARS_MAX = 512  # It travels in a header.

# What opens a session, and what may follow it.
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
    self._allowed: tuple[type, ...] = _OPENING
    self._giving_up = threading.Timer(limits.close_s, context.cancel)
    self._giving_up.daemon = True
    if not context.add_callback(self._outbox.discard):
      self._outbox.discard()  # Ended before it began.

  def send(self, message: wire.Message) -> bool:
    """Queues `message`; whether the session was still open. Never waits.

    A reader that leaves `outgoing_max` messages waiting is cut off, and one
    for which a message would be larger than messages may be.
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
    """Ends the session after what is queued; the learner hears `reason`."""
    self.end('closed', reason)

  def end(self, cause: str, reason: str) -> None:
    """The same for any cause, one of `_CODES`; the first one counts."""
    with self._lock:
      if self._end is not None:
        return
      self._end = (cause, reason)
      self._giving_up.start()
    self._outbox.finish()

  def bodies(self) -> Iterator[bytes]:
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
    self.end(cause, reason)

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
    """What ended the session: the first cause that was set, else this one."""
    self.end(cause, reason)
    return self._end

  @property
  def greeted(self) -> bool:
    """Whether a `Hello` was handed over."""
    return self._greeted.is_set()

  @property
  def is_open(self) -> bool:
    """Whether nothing has ended it yet."""
    return self._end is None


def abort(context: grpc.ServicerContext, cause: str, reason: str) -> None:
  """Ends the call with a status that the client can show."""
  code = _CODES[cause]
  if code is not grpc.StatusCode.OK:  # abort() takes no OK.
    context.abort(code, reason[:_REASON_CHARS_MAX])
