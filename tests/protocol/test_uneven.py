# SPDX-License-Identifier: Apache-2.0
"""Clusters of unequal learners: the pace of the run, and who is merged."""

from diloco.sim.cluster import Cluster, Timing
from diloco.sim.watch import Log
from tests.protocol.cluster_stage import config_of

FOREVER = 10**6  # Steps: no run here comes to its end.


class PaceLog(Log):
  """Also keeps by how much t rose with each event."""

  def __init__(self):
    super().__init__()
    self.step = 0
    self.leaps: list[int] = []

  def at_syncer(self, syncer, event, effects):
    super().at_syncer(syncer, event, effects)
    step = syncer.machine.step
    self.leaps.append(step - self.step)
    self.step = step


def _two_of_which_one_is_fast(**options) -> Cluster:
  config = config_of(
    {
      'learners': 2,
      'quorum': 2,
      'fragments': 2,
      'sync_every_steps': 8,
      'patience': 1.0,
      'total_steps': FOREVER,
      **options,
    }
  )
  timing = Timing({0: 0.01, 1: 0.02})
  cluster = Cluster(config, timing, seed=1, watch=PaceLog())
  for learner in (0, 1):
    cluster.start(learner)
  return cluster


def test_t_does_not_leap_when_the_slower_of_two_is_away_for_a_moment():
  """K = M: t is the slower one's, and goes on from there."""
  cluster = _two_of_which_one_is_fast()
  cluster.run(40.0)
  before = cluster.syncer.machine.step
  assert 1900 <= before <= 2000
  cluster.kill(1)
  cluster.run(40.5)
  cluster.start(1)
  cluster.run(41.0)
  # Half a second of the faster one's steps, half a second of the slower's,
  # and a spacing for each change of who is live.
  assert before < cluster.syncer.machine.step <= before + 50 + 25 + 2 * 4
  assert max(cluster.watch.leaps) <= cluster.config.spacing_steps


def test_what_the_faster_one_trains_beyond_the_bound_is_merged():
  cluster = _two_of_which_one_is_fast(blend='carry')
  cluster.run(40.0)
  merged = {0: 0, 1: 0}
  for _, merge in cluster.watch.merges:
    if merge.fragment == 0:
      for share in merge.shares:
        merged[share.learner] += share.c_steps
  for learner, steps in merged.items():
    assert steps >= 0.95 * cluster.learners[learner].steps


def test_synchronous_learners_stay_in_step_while_t_is_bounded():
  """τ = 0: each round has s steps of each, also after one was away."""
  cluster = _two_of_which_one_is_fast(overlap_steps=0)
  cluster.run(20.0)
  cluster.kill(1)
  cluster.run(20.2)
  cluster.start(1)
  cluster.run(40.0)
  late = [merge for at_s, merge in cluster.watch.merges if at_s > 22.0]
  steps = {s.c_steps for merge in late for s in merge.shares}
  assert len(late) > 100 and steps == {cluster.config.sync_every_steps}
  assert all(len(merge.shares) == 2 for merge in late)
