# SPDX-License-Identifier: Apache-2.0
"""Starts a gRPC server that has its port to itself, or fails."""

import errno
from concurrent import futures

import grpc

from diloco.transport import addresses
from diloco.transport.access import Access

HANDSHAKE_S = 5.0
IDLE_S = 10.0  # An idle connection is closed; the next call opens one.
STREAMS_MAX = 8  # Concurrent calls of one connection.


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
    host, port = addresses.split(bind)
    host = addresses.resolve(host)
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
      port = self._listen(addresses.join(host, port), access.server)
    except RuntimeError as error:
      self._workers.shutdown()
      raise BindFailed(
        errno.EADDRINUSE,
        f'cannot listen on {bind}: the port is in use, or the address is not '
        f'one of this machine ({error})',
      ) from error
    self.address = addresses.join(host, port)
    self._server.start()

  def close(self, grace_s: float | None = None) -> None:
    """Ends every call, after the grace period at the latest, and every
    thread.
    """
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
  `tls_name` if that is None.
  """
  host, port = addresses.split(endpoint)
  family = 'ipv6' if ':' in host else 'ipv4'
  options = (
    ('grpc.use_local_subchannel_pool', 1),  # No connection is shared.
    ('grpc.enable_http_proxy', 0),
    ('grpc.enable_retries', 0),
    ('grpc.initial_reconnect_backoff_ms', 100),
    # Despite its name, how long one attempt to connect may take.
    ('grpc.min_reconnect_backoff_ms', 20_000),
    ('grpc.max_reconnect_backoff_ms', 1000),
    ('grpc.max_receive_message_length', message_bytes_max),
    ('grpc.max_send_message_length', message_bytes_max),
    *options,
  )
  target = f'{family}:{addresses.join(host, port)}'
  if access.channel is None:
    return grpc.insecure_channel(target, options)
  named = ('grpc.ssl_target_name_override', access.tls_name or tls_name)
  return grpc.secure_channel(target, access.channel, (*options, named))
