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
    target=lambda: found.put(HostGroup(listener, 2)), daemon=True
  ).start()
  others = [Other(listener.address, host) for host in (1, 2)]
  leading = found.get(timeout=WAIT_S)
  yield leading, *others
  leading.close()
  for other in others:
    other.connection.close(1.0)


def _take(version: int = 7) -> said.HostTake:
  return said.HostTake(1, 0, version, False, (), 0, ())


def test_it_knows_their_checkpoints(hosts):
  assert hosts[0].steps == {1: (5, 20), 2: (10, 20)}


def test_an_offer_has_the_parts_of_all(hosts):
  leading, first, second = hosts
  second.say(said.HostOffered(8, (PART, PART)))
  first.say(said.HostOffered(8, (PART,)))
  assert leading.offered(8) == ((PART,), (PART, PART))


def test_an_offer_that_one_could_not_make_has_a_gap(hosts):
  leading, first, second = hosts
  first.say(said.HostOffered(8, ()))
  second.say(said.HostOffered(8, (PART,)))
  assert leading.offered(8) == ((None,), (PART,))


def test_what_nobody_waits_for_is_not_kept(hosts):
  leading, first, second = hosts
  first.say(said.HostOffered(8, (PART,)))
  first.say(said.SessionAt(1, ('here',)))
  second.say(said.SessionAt(1, ('there',)))
  assert leading.open_session(1) == (('here',), ('there',))
  leading.forget(8)  # One has answered, one has not.
  second.say(said.HostOffered(8, (PART,)))
  second.say(said.SessionAt(2, ()))
  first.say(said.SessionAt(2, ()))
  leading.open_session(2)
  assert not leading._answers and not leading._unwanted


def test_all_take_their_part(hosts):
  leading, first, second = hosts
  for other in (first, second):
    other.say(said.HostTook(0, 7, ''))
  with leading.taking([_take()] * 3):
    assert first.hear() == second.hear() == _take()


def test_one_that_could_not_take_its_part_fails_all(hosts):
  leading, first, second = hosts
  first.say(said.HostTook(0, 7, ''))
  second.say(said.HostTook(0, 7, 'PeerLost: gone'))
  with (
    pytest.raises(Mismatch, match='host 2: PeerLost: gone'),
    leading.taking([_take()] * 3),
  ):
    pass


def test_where_the_own_part_fails_the_others_are_waited_for(hosts):
  leading, first, second = hosts
  for other in (first, second):
    other.say(said.HostTook(0, 7, ''))
  with (
    pytest.raises(Mismatch, match='mine'),
    leading.taking([_take()] * 3),
  ):
    raise Mismatch('mine')
  assert not leading._answers


FETCH = said.HostFetch('there', (), (1,), (2,))


def test_a_donation_has_the_parts_of_all(hosts):
  leading, first, second = hosts
  second.say(said.HostDonated(3, 4096, 'second', (PART, PART)))
  first.say(said.HostDonated(3, 4096, '', ()))
  found = leading.donated((3, 4096))
  assert [each.address for each in found] == ['', 'second']
  assert [each.parts for each in found] == [(), (PART, PART)]


def test_a_fetched_state_is_taken_by_all_at_once(hosts):
  leading, first, second = hosts
  for other in (first, second):
    other.say(said.HostFetched(''))
    other.say(said.HostAdopted())
  with leading.fetching([FETCH] * 3):
    pass
  leading.end_fetch(taken=True)
  for other in (first, second):
    assert [other.hear(), other.hear()] == [FETCH, said.FetchOver(True)]
  assert not leading._answers


def test_a_state_that_one_could_not_fetch_is_taken_by_none(hosts):
  leading, first, second = hosts
  first.say(said.HostFetched(''))
  second.say(said.HostFetched('Corrupt: crc'))
  with (
    pytest.raises(Mismatch, match='host 2: Corrupt: crc'),
    leading.fetching([FETCH] * 3),
  ):
    pass
  leading.end_fetch(taken=False)
  for other in (first, second):
    assert [other.hear(), other.hear()] == [FETCH, said.FetchOver(False)]


def test_all_have_saved_once_the_slowest_has(hosts):
  leading, first, second = hosts
  assert leading.have_saved(0)  # Nothing was to be saved yet.

  def hear(other, step):
    other.say(said.HostSaved(step))
    other.say(said.SessionAt(step, ()))  # An answer that can be waited for.

  hear(first, 5)
  hear(second, 5)
  leading.open_session(5)
  assert leading.have_saved(5)
  hear(first, 10)
  second.say(said.SessionAt(10, ()))
  leading.open_session(10)
  assert not leading.have_saved(10)
  hear(second, 10)
  first.say(said.SessionAt(11, ()))
  second.say(said.SessionAt(11, ()))
  leading.open_session(11)
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
  first.say(said.HostOffered(8, (PART,)))
  second.connection.close(1.0)
  with pytest.raises(host_channel.GroupLost):
    leading.offered(8)
  assert isinstance(lost.get(timeout=WAIT_S), host_channel.GroupLost)


def test_one_that_is_told_to_go_tells_the_leading_host(hosts):
  leading, first, _ = hosts
  stopped = threading.Event()
  leading.watch(on_stop=stopped.set, on_lost=lambda error: None)
  first.say(said.StopWanted())
  assert stopped.wait(WAIT_S)
