# SPDX-License-Identifier: Apache-2.0
"""Starts a gRPC server that either has its port to itself or says so."""

import errno
from concurrent import futures

import grpc

from diloco.transport import addresses


class BindFailed(OSError):
  """The address cannot be listened on, most often because it is in use."""


class ListeningServer:
  """A gRPC server with its threads; `address` is where it really listens."""

  def __init__(
    self,
    bind: str,
    calls: grpc.GenericRpcHandler,
    *,
    workers_max: int,
    message_bytes_max: int,
    credentials: grpc.ServerCredentials | None = None,
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
        ('grpc.so_reuseport', 0),  # Else two processes share one port.
        ('grpc.max_receive_message_length', message_bytes_max),
        ('grpc.max_send_message_length', message_bytes_max),
        *options,
      ),
      maximum_concurrent_rpcs=workers_max,
    )
    try:
      port = self._listen(addresses.join(host, port), credentials)
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
    """Ends every call, at the latest after the grace, and every thread."""
    self._server.stop(grace_s).wait()
    self._workers.shutdown(wait=True)

  def _listen(self, bind: str, credentials) -> int:
    if credentials is None:
      return self._server.add_insecure_port(bind)
    return self._server.add_secure_port(bind, credentials)


def channel(
  endpoint: str,
  *,
  message_bytes_max: int,
  credentials: grpc.ChannelCredentials | None = None,
  options: tuple[tuple[str, int | str], ...] = (),
) -> grpc.Channel:
  """A channel of its own to `endpoint` (IP literal and port)."""
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
  if credentials is None:
    return grpc.insecure_channel(target, options)
  return grpc.secure_channel(target, credentials, options)
