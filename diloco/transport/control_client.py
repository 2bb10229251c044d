# SPDX-License-Identifier: Apache-2.0
"""The client of the control plane, used by learners and by shards."""

import queue
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from diloco.protocol import messages
from diloco.transport import auth, control_channel, sockets, wire
from diloco.transport.control_channel import Outbox

CLOSED_HERE = 'closed here'


class ConnectFailed(ConnectionError):
  """The server could not be reached, or did not accept this process."""


class NotAdmitted(ConnectFailed):
  """The server requires another token: retrying is useless."""


class ControlClient:
  """One connection; to reconnect, make another client.

  Args:
    on_message: called with each message, one after another, on a thread of the
      transport.
    on_closed: called once, after the last message, if `connect` succeeded.
    heard: the kinds of messages that may come: the syncer's to a learner, or
      the leader's to a shard.

  Raises:
    addresses.BadAddress: `address` is not host:port.
  """

  def __init__(
    self,
    address: str,
    on_message: Callable[[wire.Message], None],
    on_closed: Callable[[str], None],
    limits: control_channel.ControlLimits = control_channel.DEFAULT,
    access: auth.Access = auth.OPEN,
    heard: tuple[type, ...] = messages.FROM_SYNCER,
  ):
    self._address = address
    self._host, self._port = sockets.split(address)
    self._on_message = on_message
    self._on_closed = on_closed
    self._limits = limits
    self._access = access
    self._heard = heard
    self._outbox = Outbox(limits.outgoing_max)
    self._lock = threading.Lock()
    self._reason: str | None = None  # Reason of the end, if it began here.
    self._answered = threading.Event()
    self._connected = False
    self._admitted = True
    self._call: grpc.Call | None = None
    self._reader: threading.Thread | None = None

  def connect(self, timeout_s: float) -> None:
    """Opens the stream; returns once the server has accepted it.

    Raises:
      addresses.HostUnknown: the host name does not resolve.
      ConnectFailed: no server listens, answers in time, or has room.
      NotAdmitted: the server requires another token.
    """
    deadline = time.monotonic() + timeout_s
    if self._call is not None:
      raise RuntimeError('connect() is for once; make another client')
    host = sockets.resolve(self._host)
    try:
      sockets.probe(host, self._port, timeout_s)
    except OSError as error:
      raise ConnectFailed(
        f'no process listens at {self._address}: {error}'
      ) from error
    channel = control_channel.channel(
      sockets.join(host, self._port),
      message_bytes_max=wire.MESSAGE_BYTES_MAX,
      access=self._access,
      tls_name=self._host,
      options=control_channel.KEEPALIVE,
    )
    converse = channel.stream_stream(control_channel.METHOD)
    self._call = converse(self._bodies(), metadata=self._access.shown())
    if not self._call.add_callback(self._outbox.discard):
      self._outbox.discard()
    self._reader = threading.Thread(
      target=self._read, args=(channel,), name='control client'
    )
    self._reader.start()
    if not self._answered.wait(max(0.0, deadline - time.monotonic())):
      self._give_up(f'no answer within {timeout_s} s')
      self._reader.join()
    if not self._admitted:
      raise NotAdmitted(f'{self._address}: {self._reason}')
    if not self._connected:
      raise ConnectFailed(f'{self._address}: {self._reason}')

  def send(self, message: wire.Message) -> bool:
    """Queues `message`; returns True if the connection was open. Never blocks.

    If the server leaves `outgoing_max` messages waiting, it is given up.
    """
    try:
      return self._outbox.put(wire.encode(message))
    except queue.Full:
      self._give_up(f'{self._limits.outgoing_max} messages are waiting')
      return False

  def close(self) -> None:
    """Sends what is queued, ends the connection and its threads; idempotent.

    It waits at most `close_s` for a server that does not read.
    """
    if self._reader is None:
      self._outbox.discard()
      return
    with self._lock:
      self._reason = self._reason or CLOSED_HERE
    self._outbox.finish()
    if threading.current_thread() is self._reader:
      self._call.cancel()  # From a callback: the thread ends after it.
      return
    self._reader.join(self._limits.close_s)
    self._call.cancel()
    self._reader.join()

  def _give_up(self, reason: str) -> None:
    with self._lock:
      self._reason = self._reason or reason
    self._outbox.discard()
    self._call.cancel()

  def _bodies(self) -> Iterator[bytes]:
    """Yields the queued messages on gRPC's thread, until the outbox ends."""
    while (body := self._outbox.take()) is not None:
      yield body

  def _read(self, channel: grpc.Channel) -> None:
    reason = 'on_message raised'
    try:
      reason = self._read_messages()
    except grpc.RpcError as error:
      reason = f'{error.code().name}: {error.details()}'
      self._admitted = error.code() is not grpc.StatusCode.UNAUTHENTICATED
    finally:
      with self._lock:
        self._reason = reason = self._reason or reason
      self._outbox.discard()
      channel.close()
      self._answered.set()
      if self._connected:
        self._on_closed(reason)

  def _read_messages(self) -> str:
    """Delivers messages until the stream ends; returns the reason."""
    headers = self._call.initial_metadata()  # Waits for the server.
    if set(control_channel.ACCEPTED) <= {tuple(pair) for pair in headers}:
      self._connected = True
      self._answered.set()
    try:
      for body in self._call:
        message = wire.decode(body, self._heard, self._address)
        self._on_message(message)
    except wire.MalformedMessage as error:
      return str(error)
    return 'the server ended the stream'
