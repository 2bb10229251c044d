# SPDX-License-Identifier: Apache-2.0
"""The data plane over gRPC streams, for links without a private network.

A pull is one call: the publisher's token and the handle are sent as metadata,
so that no thread waits for a request; chunks of 1 MiB come back. The token in a
publisher's address keeps peers away from each other's offers; TLS and the run's
token (`access`) keep strangers out. Because of gRPC's flow control, a stalled
puller occupies one thread of the server's pool until the deadline of its call,
and nothing else.
"""

import re
import secrets
import threading
import time
from collections.abc import Iterator

import grpc
import grpc.experimental
import numpy as np

from diloco.protocol.messages import Payload
from diloco.transport import auth, control_channel, data_plane, sockets
from diloco.transport.data_plane import OfferTable

SCHEME = 'grpc'
CHUNK_BYTES = 1 << 20
MESSAGE_BYTES_MAX = CHUNK_BYTES + 1024
WORKERS_MAX = 64  # For a process that sends to few others.
PULLS_PER_PUBLISHER_MAX = 4  # A stalled peer must not take every worker.
_METHOD = '/diloco.DataPlane/Pull'
_PUBLISHER_KEY, _HANDLE_KEY = 'diloco-outlet', 'diloco-handle'
_HANDLE = re.compile(r'[0-9]{1,19}')


class GrpcPublisher(OfferTable):
  """Offers to one peer, behind a token that only the peer is told."""

  def __init__(self, plane: 'GrpcPlane', address: sockets.PublisherAddress):
    super().__init__(str(address))
    self._plane = plane
    self._token = address.token
    self._serving = threading.Lock()
    self._calls: set[grpc.ServicerContext] = set()

  def close(self) -> None:
    self._plane.forget(self._token)
    self.clear()
    with self._serving:
      calls = list(self._calls)
    for call in calls:
      call.cancel()

  def serve(
    self, handle: int, context: grpc.ServicerContext
  ) -> Iterator[bytes]:
    """Yields the chunks of an offer, which is used up from the first one on."""
    with self._serving:
      busy = len(self._calls) >= PULLS_PER_PUBLISHER_MAX
      if not busy:
        self._calls.add(context)
    if busy:
      context.abort(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f'{PULLS_PER_PUBLISHER_MAX} pulls of this publisher are under way',
      )
    try:
      data = self.take(handle)
      for start in range(0, data.nbytes, CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES].tobytes()
    # The address stays out of the text: it opens the publisher.
    except data_plane.TransferFailed:
      context.abort(grpc.StatusCode.NOT_FOUND, f'no offer {handle}')
    finally:
      with self._serving:
        self._calls.discard(context)


