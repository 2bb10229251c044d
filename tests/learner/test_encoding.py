# SPDX-License-Identifier: Apache-2.0
"""A learner encodes little next to its steps, and pulls nothing of no use."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from diloco.config import run_config
from diloco.learner.connection import SyncerAddress, SyncerSession
from diloco.learner.replica import whole_replica
from diloco.learner.syncer_client import SyncerClient
from diloco.numerics import payload
from diloco.protocol import messages
from diloco.protocol.learner import events as learner_events
from diloco.run import payload_parts
from diloco.run.spec import make_run_spec
from diloco.transport.memory import MemoryNetwork, MemoryPlane
from experiments import tests_tiny
from tests.waiting import until

WAIT_S = 60.0


@pytest.fixture(scope='module')
def run_spec():
  return make_run_spec(run_config.build(tests_tiny.get_config()))


def test_there_is_one_piece_at_a_time(run_spec, monkeypatch):
  """Not the difference of a whole fragment, and its bytes twice."""
  at_once, encode = [], payload.encode

  def counted(arrays, pieces, codec):
    at_once.append(sum(x.size for x in arrays.values()))
    return encode(arrays, pieces, codec)

  pieces = max(run_spec.layout.fragments, key=len)
  rng = np.random.default_rng(2)
  one, other = (
    {x.name: rng.normal(size=x.shape).astype(np.float32) for x in pieces}
    for _ in range(2)
  )
  delta = {name: one[name] - other[name] for name in one}
  whole = encode(delta, pieces, run_spec.up)
  monkeypatch.setattr(payload, 'encode', counted)
  found = payload_parts.encode(one, other, pieces, run_spec.up)
  np.testing.assert_array_equal(found, whole)
  assert at_once == [piece.size for piece in pieces]
  assert len(pieces) > 1


class Encoder:
  """A client whose encoding takes as long as the test wants."""

  def __init__(self, run_spec):
    replica = whole_replica(run_spec, run_spec.initial_fragments())
    self.client = SyncerClient(
      run_spec,
      0,
      SyncerAddress('127.0.0.1:1', MemoryPlane(MemoryNetwork())),
      SimpleNamespace(holding=None, state_like={}),  # Nothing is encoded.
      replica,
    )
    self.told, self.begun, self.most = [], [], 0
    self._now = 0
    self.go_on = threading.Event()
    self.session = SyncerSession(1, SimpleNamespace(send=lambda message: None))
    self.client.handle = self.told.append
    self.client._session = self.session
    self.client._transfer.offer = lambda said, *_: self._work(said.handle)
    self.client._transfer.donate_fragment = lambda p, _: self._work(f'all {p}')

  def _work(self, what):
    self._now += 1
    self.most = max(self.most, self._now)
    self.begun.append(what)
    assert self.go_on.wait(WAIT_S)
    self._now -= 1

  def offer(self, handle: int, fragment: int):
    snapshot = SimpleNamespace(handle=handle, fragment=fragment)
    self.client.offer(self.session, snapshot, {}, {})

  def donate(self, fragment: int):
    self.client._perform(learner_events.DonateFragment(fragment, 1))

  def until_begun(self, count: int):
    until(lambda: len(self.begun) >= count, WAIT_S, f'{count} are begun')

  def finish(self):
    over = threading.Event()
    self.client._queue_up(over.set)
    self.go_on.set()
    assert over.wait(WAIT_S)
    self.client._up.close(WAIT_S)
    self.client._down.close(WAIT_S)


def test_fragments_are_encoded_one_by_one_and_none_twice(run_spec):
  """An offer that a newer one has replaced in the queue is never encoded."""
  encoder = Encoder(run_spec)
  encoder.offer(1, 0)
  encoder.until_begun(1)
  encoder.donate(1)
  for handle, fragment in ((2, 0), (3, 0), (4, 2)):
    encoder.offer(handle, fragment)
  encoder.finish()
  assert encoder.begun == [1, 'all 1', 3, 4]
  assert encoder.most == 1
  assert encoder.told == [learner_events.OfferDropped(0, 2)]


def test_nothing_is_encoded_for_a_syncer_that_is_gone(run_spec):
  encoder = Encoder(run_spec)
  encoder.offer(1, 0)
  encoder.until_begun(1)
  encoder.offer(2, 1)
  encoder.donate(2)
  encoder.client._session = None
  encoder.finish()
  assert encoder.begun == [1]


def test_what_was_decided_in_a_session_is_not_told_in_the_next(run_spec):
  """There the learner is not ready: the next syncer would end the session."""
  encoder, said = Encoder(run_spec), []
  snapshot = SimpleNamespace(fragment=0, handle=1)
  client = encoder.client
  client._transfer.has_room = lambda *_: True
  client._perform(learner_events.HandIn(3))
  client._session = SyncerSession(2, SimpleNamespace(send=said.append))
  client.next_boundary(wait=False)
  client.say_after_offers(messages.HandedIn(3))
  assert client.prepare_offer(snapshot) is None

  client._perform(learner_events.HandIn(4))
  client.next_boundary(wait=False)
  client.say_after_offers(messages.HandedIn(4))
  assert client.prepare_offer(snapshot) is client._session
  encoder.finish()
  assert said == [messages.HandedIn(4)]


def test_an_update_whose_base_is_not_here_is_not_pulled(run_spec, monkeypatch):
  """A link that is too slow has no room for bytes of no use."""
  encoder, pulled = Encoder(run_spec), []
  transfer = encoder.client._transfer
  monkeypatch.setattr(transfer._host, 'take', pulled.append)
  (nbytes,) = transfer._replica.slice_map.down_bytes(0, run_spec.down)
  found = messages.Payload(1, run_spec.down.name, nbytes, 0)
  update = SimpleNamespace(
    fragment=0, version=7, payload=found, crc=0, part_crcs=()
  )
  (failed,) = transfer.pull([update], full=False, session=1)
  assert 'version 0 is here, the update needs 6' in failed.reason
  update.version = 1
  (rebuilt,) = transfer.pull([update], full=False, session=1)
  assert rebuilt == learner_events.Rebuilt(0, 1, 0)
  assert [order.version for order in pulled] == [1]
  encoder.finish()
