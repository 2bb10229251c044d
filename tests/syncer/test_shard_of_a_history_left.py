# SPDX-License-Identifier: Apache-2.0
"""A shard whose lead lost its ledger, and has merged since, is taken back."""

import queue

import pytest

from diloco.config import run_config
from diloco.protocol import shard_messages as orders
from diloco.protocol.syncer import events as syncer_events
from diloco.run.spec import make_run_spec
from diloco.syncer.shard import Shard
from diloco.syncer.shard_coordinator import ShardCoordinator
from diloco.transport.memory import MemoryNetwork, MemoryPlane
from experiments import tests_tiny

pytestmark = pytest.mark.beside

RUN, LEFT = 3, 9  # Versions: of the run, and of what the shard remembers.


class Told:
  """The leader's end of a shard's stream, up to where gRPC would have it."""

  def __init__(self):
    self.said = queue.SimpleQueue()

  def send(self, message):
    self.said.put(message)

  def orders(self):
    while not self.said.empty():
      yield self.said.get()


@pytest.fixture
def leader_and_other():
  config = tests_tiny.get_config()
  config.syncer.shards = 2
  run_spec = make_run_spec(run_config.build(config))
  network = MemoryNetwork()
  lead, other = (
    Shard(run_spec, MemoryPlane(network), shard, print, print)
    for shard in (0, 1)
  )
  for shard, version in ((lead, RUN), (other, LEFT)):
    for p in shard.model.owned:
      shard.model.go_on(p, version, None)
  versions = (RUN,) * len(run_spec.layout.fragments)
  crcs = tuple(range(len(versions)))
  return ShardCoordinator(run_spec, lead, versions, crcs, say=print), other


def test_its_later_versions_are_other_bytes_than_the_runs(leader_and_other):
  shards, other = leader_and_other
  before = list(shards.run)
  back = shards.join(Told(), other.hello(process=1), believed=False)
  assert back.held == tuple(
    syncer_events.Held(p, LEFT, crc=before[p][1], same=False)
    for p in other.model.owned
  )
  assert shards.run == before


def test_before_the_first_merge_they_are_the_runs(leader_and_other):
  shards, other = leader_and_other
  back = shards.join(Told(), other.hello(process=1), believed=True)
  assert [x.version for x in back.held] == [LEFT] * len(other.model.owned)
  assert all(x.same for x in back.held)
  assert all(shards.run[p][0] == LEFT for p in other.model.owned)


def test_it_goes_on_under_the_number_of_the_run(leader_and_other):
  shards, other = leader_and_other
  told = Told()
  shards.join(told, other.hello(process=1), believed=False)
  for p in other.model.owned:
    shards.relabel(syncer_events.AdoptVersion(p, RUN, None))
  for order in told.orders():
    if not isinstance(order, orders.Accepted):
      other.perform(order)
  versions = other.model.versions()
  assert [versions[p] for p in other.model.owned] == [RUN] * len(
    other.model.owned
  )
  assert shards.versions() == (RUN,) * len(shards.run)
