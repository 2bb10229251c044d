# SPDX-License-Identifier: Apache-2.0
"""The relay between real sockets: each impairment acts, and is counted."""

import contextlib
import socket
import threading
import time

import pytest

from diloco.faults import DOWN, SOUND, UP, WAYS, Impairment
from launch.chaos import relay as chaos_relay
from launch.chaos.relay import Relay
from tests.waiting import until

pytestmark = pytest.mark.alone

OWN, PEER = '127.0.1.1', '127.0.1.2'
WAIT_S = 10.0


class Echo:
  """A server that sends back what it gets."""

  def __init__(self, host: str):
    self._listener = socket.create_server((host, 0))
    self.address = self._listener.getsockname()
    threading.Thread(target=self._run, daemon=True).start()

  def _run(self):
    while True:
      try:
        connection, _ = self._listener.accept()
      except OSError:
        return
      threading.Thread(
        target=self._echo, args=(connection,), daemon=True
      ).start()

  def _echo(self, connection):
    with connection:
      try:
        while data := connection.recv(65536):
          connection.sendall(data)
      except OSError:
        return

  def close(self):
    self._listener.close()


@pytest.fixture
def relay():
  with Relay({'learner-0': OWN, 'learner-1': PEER}, seed=0) as found:
    yield found


@pytest.fixture
def echo():
  server = Echo('127.0.0.1')
  yield server
  server.close()


def opened(relay, name, address, timeout_s=WAIT_S):
  """A connection of process `name` to `address`, and the relay's answer."""
  host, _, port = relay.listen(name).rpartition(':')
  found = socket.create_connection((host, int(port)), timeout_s)
  to_host, to_port = address
  found.sendall(f'CONNECT {to_host}:{to_port} HTTP/1.1\r\n\r\n'.encode())
  answer = b''
  while b'\r\n\r\n' not in answer:
    answer += found.recv(1)
  return found, answer.split(b'\r\n')[0].decode()


def said(connection, data: bytes) -> float:
  """Sends, reads it back, and returns how long that took."""
  began_s = time.monotonic()
  sender = threading.Thread(target=connection.sendall, args=(data,))
  sender.start()
  back = b''
  while len(back) < len(data):
    more = connection.recv(65536)
    assert more, 'the connection has ended'
    back += more
  sender.join()
  assert back == data
  return time.monotonic() - began_s


def impaired(relay, impairment, name='learner-0', ways=WAYS):
  for way in ways:
    relay.impair(name, way, impairment)


def test_a_sound_link_carries_and_counts_bytes(relay, echo):
  connection, answer = opened(relay, 'learner-0', echo.address)
  assert answer == 'HTTP/1.1 200 OK'
  said(connection, b'x' * 200_000)
  for way in WAYS:
    counts = relay.counts('learner-0', way)
    assert counts.carried_bytes == 200_000
    assert counts.held_bytes == counts.delayed_bytes == counts.stalls == 0
  assert relay.counts('learner-1', UP).carried_bytes == 0


@pytest.mark.parametrize('ways', [(UP,), (DOWN,), WAYS])
def test_a_cut_holds_what_is_sent_until_it_is_over(relay, echo, ways):
  connection, _ = opened(relay, 'learner-0', echo.address)
  said(connection, b'before')
  impaired(relay, Impairment(cut=True), ways=ways)
  connection.sendall(b'meanwhile')
  held = lambda: relay.counts('learner-0', ways[0]).held_bytes  # noqa: E731
  until(lambda: held() == len(b'meanwhile'), WAIT_S, lambda: str(held()))
  connection.settimeout(0.5)
  with pytest.raises(TimeoutError):
    connection.recv(1)
  impaired(relay, SOUND, ways=ways)
  connection.settimeout(WAIT_S)
  assert connection.recv(9, socket.MSG_WAITALL) == b'meanwhile'


def test_a_cut_holds_those_that_connect(relay, echo):
  impaired(relay, Impairment(cut=True), ways=(DOWN,))
  with pytest.raises(TimeoutError):
    opened(relay, 'learner-0', echo.address, timeout_s=0.3)
  held = lambda: relay.counts('learner-0', DOWN).held_connects  # noqa: E731
  until(held, WAIT_S, 'the connection is held')
  assert held() == 1
  _, answer = opened(relay, 'learner-1', echo.address)
  assert answer == 'HTTP/1.1 200 OK'


def test_a_peer_s_link_is_part_of_the_way_to_it(relay):
  server = Echo(PEER)
  connection, _ = opened(relay, 'syncer', server.address)
  said(connection, b'x' * 1000)
  assert relay.counts('learner-1', DOWN).carried_bytes == 1000
  impaired(relay, Impairment(cut=True), 'learner-1', (UP,))
  connection.sendall(b'y')
  held = lambda: relay.counts('learner-1', UP).held_bytes  # noqa: E731
  until(held, WAIT_S, 'the byte is held')
  connection.settimeout(0.3)
  with pytest.raises(TimeoutError):
    connection.recv(1)
  assert held() == 1
  server.close()


def test_a_throttled_link_has_its_rate(relay, echo):
  connection, _ = opened(relay, 'learner-0', echo.address)
  impaired(relay, Impairment(bytes_per_s=200_000.0), ways=(UP,))
  assert said(connection, b'x' * 100_000) >= 0.4
  assert relay.counts('learner-0', UP).throttled_bytes == 100_000
  assert relay.counts('learner-0', DOWN).throttled_bytes == 0


def test_a_late_link_delays_both_ways(relay, echo):
  connection, _ = opened(relay, 'learner-0', echo.address)
  impaired(relay, Impairment(delay_s=(0.1, 0.15)))
  assert said(connection, b'x') >= 0.2
  assert relay.counts('learner-0', UP).delayed_bytes == 1
  assert relay.counts('learner-0', DOWN).delayed_bytes == 1


def test_a_lossy_link_stalls_and_resets(relay, echo, monkeypatch):
  monkeypatch.setattr(chaos_relay, 'STALL_S', (0.1, 0.2))
  monkeypatch.setattr(chaos_relay, 'RESET_SHARE', 0.0)
  connection, _ = opened(relay, 'learner-0', echo.address)
  impaired(relay, Impairment(loss=1.0), ways=(UP,))
  assert said(connection, b'x') >= 0.1
  assert relay.counts('learner-0', UP).stalls == 1
  monkeypatch.setattr(chaos_relay, 'RESET_SHARE', 1.0)
  with pytest.raises((ConnectionError, AssertionError)):  # No time-out.
    said(connection, b'y')
  assert relay.counts('learner-0', UP).resets == 1


@pytest.mark.parametrize('asked', ['10.0.0.1:80', 'example.org:80', 'nothing'])
def test_it_leads_nowhere_beyond_loopback(relay, asked):
  host, _, port = asked.rpartition(':')
  _, answer = opened(relay, 'learner-0', (host, port))
  assert answer == 'HTTP/1.1 400 Bad Request'


def test_who_is_not_there_is_not_reached(relay, echo):
  gone = socket.create_server(('127.0.0.1', 0))
  address = gone.getsockname()
  gone.close()
  _, answer = opened(relay, 'learner-0', address)
  assert answer == 'HTTP/1.1 502 Bad Gateway'


def test_a_closed_relay_leaves_no_thread_and_no_connection(echo):
  before = threading.active_count()
  with Relay({'learner-0': OWN}, seed=0) as relay:
    connection, _ = opened(relay, 'learner-0', echo.address)
    said(connection, b'x')
  with contextlib.suppress(ConnectionResetError):
    assert connection.recv(1) == b''
  assert threading.active_count() <= before + 1  # The echo's own.
