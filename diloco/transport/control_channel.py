# SPDX-License-Identifier: Apache-2.0
"""Limits, servers and queues of the control plane, shared by both sides."""

import collections
import dataclasses
import errno
import queue
import threading
from concurrent import futures

import grpc

from diloco.transport import sockets
from diloco.transport.auth import Access

METHOD = '/diloco.ControlPlane/Converse'
# Sent before all messages: a refused call has headers, too.
ACCEPTED = (('diloco-session', 'accepted'),)
HANDSHAKE_S = 5.0
IDLE_S = 10.0  # An idle connection is closed; the next call opens one.
STREAMS_MAX = 8  # Concurrent calls of one connection.


KEEPALIVE = (
  ('grpc.keepalive_time_ms', 10_000),  # Of silence, before it is probed.
  # A process that is stopped for a shorter time keeps its connection.
  ('grpc.keepalive_timeout_ms', 20_000),
  ('grpc.http2.max_pings_without_data', 0),
  ('grpc.http2.max_ping_strikes', 0),
)


@dataclasses.dataclass(frozen=True)
class ControlLimits:
  """Limits per server and session; all are positive.

  Attributes:
    sessions_max: learners that may be connected at once.
    outgoing_max: messages that wait for a slow reader before it is cut off.
    handshake_s: time for a session to say hello.
    close_s: time for a closed session to receive the reason.
  """

  sessions_max: int = 64
  outgoing_max: int = 8192
  handshake_s: float = 5.0
  close_s: float = 1.0


DEFAULT = ControlLimits()


class BindFailed(OSError):
  """The address cannot be listened on, most often because it is in use."""


class ListeningServer:
  """A gRPC server with its threads; `address` is where it really listens.

  Connections that stay silent, or make no call, are closed: silence occupies no
  socket for long.
  """

  def __init__(
    self,
    bind: str,
    calls: grpc.GenericRpcHandler,
    *,
    workers_max: int,
    message_bytes_max: int,
    access: Access,
    options: tuple[tuple[str, int], ...] = (),
  ):
    host, port = sockets.split(bind)
    host = sockets.resolve(host)
    self._workers = futures.ThreadPoolExecutor(
      workers_max, thread_name_prefix='grpc'
    )
    self._server = grpc.server(
      self._workers,
      handlers=(calls,),
      options=(
        ('grpc.so_reuseport', 0),  # Otherwise two processes share a port.
        # For TLS and HTTP/2 together.
        ('grpc.server_handshake_timeout_ms', int(HANDSHAKE_S * 1000)),
        ('grpc.max_connection_idle_ms', int(IDLE_S * 1000)),
        ('grpc.max_concurrent_streams', STREAMS_MAX),
        ('grpc.max_receive_message_length', message_bytes_max),
        ('grpc.max_send_message_length', message_bytes_max),
        *options,
      ),
      maximum_concurrent_rpcs=workers_max,
    )
    try:
      port = self._listen(sockets.join(host, port), access.server)
    except RuntimeError as error:
      self._workers.shutdown()
      raise BindFailed(
        errno.EADDRINUSE,
        f'cannot listen on {bind}: the port is in use, or the address is not '
        f'one of this machine ({error})',
      ) from error
    self.address = sockets.join(host, port)
    self._server.start()

  def close(self, grace_s: float | None = None) -> None:
    """Ends every call and thread, after the grace period at the latest."""
    self._server.stop(grace_s).wait()
    self._workers.shutdown(wait=True)

  def _listen(
    self, bind: str, credentials: grpc.ServerCredentials | None
  ) -> int:
    if credentials is None:
      return self._server.add_insecure_port(bind)
    return self._server.add_secure_port(bind, credentials)


def channel(
  endpoint: str,
  *,
  message_bytes_max: int,
  access: Access,
  tls_name: str,
  options: tuple[tuple[str, int | str], ...] = (),
) -> grpc.Channel:
  """Opens a channel of its own to `endpoint` (IP literal and port).

  With TLS, the certificate found there must hold `access.tls_name`, or
  `tls_name` if that is None. It goes through `access.proxy`, if there is one.
  """
  host, port = sockets.split(endpoint)
  family = 'ipv6' if ':' in host else 'ipv4'
  options = (
    ('grpc.use_local_subchannel_pool', 1),  # No connection is shared.
    *_proxy_options(access.proxy),
    ('grpc.enable_retries', 0),
    ('grpc.initial_reconnect_backoff_ms', 100),
    # Despite its name, how long one attempt to connect may take.
    ('grpc.min_reconnect_backoff_ms', 20_000),
    ('grpc.max_reconnect_backoff_ms', 1000),
    ('grpc.max_receive_message_length', message_bytes_max),
    ('grpc.max_send_message_length', message_bytes_max),
    *options,
  )
  target = f'{family}:{sockets.join(host, port)}'
  if access.channel is None:
    return grpc.insecure_channel(target, options)
  named = ('grpc.ssl_target_name_override', access.tls_name or tls_name)
  return grpc.secure_channel(target, access.channel, (*options, named))


def _proxy_options(proxy: str) -> tuple[tuple[str, int | str], ...]:
  """Returns the options that name a proxy, or rule out the environment's."""
  if not proxy:
    return (('grpc.enable_http_proxy', 0),)
  return ('grpc.enable_http_proxy', 1), ('grpc.http_proxy', f'http://{proxy}')


# A bounded queue of the messages to be sent on one stream.
#
# Bounded, so that a slow reader cannot grow it, and without blocking, so that a
# stopped one cannot stop the sender.


class Outbox:
  """A bounded queue with two ways to end: drained, or at once."""

  def __init__(self, bodies_max: int):
    self._bodies_max = bodies_max
    self._bodies: collections.deque[bytes] = collections.deque()
    self._changed = threading.Condition()
    self._finished = False

  def put(self, body: bytes) -> bool:
    """Queues `body`; returns False if the queue is finished.

    Raises:
      queue.Full: the other side has not taken `bodies_max` bodies.
    """
    with self._changed:
      if self._finished:
        return False
      if len(self._bodies) >= self._bodies_max:
        raise queue.Full
      self._bodies.append(body)
      self._changed.notify()
    return True

  def finish(self) -> None:
    """Accepts nothing more; what is queued is still handed out."""
    with self._changed:
      self._finished = True
      self._changed.notify_all()

  def discard(self) -> None:
    """Finishes, and drops what is queued."""
    with self._changed:
      self._bodies.clear()
      self._finished = True
      self._changed.notify_all()

  def take(self, timeout_s: float | None = None) -> bytes | None:
    """Returns the next body; None once finished and empty.

    Raises:
      queue.Empty: nothing came in time.
    """
    with self._changed:
      if not self._changed.wait_for(
        lambda: self._bodies or self._finished, timeout_s
      ):
        raise queue.Empty
      return self._bodies.popleft() if self._bodies else None
