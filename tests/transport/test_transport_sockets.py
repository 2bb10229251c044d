# SPDX-License-Identifier: Apache-2.0
"""Addresses, the meter at the sockets, the choice of a plane, and what is
relied on in jax.experimental.transfer."""

import contextlib
import re
import socket
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest

from diloco.protocol.messages import Payload
from diloco.transport import planes, sockets

pytestmark = pytest.mark.beside

WAIT_S = 60.0


@pytest.mark.parametrize(
  ('text', 'parts'),
  [
    ('127.0.0.1:80', ('127.0.0.1', 80)),
    ('[::1]:65535', ('::1', 65535)),
    ('syncer-0.run.svc:0', ('syncer-0.run.svc', 0)),
  ],
)
def test_addresses_split_and_join(text, parts):
  assert sockets.split(text) == parts
  assert sockets.join(*parts) == text


@pytest.mark.parametrize(
  'text', ['', 'host', 'host:', ':80', '::1:80', 'host:65536', 'a b:1', 'h:-1']
)
def test_addresses_refuse_what_is_no_endpoint(text):
  with pytest.raises(sockets.BadAddress, match=re.escape(repr(text))):
    sockets.split(text)


def test_addresses_publisher_round_trip():
  text = 'grpc://[::1]:4711/0123456789abcdef'
  parsed = sockets.parse_publisher(text, 'grpc')
  assert str(parsed) == text
  assert parsed.endpoint == '[::1]:4711'


@pytest.mark.parametrize(
  ('text', 'named'),
  [
    ('jax_transfer://h:1/0123456789abcdef', 'must start with grpc://'),
    ('grpc://h:1', 'no token'),
    ('grpc://h:1/xyz', 'no token'),
    ('grpc://h:0/0123456789abcdef', 'port 0'),
    ('grpc://:1/0123456789abcdef', 'must be host:port'),
  ],
)
def test_addresses_refuse_what_is_no_publisher(text, named):
  with pytest.raises(sockets.BadAddress, match=re.escape(named)):
    sockets.parse_publisher(text, 'grpc')


def test_addresses_resolve_names_and_keep_literals():
  assert sockets.resolve('10.1.2.3') == '10.1.2.3'
  assert sockets.resolve('fe80::1') == 'fe80::1'
  assert sockets.resolve('localhost') in ('127.0.0.1', '::1')
  with pytest.raises(sockets.HostUnknown, match='does not resolve'):
    sockets.resolve('no-such-host.invalid')


@pytest.mark.parametrize('name', ['grpc', 'jax_transfer'])
def test_planes_refuse_hosts_that_peers_cannot_reach(name):
  with pytest.raises(sockets.BadAddress, match='every interface'):
    planes.make_plane(name, '0.0.0.0')
  with pytest.raises(sockets.HostUnknown, match='does not resolve'):
    planes.make_plane(name, 'no-such-host.invalid')


def test_planes_import_jax_only_for_the_plane_that_is_made_of_it():
  code = (
    'import sys; from diloco.transport import planes, sockets; '
    'from diloco.transport import control_server, control_client; '
    "planes.make_plane('grpc', '127.0.0.1').close(); "
    "planes.make_plane('memory', '').close(); "
    "sys.exit('jax' in sys.modules)"
  )
  assert subprocess.run([sys.executable, '-c', code]).returncode == 0


def test_meter_counts_what_sockets_carried_also_after_their_close():
  with socket.create_server(('127.0.0.1', 0)) as server:
    sockets_meter = sockets.SocketMeter()
    one = socket.create_connection(server.getsockname())
    other, _ = server.accept()
    with one, other:
      one.sendall(bytes(100_000))
      left = 100_000
      while left:
        left -= len(other.recv(left))
      deadline = time.monotonic() + WAIT_S
      while (seen := sockets_meter.sample()).sent < 100_000:
        assert time.monotonic() < deadline, seen
      # The handshake's SYN counts as one byte.
      assert 100_000 <= seen.sent <= 100_002
      assert seen.received == 100_000
    after = sockets_meter.sample()
  assert after == seen


@pytest.mark.parametrize('name', ['grpc', 'jax_transfer'])
def test_meter_bounds_what_a_plane_adds_to_its_payloads(name):
  nbytes, pulls = 1 << 20, 8
  data = np.zeros(nbytes, np.uint8)
  with (
    contextlib.closing(planes.make_plane(name, '127.0.0.1')) as theirs,
    contextlib.closing(planes.make_plane(name, '127.0.0.1')) as ours,
  ):
    publisher = theirs.publisher('us')
    fetcher = ours.fetcher(publisher.address)
    sockets_meter = sockets.SocketMeter()
    for handle in range(pulls):
      publisher.offer(handle, data)
      fetcher.pull(Payload(handle, 'raw', nbytes, zlib.crc32(data)), WAIT_S)
    received = sockets_meter.sample().received
  assert nbytes * pulls <= received < nbytes * pulls * 1.01


def test_jax_servers_are_dropped_while_somebody_connects():
  # In a process of its own: what is tested for is SIGSEGV.
  code = """
import socket, threading
from diloco.transport.jax_transfer import _Server

ports, dropped = [], threading.Event()

def connect():
  while not dropped.is_set():
    for port in list(ports):
      try:
        socket.create_connection(('127.0.0.1', port), 1).close()
      except OSError:  # Refused, or cut off.
        pass

connecting = threading.Thread(target=connect, daemon=True)
connecting.start()
for _ in range(500):
  server = _Server('127.0.0.1')
  ports[:] = server._control | server._bulk
  server.close()
dropped.set()
connecting.join()
"""
  ran = subprocess.run([sys.executable, '-c', code], stderr=subprocess.PIPE)
  assert ran.returncode == 0, ran.stderr.decode()[-2000:]


def test_listeners_say_whether_their_loop_came_round():
  with socket.create_server(('127.0.0.1', 0)) as deaf:
    port = deaf.getsockname()[1]
    assert not sockets.end({port}, 0.1)
    with pytest.raises(ConnectionRefusedError):
      socket.create_connection(('127.0.0.1', port), WAIT_S)
  assert sockets.end({port}, 0.1), 'nobody listens there'
