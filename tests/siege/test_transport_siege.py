# SPDX-License-Identifier: Apache-2.0
"""Peers that speak no gRPC, half of it, too slowly, or too often: they are
gone after a while, and an honest session beside them is answered."""

import contextlib
import dataclasses
import socket
import statistics
import threading
import time
import zlib

import grpc
import numpy as np
import pytest

from diloco.protocol import messages
from diloco.transport import auth, control_channel, grpc_transfer, sockets, wire
from diloco.transport.control_client import ConnectFailed
from tests.siege import small_syncer
from tests.siege.small_syncer import GoodLearner, SmallSyncer
from tests.transport import credentials
from tests.waiting import until

pytestmark = pytest.mark.beside

HANDSHAKE_S = 1.0
GONE_S = 60.0
SOCKETS = 50
SILENT = 10
IDLE = 1000
OWN_CONNECTION = (('grpc.use_local_subchannel_pool', 1),)
PREFACE = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'
SETTINGS = bytes(3) + b'\x04' + bytes(5)
ACK = bytes(3) + b'\x04\x01' + bytes(4)  # Of the server's settings.
CLIENT_HELLO = b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03'  # Its start.
OPENINGS = {
  'silence': b'',
  'zeros': bytes(64),
  'noise': bytes(range(256)) * 16,
  'http 1': b'GET / HTTP/1.1\r\nHost: syncer\r\n\r\n',
  'half a preface': PREFACE[:10],
  'preface without settings': PREFACE,
  'half a client hello': CLIENT_HELLO,
  'frame of 16 MiB': PREFACE + b'\xff\xff\xff\x00\x00' + bytes(4),
}


@pytest.fixture(params=['plain', 'tls'])
def siege(request, tmp_path, monkeypatch):
  """A server, and an honest session of it."""
  monkeypatch.setattr(control_channel, 'HANDSHAKE_S', HANDSHAKE_S)
  member = auth.OPEN
  if request.param == 'tls':
    member = credentials.read(credentials.copied(tmp_path))
  with (
    contextlib.closing(SmallSyncer(access=member)) as syncer,
    contextlib.closing(_good(syncer.address, member)) as good,
  ):
    yield syncer, good


def _good(address: str, member: auth.Access) -> GoodLearner:
  """Its own handshake may take longer than `HANDSHAKE_S`, too."""
  give_up_s = time.monotonic() + GONE_S
  while True:
    try:
      return GoodLearner(address, access=member)
    except ConnectFailed:
      if time.monotonic() >= give_up_s:
        raise


@pytest.mark.parametrize('opening', OPENINGS)
def test_siege_by_what_is_no_grpc(siege, opening):
  """The server hangs up, even on a peer that never says another byte."""
  syncer, good = siege
  with contextlib.ExitStack() as stack:
    strangers = [
      stack.enter_context(stranger(syncer.address, OPENINGS[opening]))
      for _ in range(SOCKETS)
    ]
    with small_syncer.stepping(good):
      for each in strangers:
        hung_up(each)
  good.step()
  assert syncer.server.ended() == {}
  assert syncer.server.heard().refused == {}
  assert statistics.median(good.answers_s) < HANDSHAKE_S + 5.0


def test_siege_of_the_control_plane_by_idle_connections(monkeypatch):
  monkeypatch.setattr(control_channel, 'IDLE_S', HANDSHAKE_S)
  with (
    contextlib.closing(SmallSyncer()) as syncer,
    contextlib.closing(GoodLearner(syncer.address)) as good,
    idle_strangers(syncer.address) as strangers,
  ):
    with small_syncer.stepping(good):
      for each in strangers:
        hung_up(each)
    good.step()


def test_siege_of_the_data_plane_by_idle_connections(monkeypatch):
  """A thousand, half again as many as one process may open by default."""
  monkeypatch.setattr(control_channel, 'IDLE_S', HANDSHAKE_S)
  data = np.arange(100, dtype=np.uint8)
  found = messages.Payload(1, 'f32', data.nbytes, zlib.crc32(data))
  with (
    contextlib.closing(grpc_transfer.GrpcPlane('127.0.0.1')) as plane,
    contextlib.closing(grpc_transfer.GrpcPlane('127.0.0.1')) as puller,
  ):
    publisher = plane.publisher('peer')
    fetcher = puller.fetcher(publisher.address)
    place = sockets.parse_publisher(publisher.address, grpc_transfer.SCHEME)
    with idle_strangers(place.endpoint) as strangers:
      publisher.offer(1, data)
      np.testing.assert_array_equal(fetcher.pull(found, GONE_S), data)
      for each in strangers:
        hung_up(each)
    # The fetcher's own connection was idle as long: it comes back by itself.
    publisher.offer(2, data)
    again = dataclasses.replace(found, handle=2)
    np.testing.assert_array_equal(fetcher.pull(again, GONE_S), data)


