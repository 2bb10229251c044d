# SPDX-License-Identifier: Apache-2.0
"""Connections between the processes of one learner."""

import multiprocessing.connection
import os
import queue
import socket
import threading

import pytest

from diloco.protocol import host_messages
from diloco.transport import host_channel

pytestmark = pytest.mark.beside

SECRET = b'of this learner'
WAIT_S = 60.0


class End:
  """One end of a connection; what it hears, and why it was lost."""

  def __init__(self, raw, allowed):
    self.heard: queue.Queue = queue.Queue()
    self.lost: queue.Queue = queue.Queue()
    self.raw = raw
    self.connection = host_channel.HostConnection(
      raw, allowed, self.heard.put, self.lost.put, 'the peer'
    )


def accepting(listener: host_channel.HostListener) -> queue.Queue:
  """Gets the one connection, in a list, once it is there."""
  accepted: queue.Queue = queue.Queue()
  threading.Thread(
    target=lambda: accepted.put(listener.accept(1)), daemon=True
  ).start()
  return accepted


@pytest.fixture
def ends():
  """The leading host's end, and another's."""
  listener = host_channel.HostListener('127.0.0.1', SECRET)
  accepted = accepting(listener)
  other = host_channel.connect(listener.address, SECRET)
  [leading] = accepted.get(timeout=WAIT_S)
  listener.close()
  made = (
    End(leading, host_messages.FROM_OTHER_HOSTS),
    End(other, host_messages.FROM_LEADING_HOST),
  )
  yield made
  for end in made:
    end.connection.close(1.0)


def test_messages_come_in_the_order_in_which_they_were_sent(ends):
  leading, other = ends
  sent = [host_messages.BeginAt(rows) for rows in range(1000)]
  for message in sent:
    leading.connection.send(message)
  assert [other.heard.get(timeout=WAIT_S) for _ in sent] == sent
  other.connection.send(host_messages.StopWanted())
  assert leading.heard.get(timeout=WAIT_S) == host_messages.StopWanted()


def test_what_was_said_before_the_end_is_heard(ends):
  leading, other = ends
  leading.connection.send(host_messages.EndAt(0, 'over'))
  leading.connection.close(WAIT_S)
  assert other.heard.get(timeout=WAIT_S) == host_messages.EndAt(0, 'over')
  assert 'the peer' in str(other.lost.get(timeout=WAIT_S))
  assert leading.lost.empty()  # It ended the connection itself.


def test_a_host_that_is_gone_is_noticed_at_once(ends):
  leading, other = ends
  other.connection.close(1.0)
  assert isinstance(leading.lost.get(timeout=WAIT_S), host_channel.GroupLost)


def test_a_machine_that_vanishes_would_be_noticed(ends):
  for end in ends:
    with socket.socket(fileno=os.dup(end.raw.fileno())) as same:
      waits_ms = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
      assert waits_ms == 1000 * host_channel.SILENT_S
      assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_who_may_not_say_something_is_cut_off(ends):
  leading, other = ends
  other.connection.send(host_messages.EndAt(0, 'not its to say'))
  assert 'EndAt may not come' in str(leading.lost.get(timeout=WAIT_S))


def test_bytes_that_are_no_message_cut_off_who_sent_them(ends):
  leading, other = ends
  other.raw.send_bytes(b'\xc1')
  assert 'msgpack' in str(leading.lost.get(timeout=WAIT_S))


def test_who_lacks_the_secret_is_not_let_in():
  listener = host_channel.HostListener('127.0.0.1', SECRET)
  accepted = accepting(listener)
  with pytest.raises(host_channel.GroupLost, match='has another secret'):
    host_channel.connect(listener.address, b'guessed')
  silent = multiprocessing.connection.Client(listener.address)
  for _ in range(20):  # Gone at once: what it was asked is never read.
    multiprocessing.connection.Client(listener.address).close()
  right = host_channel.connect(listener.address, SECRET)
  [found] = accepted.get(timeout=WAIT_S)
  right.send_bytes(b'here')
  assert found.recv_bytes() == b'here'
  for each in (silent, right, found, listener):
    each.close()


def test_nobody_listens():
  for _ in range(100):  # A thread still in accept would let one of them in.
    listener = host_channel.HostListener('127.0.0.1', SECRET)
    address = listener.address
    listener.close()
    with pytest.raises(host_channel.GroupLost, match='refused'):
      host_channel.connect(address, SECRET)
