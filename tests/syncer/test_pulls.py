# SPDX-License-Identifier: Apache-2.0
"""Pulls of the syncer: known by their handle, cancelled, and forgotten."""

import contextlib
import queue
import threading

import numpy as np
import pytest

from diloco.config import run_config
from diloco.numerics import payload
from diloco.protocol import messages, shard_messages
from diloco.protocol.config import UPDATES_KEPT
from diloco.protocol.syncer import events as syncer_events
from diloco.run import payload_parts
from diloco.run.payload_parts import TransferPace, announced
from diloco.run.spec import make_run_spec
from diloco.syncer.outer_state import OuterStep
from diloco.syncer.shard import Shard
from diloco.syncer.shard_coordinator import ShardAnswer, ShardCoordinator
from diloco.transport.data_plane import NotOffered, TimedOut
from diloco.transport.memory import MemoryNetwork, MemoryPlane
from experiments import tests_tiny

pytestmark = pytest.mark.beside

WAIT_S = 300.0
ROUND = 1  # Of fragment 0.
LEARNER, INCARNATION = 0, 1


class HeldPlane(MemoryPlane):
  """Pulls take the bytes at once, and bring them once they are let go.

  Attributes:
    began: the handles whose bytes are under way.
    gates: opened one by one, by handle.
  """

  def __init__(self, network: MemoryNetwork):
    super().__init__(network)
    self.began: queue.SimpleQueue[int] = queue.SimpleQueue()
    self.gates: dict[int, threading.Event] = {}

  def fetcher(self, address: str):
    fetcher = super().fetcher(address)
    take = fetcher.pull

    def pull(payload, timeout_s):
      data = take(payload, timeout_s)
      self.began.put(payload.handle)
      assert self.gates[payload.handle].wait(WAIT_S)
      return data

    fetcher.pull = pull
    return fetcher


class Syncer:
  """Shards of one, and a learner's publisher; what the pool says comes last."""

  def __init__(self):
    config = tests_tiny.get_config()
    self.run_spec = make_run_spec(run_config.build(config))
    network = MemoryNetwork()
    self.plane = HeldPlane(network)
    self.publisher = MemoryPlane(network).publisher('syncer')
    self.answers: queue.SimpleQueue = queue.SimpleQueue()
    self.shard = Shard(
      self.run_spec,
      self.plane,
      shard=0,
      answer=self.answers.put,
      crash=self.answers.put,
    )
    model = self.shard.model
    self.shards = ShardCoordinator(
      self.run_spec, self.shard, model.versions(), model.crcs(), say=print
    )
    admitted = self.shards.admit(
      LEARNER, INCARNATION, (self.publisher.address,), ''
    )
    assert admitted

  def offer(self, handle: int, value: float, c_steps: int) -> messages.Offer:
    """Returns an offer whose outer gradient is `value` everywhere."""
    pieces = self.run_spec.layout.fragments[0]
    base = self.run_spec.initial_fragments()[0]
    theta = {name: array - np.float32(value) for name, array in base.items()}
    data = payload_parts.encode(base, theta, pieces, self.run_spec.up)
    self.plane.gates[handle] = threading.Event()
    self.publisher.offer(handle, data)
    found = announced(handle, self.run_spec.up.name, [data])
    return messages.Offer(ROUND, 0, 0, c_steps, 8 * c_steps, c_steps, found)

  def pull(self, offer: messages.Offer):
    self.shards.pull(syncer_events.Pull(ROUND, LEARNER, INCARNATION, offer))

  def cancel(self, handle: int):
    self.shards.cancel(
      syncer_events.CancelPull(ROUND, LEARNER, INCARNATION, handle)
    )

  def let_go(self, handle: int):
    self.plane.gates[handle].set()

  def next_event(self) -> syncer_events.Event | None:
    answer = self.answers.get(timeout=WAIT_S)
    if isinstance(answer, BaseException):
      raise answer
    return self.shards.heard(ShardAnswer(0, answer))


@pytest.fixture
def syncer():
  made = Syncer()
  with contextlib.closing(made.shard):
    yield made


def test_a_cancelled_pull_is_not_taken_for_the_next(syncer):
  """The bytes of the older offer come while those of the newer are pulled."""
  syncer.pull(syncer.offer(1, value=1.0, c_steps=4))
  assert syncer.plane.began.get(timeout=WAIT_S) == 1
  syncer.cancel(1)
  syncer.pull(syncer.offer(2, value=2.0, c_steps=5))
  assert syncer.plane.began.get(timeout=WAIT_S) == 2
  syncer.let_go(1)
  syncer.let_go(2)
  assert syncer.next_event().handle == 2
  ((_, found),) = syncer.shard._pulled.values()
  largest = max(float(np.abs(x).max()) for x in found.values())
  assert largest > 1.5  # Of the newer one, as far as four bits can say.