@pytest.mark.parametrize('siege', ['plain'], indirect=True)
def test_siege_by_a_byte_now_and_then(siege):
  """The handshake has one deadline, not one per byte."""
  syncer, good = siege
  with stranger(syncer.address, b'') as slow:
    slow.settimeout(HANDSHAKE_S / 10)
    give_up_s = time.monotonic() + GONE_S
    with contextlib.suppress(ConnectionError):
      while time.monotonic() < give_up_s:
        slow.sendall(PREFACE[:1])
        with contextlib.suppress(TimeoutError):
          if not slow.recv(1 << 12):
            break
    assert time.monotonic() < give_up_s
  good.step()


def test_siege_by_a_message_that_never_ends():
  """A whole handshake, then a byte of the hello now and then."""
  limits = control_channel.ControlLimits(handshake_s=HANDSHAKE_S)
  with contextlib.closing(SmallSyncer(limits=limits)) as syncer:
    call = PREFACE + SETTINGS + _headers(syncer.address)
    with stranger(syncer.address, call + _data(b'\0\0\0\x03\xe8')) as slow:
      slow.settimeout(HANDSHAKE_S / 10)
      give_up_s = time.monotonic() + GONE_S
      while 'handshake' not in syncer.server.ended():
        assert time.monotonic() < give_up_s
        slow.sendall(_data(b'x'))
        with contextlib.suppress(TimeoutError):
          slow.recv(1 << 12)
    assert syncer.server.ended() == {'handshake': 1}


def test_siege_by_sessions_that_say_nothing():
  """Silent sessions make room for later ones; those with a hello stay."""
  limits = control_channel.ControlLimits(
    sessions_max=4, handshake_s=10 * GONE_S
  )
  with (
    contextlib.closing(SmallSyncer(limits=limits)) as syncer,
    contextlib.ExitStack() as stack,
  ):
    good, over = [], threading.Event()
    stack.callback(over.set)
    for learner in (9, 10, 11):
      for _ in range(SILENT):
        channel = stack.enter_context(
          grpc.insecure_channel(syncer.address, OWN_CONNECTION)
        )
        converse = channel.stream_stream(control_channel.METHOD)
        stack.callback(converse(_silence(over)).cancel)
      # All but the free places; a place more was lost to each good learner.
      crowded = SILENT - 4 + (SILENT + 1) * len(good)
      until(
        lambda n=crowded: syncer.server.ended().get('crowded out', 0) >= n,
        GONE_S,
        f'{crowded} are crowded out',
      )
      late = GoodLearner(syncer.address, learner)
      stack.enter_context(contextlib.closing(late))
      good.append(late)
      for each in good:
        each.step()
    assert set(syncer.server.ended()) == {'crowded out'}


def test_siege_by_huge_messages():
  """The library drops huge messages as soon as it reads how long they are."""
  with (
    contextlib.closing(SmallSyncer()) as syncer,
    contextlib.closing(GoodLearner(syncer.address)) as good,
    small_syncer.stepping(good),
    grpc.insecure_channel(
      syncer.address, (('grpc.max_send_message_length', -1),)
    ) as channel,
  ):
    converse = channel.stream_stream(control_channel.METHOD)
    for _ in range(20):
      body = bytes(8 * wire.MESSAGE_BYTES_MAX)
      with pytest.raises(grpc.RpcError) as caught:
        next(converse(iter([body])))
      # UNAVAILABLE where the reset of the stream overtakes its status.
      assert caught.value.code() in (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
      )


def _silence(over: threading.Event):
  """Requests that never come, until the test is over."""
  over.wait(GONE_S)
  yield from ()


def stranger(address: str, opening: bytes) -> socket.socket:
  host, _, port = address.rpartition(':')
  connection = socket.create_connection((host, int(port)), GONE_S)
  connection.sendall(opening)
  return connection


@contextlib.contextmanager
def idle_strangers(address: str):
  """A thousand that shake hands as they should, and make no call."""
  with contextlib.ExitStack() as stack:
    yield [
      stack.enter_context(stranger(address, PREFACE + SETTINGS + ACK))
      for _ in range(IDLE)
    ]


def hung_up(connection: socket.socket):
  """Waits until the server has closed the connection; `GONE_S` at most."""
  with contextlib.suppress(ConnectionError):
    while connection.recv(1 << 12):
      pass


# HTTP/2 by hand, RFC 9113 and 7541: literals without an index.


def _headers(authority: str) -> bytes:
  fields = {
    ':method': 'POST',
    ':scheme': 'http',
    ':path': control_channel.METHOD,
    ':authority': authority,
    'content-type': 'application/grpc',
    'te': 'trailers',
  }
  block = b''.join(
    b'\0' + bytes([len(name)]) + name.encode() + bytes([len(text)])
    + text.encode()
    for name, text in fields.items()
  )  # fmt: skip
  return _frame(kind=1, flags=4, payload=block)


def _data(payload: bytes) -> bytes:
  return _frame(kind=0, flags=0, payload=payload)


def _frame(kind: int, flags: int, payload: bytes) -> bytes:
  stream = b'\0\0\0\x01'
  return len(payload).to_bytes(3) + bytes([kind, flags]) + stream + payload
