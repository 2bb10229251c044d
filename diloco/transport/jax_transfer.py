# SPDX-License-Identifier: Apache-2.0
"""The data plane over jax.experimental.transfer, with safeguards.

Used directly, the library hangs for ever if a peer dies at the wrong moment,
lets one stalled peer block a whole server, and trusts every announced size.
Hence the following, each from an experiment on jax 0.10.2 and 0.12.0.1:

* One server per publisher; a stalled puller can only block its own.
* Addresses are IP literals: the library takes any name for 0.0.0.0.
* Port 0 everywhere: the puller binds its transport address for each connection,
  so that a fixed port aborts the process at the second one.
* A TCP probe before each connection: the library would retry for ever.
* Nothing blocks on an array: a pull polls it until its deadline, then poisons
  the connection. A buffer whose neighbour in the same pull failed never becomes
  ready, poisoned or not; so there is one buffer per pull.
* A connection on which anything failed is dropped; later pulls on it may hang.
* The publisher's answer names a second port of its own, for the bytes. If that
  refuses the puller, the puller's process is aborted. So a publisher closes its
  second port only once each puller has connected there; one that is killed
  before can take the puller with it.
* The size is offered as an array of its own and is compared first: pulling 12
  of 20 MiB "succeeds", other wrong sizes hang or fail, by chance.
* A withdrawn offer is replaced by an empty one, which answers with an error,
  and which expires: an entry that does not is kept for ever (0.2 KB each).
* Nothing says that an offer was pulled. An array that jax has not copied, since
  it is aligned, is let go of by then, at the next call of jax: so offers that
  are made late are made one after another as those before them vanish. A pull
  that comes earlier waits.
* A server that is dropped while it accepts crashes the process, and one that is
  dropped within a millisecond of its start leaks its listening sockets: it is
  only dropped once its event loop accepts nothing more (`listeners`).
"""

import contextlib
import datetime
import logging
import queue
import secrets
import threading
import time
import weakref

import jax
import numpy as np
from jax.experimental import transfer

from diloco.protocol.messages import Payload
from diloco.transport import data_plane, sockets

SCHEME = 'jax_transfer'
CHUNK_BYTES = 4 << 20  # Measured: fastest from 16 MiB up.
COPIES_MAX = 2  # As fast as 8; a server keeps 3 chunks a copy in memory.
CLOSE_S = 1.0
HANDSHAKE_S = 1.0  # For a puller to connect to the port for the bytes.
TOMBSTONE_S = 30.0  # How long a withdrawn handle is remembered.
SWEEP_S = 3600.0  # Only tidies the peer's table; clocks may differ by less.
AHEAD_BYTES_MAX = 16 << 20  # Made late and not pulled; or one that is larger.
ALIGNED_BYTES = 64  # What XLA on CPU devices does not copy.
POLL_MIN_S, POLL_MAX_S = 20e-6, 2e-3
_UUID_MASK = (1 << 63) - 1
_SIZE_BYTES = 8

# Two concurrently starting servers could not tell their ports apart.
_starting = threading.Lock()
_undroppable: list[transfer.TransferServer] = []


def _cpu() -> jax.Device:
  """Returns the host's device: TPU layouts must not reach the wire."""
  return jax.local_devices(backend='cpu')[0]


def _uuids(token: str, handle: int) -> tuple[int, int]:
  """Returns the library's names of an offer's size and of its bytes."""
  first = int(token, 16) + 2 * handle
  return first & _UUID_MASK, (first + 1) & _UUID_MASK


def _expiry(after_s: float) -> datetime.datetime:
  """Returns a deadline as naive local time, as the library expects it."""
  return datetime.datetime.now() + datetime.timedelta(seconds=after_s)


class _Server:
  """One TransferServer, and the ports that it listens on."""

  def __init__(self, host: str):
    client = _cpu().client
    local = sockets.join(host, 0)
    with _starting:
      before = sockets.shared_listening_ports()
      self.transfer = transfer.start_transfer_server(
        client,
        local,
        [local],  # Without it, the first remote pull aborts the process.
        max_num_parallel_copies=COPIES_MAX,
        transfer_size=CHUNK_BYTES,
      )
      ports = sockets.shared_listening_ports() - before
    self.port = sockets.split(self.transfer.address())[1]
    self._control, self._bulk = {self.port}, ports - {self.port}

  def stop(self) -> None:
    """Refuses new peers, waits a little for begun ones, then ends them all."""
    refusing = sockets.end(self._control, CLOSE_S)
    deadline = time.monotonic() + HANDSHAKE_S
    while time.monotonic() < deadline and sockets.count_accepted(
      self._control
    ) > sockets.count_accepted(self._bulk):
      time.sleep(POLL_MAX_S)
    if not sockets.end(self._bulk, CLOSE_S) or not refusing:
      # Dropping it could crash the process; kept, it costs two idle threads.
      logging.getLogger(__name__).warning(
        'the event loop of port %d hangs: kept', self.port
      )
      _undroppable.append(self.transfer)
    sockets.shut_accepted(self._control | self._bulk)

  def close(self) -> None:
    """Stops and drops the server."""
    self.stop()
    self.transfer = None


