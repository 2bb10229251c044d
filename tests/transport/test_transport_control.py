# SPDX-License-Identifier: Apache-2.0
"""The control plane within one process: sessions, limits, refusals, ends."""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable

import pytest

from diloco.protocol import messages
from diloco.transport import (
  control_channel,
  control_client,
  control_server,
  wire,
)
from tests.waiting import until

pytestmark = pytest.mark.beside

WAIT_S = 60.0
HELLO = messages.Hello(
  protocol=messages.PROTOCOL_VERSION,
  run='run',
  learner=0,
  incarnation=1,
  fingerprints={},
  versions=(),
  crcs=(),
  began=False,
  addresses=('memory://0/1',),
)
READY = messages.Ready(0, 'the test')
PATIENT = control_channel.ControlLimits(
  handshake_s=WAIT_S, close_s=WAIT_S
)


class Server(control_server.ControlServer):
  """A server that keeps what happened, in order, in a queue."""

  def __init__(self, bind='127.0.0.1:0', **options):
    self.seen = queue.Queue()
    super().__init__(
      bind,
      lambda session, message: self.seen.put((session, message)),
      lambda session, reason: self.seen.put((session, reason)),
      **options,
    )


class Client(control_client.ControlClient):
  """A client that keeps what happened, in order, in a queue."""

  def __init__(self, address, **options):
    self.seen = queue.Queue()
    super().__init__(address, self.seen.put, self.seen.put, **options)

  def send_body(self, body):
    """Sends what no honest client sends."""
    self._outbox.put(body)


@contextlib.contextmanager
def pair(limits=PATIENT):
  """A server, and a client that is connected to it."""
  with (
    contextlib.closing(Server(limits=limits)) as server,
    contextlib.closing(Client(server.address, limits=limits)) as client,
  ):
    client.connect(WAIT_S)
    yield server, client


def threads() -> int:
  return len(os.listdir('/proc/self/task'))


def wait_for(condition, what: str | Callable[[], str]):
  """Polls what has no event of its own, such as the death of a thread."""
  until(condition, WAIT_S, what)


def test_control_carries_messages_both_ways():
  with pair() as (server, client):
    assert client.send(HELLO)
    session, message = server.seen.get(timeout=WAIT_S)
    assert message == HELLO
    answer = messages.Refusal('no', final=False)
    assert session.send(answer)
    assert client.seen.get(timeout=WAIT_S) == answer


def test_control_hands_over_what_was_sent_before_close_then_the_end():
  with pair() as (server, client):
    client.send(HELLO)
    for step in range(100):
      client.send(messages.WantFragment(step, ''))
    client.close()
    seen = [server.seen.get(timeout=WAIT_S)[1] for _ in range(102)]
    assert [m.fragment for m in seen[1:-1]] == list(range(100))
    assert seen[-1] == 'the learner ended the stream'
    assert client.seen.get(timeout=WAIT_S) == control_client.CLOSED_HERE
    assert client.seen.empty()
    assert not client.send(READY)


def test_control_tells_the_learner_why_its_session_was_closed():
  with pair() as (server, client):
    client.send(HELLO)
    session, _ = server.seen.get(timeout=WAIT_S)
    session.send(messages.Refusal('last words', final=False))
    session.close('silent for 9 s')
    session.close('again')
    assert client.seen.get(timeout=WAIT_S).reason == 'last words'
    assert 'silent for 9 s' in client.seen.get(timeout=WAIT_S)
    assert server.seen.get(timeout=WAIT_S) == (session, 'silent for 9 s')
    assert not session.send(READY)
    assert server.ended() == {'closed': 1}


@pytest.mark.parametrize(
  ('bodies', 'announced', 'named'),
  [
    ([b'\xc1'], False, 'not one msgpack value'),
    ([wire.encode(READY)], False, 'before Hello'),
    ([wire.encode(HELLO)] * 2, True, 'a second Hello'),
    ([wire.encode(HELLO), b''], True, 'not one msgpack value'),
    (
      [wire.encode(HELLO), wire.encode(messages.Done(1, 1))],
      True,
      'may not come from there',
    ),
  ],
  ids=['garbage', 'wrong order', 'second hello', 'empty', 'wrong side'],
)
def test_control_closes_a_malformed_session_and_no_other(
  bodies, announced, named
):
  with (
    pair() as (server, good),
    contextlib.closing(Client(server.address)) as bad,
  ):
    good.send(HELLO)
    assert server.seen.get(timeout=WAIT_S)[1] == HELLO
    bad.connect(WAIT_S)
    for body in bodies:
      bad.send_body(body)
    assert named in bad.seen.get(timeout=WAIT_S)
    if announced:
      assert server.seen.get(timeout=WAIT_S)[1] == HELLO
      assert named in server.seen.get(timeout=WAIT_S)[1]
    wait_for(lambda: server.ended() == {'malformed': 1}, 'counted')
    good.send(READY)
    assert server.seen.get(timeout=WAIT_S)[1] == READY


