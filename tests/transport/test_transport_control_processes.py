# SPDX-License-Identifier: Apache-2.0
"""The control plane against a server process that is killed or stopped."""

import contextlib
import queue
import time

import pytest

from diloco.protocol import messages
from diloco.transport import control_client
from tests.transport.peer_process import Process

pytestmark = pytest.mark.alone

WAIT_S = 30.0


@pytest.fixture
def connected():
  """A control server in a process, a client of it, and what it was told."""
  with contextlib.closing(Process('grpc')) as process:
    seen, closed = queue.Queue(), queue.Queue()
    client = control_client.ControlClient(
      process.ask(do='control'), seen.put, closed.put
    )
    with contextlib.closing(client):
      client.connect(WAIT_S)
      client.send(
        messages.Hello(
          *(messages.PROTOCOL_VERSION, 'run', 0, 1, {}, (), ()),
          began=False,
          addresses=('x',),
        )
      )
      assert seen.get(timeout=WAIT_S) == messages.Refusal('heard', final=False)
      yield process, client, seen, closed


def test_processes_control_notices_a_killed_server(connected):
  process, client, _, closed = connected
  process.kill()
  killed = time.monotonic()
  assert 'UNAVAILABLE' in closed.get(timeout=WAIT_S)
  assert time.monotonic() - killed < WAIT_S / 2
  assert not client.send(messages.Ready(0, 'the test'))
  client.close()
  assert closed.empty()


def test_processes_control_is_not_held_up_by_a_stopped_server(connected):
  process, client, seen, closed = connected
  process.stop()
  longest_s = 0.0
  for step in range(500):
    started = time.monotonic()
    assert client.send(messages.WantFragment(step, 'x' * 1000))
    longest_s = max(longest_s, time.monotonic() - started)
  assert longest_s < WAIT_S / 2
  process.go_on()
  for _ in range(500):
    assert seen.get(timeout=WAIT_S) == messages.Refusal('heard', final=False)
  assert closed.empty()


def test_processes_control_closes_on_a_stopped_server(connected):
  process, client, _, closed = connected
  process.stop()
  client.send(messages.Ready(0, 'the test'))
  started = time.monotonic()
  client.close()
  assert time.monotonic() - started < WAIT_S / 2
  assert closed.get(timeout=WAIT_S) == control_client.CLOSED_HERE
