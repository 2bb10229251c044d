# SPDX-License-Identifier: Apache-2.0
"""Faults come as asked, from their seed, on the clock that is handed in."""

import contextlib
import random
import threading
import zlib

import numpy as np
import pytest

from diloco.protocol.messages import Payload
from diloco.transport import data_plane, memory
from tests.transport import faulty

pytestmark = pytest.mark.beside

SEED = 11
DATA = np.arange(256, dtype=np.uint8)


class FakeTime:
  """A clock that only its own waiting moves."""

  def __init__(self):
    self.now = 100.0
    self.on_wait = lambda: None

  def clock(self) -> float:
    return self.now

  def wait(self, event: threading.Event, seconds: float) -> bool:
    assert seconds >= 0
    self.now += seconds
    self.on_wait()
    return event.is_set()


class Link:
  """One publisher, and a faulty fetcher from it, on a clock of their own."""

  def __init__(self, seed=SEED, **faults):
    self.time = FakeTime()
    plane = memory.MemoryPlane(memory.MemoryNetwork())
    self.plane = faulty.faulty(
      plane,
      faulty.Faults(**faults),
      random.Random(seed),
      self.time.clock,
      self.time.wait,
    )
    self.publisher = self.plane.publisher('peer')
    self.fetcher = self.plane.fetcher(self.publisher.address)
    self._handles = 0

  def pull(self, timeout_s=10.0, data=DATA):
    self._handles += 1
    self.publisher.offer(self._handles, data)
    payload = Payload(self._handles, 'raw', data.nbytes, zlib.crc32(data))
    return self.fetcher.pull(payload, timeout_s)

  def outcomes(self, count: int) -> list[str]:
    seen = []
    for _ in range(count):
      try:
        self.pull()
        seen.append('arrived')
      except data_plane.TransferFailed as error:
        seen.append(type(error).__name__)
    return seen


def test_faulty_without_faults_changes_nothing_and_takes_no_time():
  link = Link()
  np.testing.assert_array_equal(link.pull(), DATA)
  assert link.time.now == 100.0


@pytest.mark.parametrize(
  ('fault', 'error'),
  [
    ('lost', data_plane.PeerLost),
    ('stalled', data_plane.TimedOut),
    ('corrupt', data_plane.Corrupt),
  ],
)
def test_faulty_raises_what_the_fault_is(fault, error):
  with pytest.raises(error):
    Link(**{fault: 1.0}).pull()


def test_faulty_stalls_until_the_time_out_and_not_beyond():
  link = Link(stalled=1.0)
  with pytest.raises(data_plane.TimedOut):
    link.pull(timeout_s=3.0)
  assert link.time.now == 103.0


def test_faulty_failure_uses_the_offer_up():
  link = Link(lost=1.0)
  with pytest.raises(data_plane.PeerLost):
    link.pull()
  with pytest.raises(data_plane.NotOffered):
    link.fetcher.pull(Payload(1, 'raw', 256, 0), 1.0)


def test_faulty_duplicate_still_arrives_once():
  np.testing.assert_array_equal(Link(duplicate=1.0).pull(), DATA)


def test_faulty_corrupt_leaves_the_offered_array_alone():
  data = DATA.copy()
  with pytest.raises(data_plane.Corrupt):
    Link(corrupt=1.0).pull(data=data)
  np.testing.assert_array_equal(data, DATA)


def test_faulty_delay_is_within_its_bounds():
  link = Link(delay_s=(0.5, 0.75))
  for _ in range(20):
    before = link.time.now
    link.pull()
    assert 0.5 <= link.time.now - before <= 0.75


def test_faulty_throttle_keeps_to_its_rate_after_the_burst():
  link = Link(bytes_per_s=256.0, burst_bytes=512)
  took = []
  for _ in range(4):
    before = link.time.now
    link.pull()
    took.append(link.time.now - before)
  assert took == [0.0, 0.0, 1.0, 1.0]


def test_faulty_throttle_beyond_the_deadline_times_out():
  link = Link(bytes_per_s=1.0, burst_bytes=1)
  with pytest.raises(data_plane.TimedOut):
    link.pull(timeout_s=2.0)
  assert link.time.now == 102.0


def test_faulty_cut_times_out_and_heal_lets_through():
  link = Link()
  link.plane.cut()
  with pytest.raises(data_plane.TimedOut):
    link.pull(timeout_s=1.0)
  link.plane.heal()
  np.testing.assert_array_equal(link.pull(), DATA)


def test_faulty_heal_frees_the_pull_that_waits():
  link = Link()
  link.plane.cut()
  link.time.on_wait = link.plane.heal
  np.testing.assert_array_equal(link.pull(timeout_s=1.0), DATA)


def test_faulty_close_frees_the_pull_that_waits():
  link = Link(delay_s=(5.0, 5.0))
  link.time.on_wait = link.fetcher.close
  with pytest.raises(data_plane.Closed):
    link.pull()


def test_faulty_same_seed_same_faults():
  chances = {'lost': 0.2, 'corrupt': 0.2, 'stalled': 0.2}
  first = Link(**chances).outcomes(200)
  assert first == Link(**chances).outcomes(200)
  assert first != Link(seed=SEED + 1, **chances).outcomes(200)
  assert set(first) == {'arrived', 'PeerLost', 'Corrupt', 'TimedOut'}


@pytest.mark.parametrize(
  'wrong',
  [
    {'lost': 1.5},
    {'corrupt': -0.1},
    {'delay_s': (2.0, 1.0)},
    {'bytes_per_s': 0.0},
  ],
)
def test_faulty_refuses_impossible_faults(wrong):
  with pytest.raises(ValueError, match=f'faults: {next(iter(wrong))}='):
    faulty.Faults(**wrong)


def test_faulty_close_frees_a_real_wait():
  plane = faulty.faulty(
    memory.MemoryPlane(memory.MemoryNetwork()),
    faulty.Faults(delay_s=(60.0, 60.0)),
    random.Random(SEED),
  )
  with contextlib.closing(plane):
    fetcher = plane.fetcher(plane.publisher('peer').address)
    outcome = []

    def pull():
      with pytest.raises(data_plane.Closed):
        fetcher.pull(Payload(1, 'raw', 1, 0), 120.0)
      outcome.append('closed')

    waiting = threading.Thread(target=pull)
    waiting.start()
  fetcher.close()
  waiting.join(60.0)
  assert outcome == ['closed']