class GrpcFetcher:
  """Pulls from one publisher over a channel of its own."""

  def __init__(
    self,
    address: sockets.PublisherAddress,
    access: auth.Access,
    open_ends: data_plane.OpenEnds,
  ):
    self._access = access
    self._open_ends = open_ends
    self._address = address
    self._lock = threading.Lock()
    self._calls: set[grpc.Call] = set()
    self._closed = False
    self._channel = control_channel.channel(
      address.endpoint,
      message_bytes_max=MESSAGE_BYTES_MAX,
      access=access,
      tls_name=address.host,
      options=(
        ('grpc.keepalive_time_ms', 20_000),
        ('grpc.keepalive_timeout_ms', 10_000),
        # The thread that pulls reads; otherwise gRPC starts one for each pull.
        (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
      ),
    )
    self._pull = self._channel.unary_stream(_METHOD)

  def pull(self, payload: Payload, timeout_s: float) -> np.ndarray:
    deadline = time.monotonic() + timeout_s
    origin = self._address.endpoint
    data_plane.check_request(payload, origin)
    metadata = (
      *self._access.shown(),
      (_PUBLISHER_KEY, self._address.token),
      (_HANDLE_KEY, str(payload.handle)),
    )
    with self._lock:
      if self._closed:
        raise data_plane.Closed(f'fetcher from {origin} is closed')
      call = self._pull(b'', timeout=timeout_s, metadata=metadata)
      self._calls.add(call)
    data = np.empty(payload.nbytes, np.uint8)
    filled = 0
    try:
      for chunk in call:
        end = filled + len(chunk)
        if end > payload.nbytes:
          data_plane.check_size(payload, end, origin)
        data[filled:end] = np.frombuffer(chunk, np.uint8)
        filled = end
    except grpc.RpcError as error:
      raise self._named(error, filled, deadline) from error
    finally:
      call.cancel()
      with self._lock:
        self._calls.discard(call)
    data.flags.writeable = False
    data_plane.check_arrival(payload, data[:filled], origin)
    return data

  def close(self) -> None:
    self._open_ends.discard(self)
    with self._lock:
      if self._closed:
        return
      self._closed = True
      calls = list(self._calls)
    for call in calls:
      call.cancel()
    self._channel.close()

  def _named(
    self, error: grpc.RpcError, filled: int, deadline: float
  ) -> data_plane.TransferFailed:
    code, text = error.code(), error.details()
    origin = self._address.endpoint
    if self._closed:
      return data_plane.Closed(
        f'fetcher from {origin} was closed during a pull'
      )
    match code:
      case grpc.StatusCode.NOT_FOUND:
        return data_plane.NotOffered(f'{origin}: {text}')
      case grpc.StatusCode.FAILED_PRECONDITION:
        return data_plane.Unreachable(f'{origin}: {text}')
      case grpc.StatusCode.DEADLINE_EXCEEDED:
        return data_plane.TimedOut(f'{origin} stopped after {filled} bytes')
      case grpc.StatusCode.RESOURCE_EXHAUSTED:
        return data_plane.TimedOut(f'{origin} is busy: {text}')
      case grpc.StatusCode.UNAVAILABLE if not filled:
        # Distinguishes a dead peer from one that only cut this connection.
        try:
          data_plane.probe(self._address, deadline)
        except data_plane.TransferFailed as failed:
          return failed
        return data_plane.PeerLost(f'{origin} cut the connection: {text}')
    return data_plane.PeerLost(f'{origin} after {filled} bytes: {code} {text}')


class GrpcPlane(grpc.GenericRpcHandler):
  """One gRPC server for all publishers of this process, one channel per
  fetcher.

  Args:
    host: IP literal or name of the interface that peers connect to.
  """

  def __init__(
    self,
    host: str,
    access: auth.Access = auth.OPEN,
    workers_max: int = WORKERS_MAX,
  ):
    self._lock = threading.Lock()
    self._publishers: dict[str, GrpcPublisher] = {}
    self._fetchers = data_plane.OpenEnds()
    self._access = access
    self._server = control_channel.ListeningServer(
      sockets.join(sockets.routable(host), 0),
      self,
      workers_max=workers_max,
      message_bytes_max=MESSAGE_BYTES_MAX,
      access=access,
      options=(
        ('grpc.http2.min_ping_interval_without_data_ms', 5_000),
        ('grpc.keepalive_time_ms', 20_000),
        ('grpc.keepalive_timeout_ms', 10_000),
      ),
    )

  def publisher(self, peer: str) -> GrpcPublisher:
    host, port = sockets.split(self._server.address)
    token = secrets.token_hex(16)
    publisher = GrpcPublisher(
      self, sockets.PublisherAddress(SCHEME, host, port, token)
    )
    with self._lock:
      self._publishers[token] = publisher
    return publisher

  def fetcher(self, address: str) -> GrpcFetcher:
    parsed = sockets.parse_publisher(address, SCHEME).resolved()
    return self._fetchers.add(GrpcFetcher(parsed, self._access, self._fetchers))

  def forget(self, token: str) -> None:
    """Removes a closed publisher from the table."""
    with self._lock:
      self._publishers.pop(token, None)

  def close(self) -> None:
    self._fetchers.close_all()
    with self._lock:
      publishers = list(self._publishers.values())
    for publisher in publishers:
      publisher.close()
    self._server.close()

  def service(self, call):
    """Returns the handler of a call, for gRPC."""
    if call.method != _METHOD:
      return None
    return grpc.stream_stream_rpc_method_handler(self._serve)

  def _serve(
    self, requests: Iterator[bytes], context: grpc.ServicerContext
  ) -> Iterator[bytes]:
    metadata = dict(context.invocation_metadata())
    if not self._access.admits(context.invocation_metadata()):
      context.abort(
        grpc.StatusCode.UNAUTHENTICATED, 'the token is missing or wrong'
      )
    handle = metadata.get(_HANDLE_KEY, '')
    if not _HANDLE.fullmatch(handle):
      context.abort(grpc.StatusCode.INVALID_ARGUMENT, 'no handle')
    with self._lock:
      publisher = self._publishers.get(metadata.get(_PUBLISHER_KEY, ''))
    if publisher is None:
      context.abort(grpc.StatusCode.FAILED_PRECONDITION, 'no such publisher')
    return publisher.serve(int(handle), context)
