# SPDX-License-Identifier: Apache-2.0
"""The leading host asks all others, and counts on all of them or on none."""

import queue
import threading

import pytest

from diloco.learner.hosts.host_group import HostGroup
from diloco.learner.replica import Mismatch
from diloco.protocol import host_messages as said
from diloco.protocol.messages import Part
from diloco.transport import host_channel

pytestmark = pytest.mark.beside

SECRET = b'of this learner'
WAIT_S = 120.0
PART = Part(nbytes=3, crc=4)


class Other:
  """Host `host`, which answers as a test wants it."""

  def __init__(self, address, host: int):
    self.heard: queue.Queue = queue.Queue()
    self.connection = host_channel.HostConnection(
      host_channel.connect(address, SECRET),
      said.FROM_LEADING_HOST,
      self.heard.put,
      lambda error: None,
      'the leading host',
    )
    self.say(said.HostHere(host))
    self.say(said.HostStarted(host, (5 * host, 20)))

  def say(self, message):
    self.connection.send(message)

  def hear(self):
    return self.heard.get(timeout=WAIT_S)


@pytest.fixture
def hosts():
  """The leading host's view, and the hosts 1 and 2."""
  listener = host_channel.HostListener('127.0.0.1', SECRET)
  found: queue.Queue = queue.Queue()
  threading.Thread(
    target=lambda: found.put(listener.accept(2)), daemon=True
  ).start()
  others = [Other(listener.address, host) for host in (1, 2)]
  leading = HostGroup(found.get(timeout=WAIT_S))
  listener.close()
  assert leading.here() == [1, 2]
  restored = leading.agree(said.HostStarted(0, (5, 10, 20, 30)))
  for other in others:
    other.restores = other.hear()
    assert other.restores == restored
  yield leading, *others
  leading.close()
  for other in others:
    other.connection.close(1.0)


def _done(job: int = 8, reason: str = '', parts=(PART,)) -> said.HostDone:
  return said.HostDone(job, reason, (f'of job {job}',), parts)


FETCH = said.HostFetch(8, ('first', 'there', 'too'), (), '', (1,), (2,))


def test_all_restore_the_newest_step_that_each_has(hosts):
  _, first, second = hosts
  assert first.restores == second.restores == said.RestoreFrom(20)


def test_the_answers_of_all_are_told_apart(hosts):
  leading, first, second = hosts
  second.say(_done(parts=(PART, PART)))
  first.say(_done())
  assert leading.answers(8) == {1: _done(), 2: _done(parts=(PART, PART))}


def test_what_nobody_waits_for_is_not_kept(hosts):
  leading, first, second = hosts
  first.say(_done(8))
  for other in (first, second):
    other.say(_done(1))
  leading.answers(1)
  leading.forget(8)  # One has answered, one has not.
  second.say(_done(8))
  for other in (first, second):
    other.say(_done(2))
  leading.answers(2)
  assert not leading._answers and not leading._unwanted


def test_all_perform_an_order_together(hosts):
  leading, first, second = hosts
  for other in (first, second):
    other.say(_done())
  with leading.together(FETCH):
    assert first.hear() == second.hear() == FETCH
  assert not leading._answers


def test_one_that_could_not_do_its_part_fails_all(hosts):
  leading, first, second = hosts
  first.say(_done())
  second.say(_done(reason='PeerLost: gone'))
  with (
    pytest.raises(Mismatch, match='host 2: PeerLost: gone'),
    leading.together(FETCH),
  ):
    pass


def test_where_the_own_part_fails_the_others_are_waited_for(hosts):
  leading, first, second = hosts
  for other in (first, second):
    other.say(_done())
  with pytest.raises(Mismatch, match='mine'), leading.together(FETCH):
    raise Mismatch('mine')
  assert not leading._answers


def test_all_have_saved_once_the_slowest_has(hosts):
  leading, first, second = hosts
  assert leading.have_saved(0)  # Nothing was to be saved yet.

  def saved(*others, step, job):
    for other in others:
      other.say(said.HostSaved(step))
    for other in (first, second):
      other.say(_done(job))  # An answer that can be waited for.
    leading.answers(job)

  saved(first, second, step=5, job=1)
  assert leading.have_saved(5)
  saved(first, step=10, job=2)
  assert not leading.have_saved(10)
  saved(second, step=10, job=3)
  assert leading.have_saved(10)


def test_the_last_save_waits_for_those_of_the_others(hosts):
  leading, first, second = hosts
  leading.wait_until_saved(5, 0.0)
  assert not leading.have_saved(5)
  waiting = threading.Thread(target=leading.wait_until_saved, args=(5, WAIT_S))
  waiting.start()
  first.say(said.HostSaved(5))
  assert waiting.is_alive()
  second.say(said.HostSaved(5))
  waiting.join(WAIT_S / 2)
  assert not waiting.is_alive() and leading.have_saved(5)


def test_a_host_that_is_gone_ends_all_waiting(hosts):
  leading, first, second = hosts
  lost: queue.Queue = queue.Queue()
  leading.watch(on_stop=lambda: None, on_lost=lost.put)
  first.say(_done())
  second.connection.close(1.0)
  with pytest.raises(host_channel.GroupLost):
    leading.answers(8)
  assert isinstance(lost.get(timeout=WAIT_S), host_channel.GroupLost)


def test_one_that_is_told_to_go_tells_the_leading_host(hosts):
  leading, first, _ = hosts
  stopped = threading.Event()
  leading.watch(on_stop=stopped.set, on_lost=lambda error: None)
  first.say(said.StopWanted())
  assert stopped.wait(WAIT_S)
