# SPDX-License-Identifier: Apache-2.0
"""A learner whose link down is slower than rounds come."""

import collections

import pytest

from diloco.protocol.config import UPDATES_KEPT
from diloco.protocol.learner import events as learner_events
from diloco.simulator.cluster import Cluster, ClusterOptions, Timing
from diloco.simulator.network import LinkDeviation, UnequalWires
from diloco.simulator.observer import ClusterObserver
from tests.protocol.cluster_stage import config_of

SLOW, LEARNERS, FRAGMENTS = 3, 4, 8
STEP_S, TRANSFER_S = 0.5, 0.01
FULL_UPDATES = 7.5  # A full fragment in f32, by an update at 4 bits.
STEPS = 300


class FetchCounts(ClusterObserver):
  """Checks invariants, and counts what the slow learner fetches at one go."""

  def __init__(self, config):
    super().__init__(config)
    self.fetched = collections.Counter()  # Updates; 0: a full fragment.

  def at_learner(self, process, event, effects):
    super().at_learner(process, event, effects)
    for effect in effects if process.id == SLOW else ():
      match effect:
        case learner_events.FetchUpdates(updates=updates):
          self.fetched[len(updates)] += 1
        case learner_events.FetchFragment():
          self.fetched[0] += 1


def _run(factor: float) -> tuple[FetchCounts, Cluster]:
  config = config_of(
    {
      'learners': LEARNERS,
      'fragments': FRAGMENTS,
      'sync_every_steps': FRAGMENTS,
      'quorum': 2,
      'max_staleness_versions': 4,
      'blend': 'rebase',
      'patience': 1.0,
      'total_steps': 10**6,
    }
  )
  observer = FetchCounts(config)
  wires = UnequalWires(
    TRANSFER_S,
    0.005,
    {SLOW: LinkDeviation(down=factor * STEP_S / TRANSFER_S)},
    [1.0] * FRAGMENTS,
    stall_share=0.0,
    seed=1,
    full_updates=FULL_UPDATES,
  )
  cluster = Cluster(
    config,
    Timing(
      dict.fromkeys(range(LEARNERS), STEP_S),
      jitter=0.05,
      latency_s=0.005,
      transfer_s=TRANSFER_S,
      encode_s=0.01,
    ),
    seed=1,
    observer=observer,
    options=ClusterOptions(wires=wires),
  )
  for learner in range(LEARNERS):
    cluster.start(learner)
  cluster.run(STEPS * STEP_S)
  return observer, cluster


@pytest.mark.parametrize('factor', (1.1, 2.0))
def test_most_of_what_a_learner_on_a_slow_link_trains_is_merged(factor):
  observer, cluster = _run(factor)
  rows = [observer.tokens.rows()[SLOW, p] for p in range(FRAGMENTS)]
  trained = sum(row.trained for row in rows)
  merged = sum(row.merged for row in rows)
  # 0.13 and 0.02 where each update was fetched by itself, in turn.
  assert merged > 0.5 * trained, (merged, trained, observer.fetched)
  assert max(observer.fetched) in range(2, UPDATES_KEPT + 1), observer.fetched
  observer.check_tokens()
  kept = cluster.syncer._offered.values()  # Of some 40: the rest is withdrawn.
  assert max(map(len, kept)) == UPDATES_KEPT
  load = cluster.learners[SLOW].machine.snapshot().link.ratio
  assert 0.8 * factor < load < 1.25 * factor, load