def test_nothing_is_kept_of_a_cancelled_pull(syncer):
  offers = [syncer.offer(handle, 1.0, 1) for handle in (1, 2, 3)]
  syncer.pull(offers[0])
  assert syncer.plane.began.get(timeout=WAIT_S) == 1
  syncer.cancel(1)  # Under way.
  syncer.let_go(1)
  syncer.pull(offers[1])
  syncer.let_go(2)
  assert syncer.next_event().handle == 2
  syncer.cancel(2)  # Done.
  assert not syncer.shard._pulled and not syncer.shard._wanted
  # Of the first no answer came, nor will: the pool has ended it.
  syncer.shard._pulls.shutdown(wait=True)
  assert syncer.answers.empty() and not syncer.shard._pulled


def test_a_pull_that_was_cancelled_before_its_turn_takes_no_bytes(syncer):
  """All threads of the pool are busy; what waits behind them is dropped."""
  busy = syncer.shard._pulls._max_workers
  for handle in range(1, busy + 1):
    syncer.pull(syncer.offer(handle, 1.0, 1))
    syncer.plane.began.get(timeout=WAIT_S)
  waiting = busy + 1
  syncer.pull(syncer.offer(waiting, 1.0, 1))
  syncer.cancel(waiting)
  for handle in range(1, busy + 1):
    syncer.let_go(handle)
  syncer.shard._pulls.shutdown(wait=True)
  assert syncer.plane.began.empty()
  assert syncer.answers.qsize() == busy


@pytest.mark.parametrize('wrong', [0, 1])
def test_a_lost_fragment_is_taken_if_its_bytes_are_the_runs(syncer, wrong):
  run_spec, model = syncer.run_spec, syncer.shard.model
  theta = {k: x + 1 for k, x in run_spec.initial_fragments()[0].items()}
  pieces = run_spec.layout.fragments[0]
  data = payload.encode(theta, pieces, run_spec.full)
  crc = payload.crc(theta, pieces)
  syncer.plane.gates[1] = threading.Event()
  syncer.let_go(1)
  syncer.publisher.offer(1, data)
  offered = messages.FragmentOffered(
    0, 5, announced(1, run_spec.full.name, [data]), crc
  )
  syncer.shards.take(
    syncer_events.TakeFragment(LEARNER, INCARNATION, 5, crc + wrong, offered)
  )
  event = syncer.next_event()
  if wrong:
    assert f'Unusable: CRC {crc:08x} of fragment 0' in event.reason
    return
  assert event == syncer_events.FragmentTaken(0, LEARNER, INCARNATION)
  before = model.outer_of(0)
  syncer.shards.relabel(
    syncer_events.AdoptVersion(0, 5, (LEARNER, INCARNATION))
  )
  assert (syncer.shards.run[0], model.versions()[0]) == ((5, crc), 5)
  assert model.crcs()[0] == crc
  assert model.outer_of(0) == before  # As it was at an older close.


def test_the_newest_updates_and_one_full_fragment_stay_on_offer(syncer):
  """For slow links, which fetch several updates at one go; not without end."""
  (ends,) = syncer.shard._ends.values()
  update, full = np.zeros(8, np.uint8), 100
  _, whole, _ = syncer.shard.model.fragment(0)

  def offer(handle: int, merge: int):
    to = shard_messages.Recipient(LEARNER, INCARNATION, handle)
    syncer.shard.perform(shard_messages.OfferPart(handle, merge, 0, (to,)))

  for handle in range(1, UPDATES_KEPT + 3):
    syncer.shard._outcomes[handle] = OuterStep(None, update, ())
    offer(handle, merge=handle)
    offer(full + handle, merge=0)
  ends.retire(5)  # It was fetched.
  fetcher = MemoryPlane(syncer.plane._network).fetcher(ends.addresses[0])
  found = []
  for handle in (*range(1, 20), *range(full, full + 20)):
    data = update if handle < full else whole
    with contextlib.suppress(NotOffered):
      fetcher.pull(announced(handle, 'int4', [data]), WAIT_S)
      found.append(handle)
  updates = [x for x in range(3, UPDATES_KEPT + 3) if x != 5]
  assert found == [*updates, full + UPDATES_KEPT + 2]


class SlowFetcher:
  """Takes so long by its own clock, or times out."""

  def __init__(self):
    self.now_s = 0.0
    self.takes_s = 2.0

  def pull(self, payload, timeout_s):
    self.now_s += min(self.takes_s, timeout_s)
    if self.takes_s > timeout_s:
      raise TimedOut(f'not in {timeout_s} s')
    return np.zeros(payload.nbytes, np.uint8)

  def close(self):
    pass


def test_a_link_that_becomes_nine_times_slower_recovers():
  """A time-out teaches: else each pull to come would time out, for ever."""
  fetcher = SlowFetcher()
  pace = TransferPace(1.0, clock=lambda: fetcher.now_s)
  asked = messages.Payload(1, 'int4', 1000, 0)
  for _ in range(10):
    pace.pull(fetcher, asked)
  fetcher.takes_s *= 9
  failed = 0
  for _ in range(100):
    try:
      pace.pull(fetcher, asked)
    except TimedOut:
      failed += 1
  assert 1 <= failed <= 2
