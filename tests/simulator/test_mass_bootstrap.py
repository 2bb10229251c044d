# SPDX-License-Identifier: Apache-2.0
"""After a mass failure newcomers share the donors that are left, in turn."""

import itertools

import pytest

from diloco.protocol.learner import events as learner_events
from diloco.protocol.syncer import events as syncer_events
from diloco.simulator.cluster import Cluster, ClusterOptions, Timing
from diloco.simulator.engine import Observer
from diloco.simulator.network import Cargo, UnequalWires
from tests.protocol.stages import config_of

LEARNERS = 8
STATE_S = 20.0  # Far longer than anything else here.
STEP_S = 0.5


class _SlowStates(UnequalWires):
  """A state takes `STATE_S`, in pieces; anything else a moment."""

  def arrival_s(self, now_s, source, target, cargo, fragment):
    if cargo is Cargo.STATE:
      return now_s + STATE_S / self.pieces(cargo)
    return super().arrival_s(now_s, source, target, cargo, fragment)


class _Copies(Observer):
  """The most copies that one process had out, and when rounds closed."""

  def __init__(self):
    self.most = 0
    self.donors: set[int] = set()
    self.published_s: list[float] = []

  def at_learner(self, process, event, effects):
    self.most = max(self.most, len(process.donations))
    if any(isinstance(x, learner_events.DonateState) for x in effects):
      self.donors.add(process.id)

  def at_syncer(self, syncer, event, effects):
    for effect in effects:
      if isinstance(effect, syncer_events.Publish):
        self.published_s.append(syncer.now)


@pytest.fixture
def cluster():
  observer = _Copies()
  cluster = Cluster(
    config_of({'learners': LEARNERS, 'quorum': 1, 'total_steps': 100_000}),
    Timing(dict.fromkeys(range(LEARNERS), STEP_S)),
    seed=1,
    observer=observer,
    options=ClusterOptions(wires=_SlowStates(0.002, 0.001)),
  )
  for learner in range(LEARNERS):
    cluster.start(learner)
  cluster.run(20.0)
  assert _ready(cluster) == LEARNERS
  observer.donors.clear()
  return cluster


def _ready(cluster) -> int:
  members = cluster.syncer.machine.snapshot().members
  return sum(member.ready for _, member in members)


def _run_until_all_are_ready(cluster, until_s: float) -> float:
  while _ready(cluster) < LEARNERS and cluster.sim.now < until_s:
    cluster.run(cluster.sim.now + 1.0)
  assert _ready(cluster) == LEARNERS, 'a newcomer waits for ever'
  return cluster.sim.now


def _kill_all_but(cluster, survivor: int):
  others = [m for m in range(LEARNERS) if m != survivor]
  for learner in others:
    cluster.kill(learner)
  cluster.run(cluster.sim.now + 1.0)
  for learner in others:
    cluster.start(learner)


def test_seven_of_eight_are_back_with_one_copy_out_of_each_donor(cluster):
  began_s = cluster.sim.now
  _kill_all_but(cluster, survivor=3)
  back_s = _run_until_all_are_ready(cluster, began_s + 10 * STATE_S)
  assert cluster.observer.most == 1
  # 1, 2, 4: a learner that is back donates, too. In sequence it would be seven.
  assert len(cluster.observer.donors) > 1
  assert back_s - began_s < 4 * STATE_S


def test_rounds_go_on_closing_meanwhile(cluster):
  began_s = cluster.sim.now
  _kill_all_but(cluster, survivor=0)
  back_s = _run_until_all_are_ready(cluster, began_s + 10 * STATE_S)
  times = [t for t in cluster.observer.published_s if began_s < t < back_s]
  gaps = [after - before for before, after in itertools.pairwise(times)]
  assert max(gaps) < STATE_S


def test_a_donor_that_dies_half_way_is_replaced(cluster):
  """Another donor takes its place, even where others wait for it."""
  began_s = cluster.sim.now
  for learner in range(2, LEARNERS):
    cluster.kill(learner)
  cluster.run(began_s + 1.0)
  for learner in range(2, LEARNERS):
    cluster.start(learner)
  cluster.run(began_s + 0.5 * STATE_S)
  assert cluster.learners[0].donations, 'it does not donate'
  cluster.kill(0)
  cluster.run(began_s + 0.6 * STATE_S)
  cluster.start(0)
  back_s = _run_until_all_are_ready(cluster, began_s + 20 * STATE_S)
  assert cluster.observer.most == 1
  assert back_s - began_s < 6 * STATE_S