def test_control_cuts_off_what_is_larger_than_a_message_may_be():
  with pair() as (server, client):
    client.send(HELLO)
    assert server.seen.get(timeout=WAIT_S)[1] == HELLO
    client.send_body(bytes(wire.MESSAGE_BYTES_MAX + 1))
    assert 'RESOURCE_EXHAUSTED' in client.seen.get(timeout=WAIT_S)
    server.seen.get(timeout=WAIT_S)
    assert sum(server.ended().values()) == 1


def test_control_refuses_more_sessions_than_it_may_have():
  limits = control_channel.ControlLimits(sessions_max=1)
  with pair(limits=limits) as (server, client):
    client.send(HELLO)
    assert server.seen.get(timeout=WAIT_S)[1] == HELLO
    with pytest.raises(control_client.ConnectFailed, match='1 sessions'):
      Client(server.address).connect(WAIT_S)
    assert server.ended() == {'full': 1}


def test_control_says_that_nobody_answers():
  with socket.create_server(('127.0.0.1', 0)) as silent:
    client = Client(f'127.0.0.1:{silent.getsockname()[1]}')
    with pytest.raises(control_client.ConnectFailed, match='no answer within'):
      client.connect(0.5)


def test_control_cuts_off_a_slow_reader_without_waiting_for_it():
  limits = control_channel.ControlLimits(outgoing_max=8)
  released = threading.Event()
  with contextlib.closing(Server(limits=limits)) as server:
    closed = queue.Queue()
    slow = control_client.ControlClient(
      server.address, lambda message: released.wait(WAIT_S), closed.put
    )
    slow.connect(WAIT_S)
    slow.send(HELLO)
    session, _ = server.seen.get(timeout=WAIT_S)
    bulky = messages.Refusal('x' * 500_000, final=False)
    longest_s, deadline = 0.0, time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
      started = time.monotonic()
      if not session.send(bulky):
        break
      longest_s = max(longest_s, time.monotonic() - started)
    assert server.seen.get(timeout=WAIT_S)[1] == '8 messages are waiting'
    assert longest_s < WAIT_S / 2
    released.set()
    closed.get(timeout=WAIT_S)
    slow.close()
    assert server.ended() == {'overflow': 1}


def test_control_may_be_closed_from_a_callback():
  with contextlib.closing(Server()) as server:
    closed = queue.Queue()
    client = control_client.ControlClient(
      server.address, lambda message: client.close(), closed.put
    )
    client.connect(WAIT_S)
    client.send(HELLO)
    session, _ = server.seen.get(timeout=WAIT_S)
    session.send(messages.Done(1, 1))
    assert closed.get(timeout=WAIT_S) == control_client.CLOSED_HERE
    client.close()
    assert closed.empty()


def test_control_leaves_no_thread_and_no_descriptor():
  def cycle(server_first: bool):
    server = Server()
    clients = [Client(server.address) for _ in range(4)]
    for client in clients:
      client.connect(WAIT_S)
      client.send(HELLO)
      server.seen.get(timeout=WAIT_S)
    ends = [server, *clients] if server_first else [*clients, server]
    for end in ends:
      end.close()

  for index in range(4):  # gRPC's own threads and descriptors come to stay.
    cycle(server_first=bool(index % 2))
  ours = threading.active_count()
  before = threads(), len(os.listdir('/proc/self/fd'))
  for index in range(10):
    cycle(server_first=bool(index % 2))
  wait_for(lambda: threading.active_count() <= ours, 'python threads')
  wait_for(
    lambda: threads() <= before[0] + 2,
    lambda: f'{threads()} threads > {before[0]}',
  )
  fds = lambda: len(os.listdir('/proc/self/fd'))  # noqa: E731
  wait_for(
    lambda: fds() <= before[1] + 2, lambda: f'{fds()} descriptors > {before[1]}'
  )
  left = lambda: [  # noqa: E731
    t.name for t in threading.enumerate() if t.name.startswith('control')
  ]
  wait_for(lambda: not left(), lambda: f'left: {left()}')