class JaxPublisher:
  """Offers to one peer, through a server of its own."""

  def __init__(self, host: str, open_ends: data_plane.OpenEnds):
    self._open_ends = open_ends
    self._lock = threading.Lock()
    self._server: _Server | None = _Server(host)
    # Of one that is made late, which must vanish when it is pulled, no arrays.
    self._offers: dict[int, tuple[jax.Array, ...]] = {}
    # No more than the handles of one donation.
    self._late: queue.SimpleQueue = queue.SimpleQueue()
    self._closed = threading.Event()
    self._maker: threading.Thread | None = None
    self._token = secrets.token_hex(8)
    self.address = str(
      sockets.PublisherAddress(SCHEME, host, self._server.port, self._token)
    )

  def offer(self, handle: int, data: data_plane.Data) -> None:
    data_plane.check_offer(handle, data)
    arrays = () if callable(data) else _placed(data)
    with self._lock:
      if self._server is None:
        raise data_plane.Closed(f'publisher {self.address} is closed')
      if handle in self._offers:
        raise ValueError(f'handle {handle} is in use at {self.address}')
      self._offers[handle] = arrays
      self._await(handle, arrays)
      if callable(data):
        self._late.put((handle, data))
        if self._maker is None:
          self._maker = threading.Thread(target=self._make_late, daemon=True)
          self._maker.start()

  def retire(self, handle: int) -> None:
    with self._lock:
      if self._server is not None and handle in self._offers:
        self._withdraw(handle)

  def close(self) -> None:
    self._open_ends.discard(self)
    self._closed.set()
    self._late.put(None)
    with self._lock:
      if self._server is None:
        return
      # First, or a pull in progress would be told that its offer is gone.
      self._server.stop()
      for handle in list(self._offers):
        self._withdraw(handle)
      server, self._server = self._server, None
    server.close()

  def _withdraw(self, handle: int) -> None:
    """Frees the bytes: deleting alone does not while the library has them."""
    arrays = self._offers.pop(handle)
    for uuid in _uuids(self._token, handle):
      self._server.transfer.await_pull(uuid, [], timeout=_expiry(TOMBSTONE_S))
    for array in arrays:
      array.delete()

  def _await(self, handle: int, arrays: tuple[jax.Array, ...]) -> None:
    for uuid, array in zip(_uuids(self._token, handle), arrays):
      self._server.transfer.await_pull(uuid, [array])

  def _make_late(self) -> None:
    """Makes offers in order, no more ahead of the pulls than fits."""
    ahead: list[weakref.ref] = []
    for handle, make in iter(self._late.get, None):
      while _nbytes_of(ahead) > AHEAD_BYTES_MAX:
        if self._closed.wait(POLL_MAX_S):
          return
        jax.device_put(np.zeros(_SIZE_BYTES), _cpu())
      try:
        data = _aligned(make())
      except data_plane.NotOffered:
        continue
      except Exception as error:  # noqa: BLE001 - ends this offer, not others.
        logging.getLogger(__name__).error(
          '%d is not offered: %r', handle, error
        )
        continue
      ahead.append(weakref.ref(data.base))
      arrays = _placed(data)
      with self._lock:
        if self._server is not None and handle in self._offers:
          self._await(handle, arrays)
      del data, arrays


def _placed(data: np.ndarray) -> tuple[jax.Array, jax.Array]:
  """Returns an offer's size and bytes as arrays on the host's device."""
  size = np.frombuffer(data.nbytes.to_bytes(_SIZE_BYTES, 'little'), np.uint8)
  return jax.block_until_ready(jax.device_put((size, data), _cpu()))


def _aligned(data: np.ndarray) -> np.ndarray:
  """Returns a copy that jax does not copy; its `base` lives as long as that."""
  whole = np.empty(data.nbytes + ALIGNED_BYTES, np.uint8)
  start = -whole.ctypes.data % ALIGNED_BYTES
  copy = whole[start : start + data.nbytes]
  copy[:] = data
  return copy


def _nbytes_of(refs: list[weakref.ref]) -> int:
  """Returns the bytes of the arrays that are still there."""
  there = (each() for each in refs)
  return sum(array.nbytes for array in there if array is not None)


class JaxFetcher:
  """Pulls from one publisher; concurrent pulls use separate connections."""

  def __init__(
    self,
    own: _Server,
    address: sockets.PublisherAddress,
    open_ends: data_plane.OpenEnds,
  ):
    self._open_ends = open_ends
    self._own = own
    self._address = address
    self._lock = threading.Lock()
    self._idle: list = []  # TransferConnections that never failed.
    self._closed = threading.Event()

  def pull(self, payload: Payload, timeout_s: float) -> np.ndarray:
    deadline = time.monotonic() + timeout_s
    origin = self._address.endpoint
    data_plane.check_request(payload, origin)
    size_uuid, data_uuid = _uuids(self._address.token, payload.handle)
    connection = self._idle_connection()
    if connection is None:
      data_plane.probe(self._address, deadline)
      connection = self._own.transfer.connect(origin)
    try:
      size = self._fetch(connection, size_uuid, _SIZE_BYTES, deadline)
      nbytes = int.from_bytes(size.tobytes(), 'little')
      data_plane.check_size(payload, nbytes, origin)
      data = self._fetch(connection, data_uuid, nbytes, deadline)
    except data_plane.TransferFailed:
      self._poison(connection)
      raise
    with self._lock:
      if not self._closed.is_set():
        self._idle.append(connection)
    data_plane.check_arrival(payload, data, origin)
    return data

  def close(self) -> None:
    self._open_ends.discard(self)
    self._closed.set()
    with self._lock:
      self._idle.clear()

  def _idle_connection(self):
    """Returns a connection that has served before; None if there is none."""
    with self._lock:
      if self._closed.is_set():
        raise data_plane.Closed(
          f'fetcher from {self._address.endpoint} is closed'
        )
      return self._idle.pop() if self._idle else None

  def _fetch(
    self, connection, uuid: int, nbytes: int, deadline: float
  ) -> np.ndarray:
    """Returns one buffer, as a read-only view of the array that holds it."""
    spec = jax.ShapeDtypeStruct(
      (nbytes,), np.uint8, sharding=jax.sharding.SingleDeviceSharding(_cpu())
    )
    try:
      [array] = connection.pull(uuid, [spec], timeout=_expiry(SWEEP_S))
      poll_s = POLL_MIN_S
      while not array.is_ready():
        if time.monotonic() > deadline:
          raise data_plane.TimedOut(
            f'{self._address.endpoint} did not send {nbytes} bytes in time'
          )
        if self._closed.wait(poll_s):
          raise data_plane.Closed(
            f'fetcher from {self._address.endpoint} was closed during a pull'
          )
        poll_s = min(2 * poll_s, POLL_MAX_S)
      return np.asarray(jax.block_until_ready(array))
    except jax.errors.JaxRuntimeError as error:
      raise _named(error, self._address.endpoint) from error

  def _poison(self, connection) -> None:
    """Makes the library give up everything it waits for."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # Dead already.
      connection._poison_connection()


def _named(error: Exception, origin: str) -> data_plane.TransferFailed:
  """Converts the library's error text to a `TransferFailed`."""
  text = str(error)
  if 'out of range' in text or 'deleted or donated' in text:
    return data_plane.NotOffered(f'offer withdrawn at {origin}: {text}')
  if 'slicing' in text or 'deleted before transfers' in text:
    return data_plane.WrongSize(f'{origin} sent another size: {text}')
  return data_plane.PeerLost(f'{origin}: {text}')


class JaxTransferPlane:
  """One server per publisher, and one more for all pulls of this process.

  Args:
    host: IP literal or name of the interface that peers connect to. There is
      neither encryption nor authentication: a private network only.
  """

  def __init__(self, host: str):
    self._host = sockets.routable(host)
    self._own = _Server(self._host)
    self._ends = data_plane.OpenEnds()

  def publisher(self, peer: str) -> JaxPublisher:
    return self._ends.add(JaxPublisher(self._host, self._ends))

  def fetcher(self, address: str) -> JaxFetcher:
    parsed = sockets.parse_publisher(address, SCHEME).resolved()
    return self._ends.add(JaxFetcher(self._own, parsed, self._ends))

  def close(self) -> None:
    self._ends.close_all()
    self._own.close()
