# SPDX-License-Identifier: Apache-2.0
"""Clusters of unequal learners: the pace of the run, and participation."""

import dataclasses
import itertools

import pytest

from diloco.protocol.syncer import collecting, pulls
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.timeouts import TransferTime
from diloco.simulator.cluster import Cluster, ClusterOptions, Timing
from diloco.simulator.network import Cargo, UnequalWires
from tests.protocol.cluster_stage import DecisionLog, config_of

FOREVER = 10**6  # Steps: no run here comes to its end.


class PaceLog(DecisionLog):
  """A log that also keeps by how much t rose with each event."""

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
  cluster = Cluster(config, timing, seed=1, observer=PaceLog())
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
  # Half a second of the faster one's steps, half a second of the slower's, and
  # a spacing for each change of the set of live learners.
  assert before < cluster.syncer.machine.step <= before + 50 + 25 + 2 * 4
  assert max(cluster.observer.leaps) <= cluster.config.spacing_steps


def test_what_the_faster_one_trains_beyond_the_bound_is_merged():
  cluster = _two_of_which_one_is_fast(blend='rebase')
  cluster.run(40.0)
  merged = {0: 0, 1: 0}
  for _, merge in cluster.observer.merges:
    if merge.fragment == 0:
      for share in merge.shares:
        merged[share.learner] += share.c_steps
  for learner, steps in merged.items():
    assert steps >= 0.95 * cluster.learners[learner].steps


class OneOfItsOwn:
  """Wires over which the pulls of one learner take longer after a time."""

  def __init__(self, usual_s: float, learner: int, pull_s: float, at_s=0.0):
    self._usual_s, self._learner = usual_s, learner
    self._pull_s, self._at_s = pull_s, at_s

  def pieces(self, cargo: Cargo) -> int:
    return 1

  def offer_bytes(self, fragment: int) -> int:
    return 1000

  def arrival_s(self, now_s, source, target, cargo, fragment) -> float:
    own = source == self._learner and now_s >= self._at_s
    return now_s + (self._pull_s if own else self._usual_s)


def _pulled_over(wires, step_s=0.25, learners=8, **options) -> Cluster:
  config = config_of(
    {
      'learners': learners,
      'quorum': 1,
      'fragments': 4,
      'sync_every_steps': 32,
      'overlap_steps': 8,
      'patience': 1.0,
      'total_steps': FOREVER,
      **options,
    }
  )
  timing = Timing(dict.fromkeys(range(learners), step_s), jitter=0.02)
  options = ClusterOptions(wires=wires)
  cluster = Cluster(
    config, timing, seed=1, observer=DecisionLog(), options=options
  )
  for learner in range(learners):
    cluster.start(learner)
  return cluster


def _merges(cluster: Cluster, from_s: float) -> list[syncer_events.Merge]:
  return [merge for at_s, merge in cluster.observer.merges if at_s >= from_s]


def _participation(cluster: Cluster, learner: int, from_s: float) -> float:
  merges = _merges(cluster, from_s)
  took_part = [any(s.learner == learner for s in m.shares) for m in merges]
  return sum(took_part) / len(took_part)


def _longest_gap_s(cluster: Cluster) -> float:
  times_s = [at_s for at_s, _ in cluster.observer.merges]
  return max(b - a for a, b in itertools.pairwise(times_s))


def test_one_whose_pulls_take_thirty_times_as_long_is_merged():
  """1.5 s among 0.05 s: it is within the two seconds between two rounds."""
  cluster = _pulled_over(OneOfItsOwn(0.05, learner=3, pull_s=1.5))
  cluster.run(300.0)
  assert _participation(cluster, 3, from_s=100.0) > 0.8
  assert len(_merges(cluster, 100.0)) == pytest.approx(100, abs=5)


@pytest.mark.soak
def test_a_slow_one_holds_up_others_no_more_than_its_share_of_the_time():
  """With a round each 0.3 s, 1.5 s would take four rounds of five from all."""
  wires = OneOfItsOwn(0.05, learner=3, pull_s=1.5)
  options = {'sync_every_steps': 12, 'overlap_steps': 2, 'step_s': 0.1}
  cluster = _pulled_over(wires, **options)
  cluster.run(200.0)
  assert 0.03 < _participation(cluster, 3, from_s=100.0) < 0.5
  assert len(_merges(cluster, 100.0)) > 0.55 * 100 / 0.3


def test_the_sync_includes_the_way_back():
  """0.7 step each way: there for the pull, and again for the update."""
  options = {'quorum': 2, 'sync_every_steps': 12, 'overlap_steps': 4}
  config = config_of({'learners': 4, **options})
  steps = Timing(dict.fromkeys(range(4), 0.25), jitter=0.02)
  timing = dataclasses.replace(steps, latency_s=0.7 * 0.25)
  cluster = Cluster(config, timing, seed=1, observer=DecisionLog())
  for learner in range(4):
    cluster.start(learner)
  cluster.run(60.0)
  pull_and_merge_s = timing.latency_s + timing.transfer_s + timing.merge_s
  way_back_s = timing.latency_s + timing.transfer_s
  expected_s = pytest.approx(pull_and_merge_s + way_back_s, rel=0.05)
  assert collecting.sync_s(cluster.syncer.machine._state) == expected_s
  members = dict(cluster.syncer.machine.snapshot().members)
  assert all(len(x.published) <= 2 for x in members.values())


def test_a_fragment_ten_times_as_large_costs_nobody_its_part():
  """K = M, embedding = 'own': 3 s among 0.3 s, and a round each 2 s."""
  sizes = (10.0, 1.0, 1.0, 1.0)
  wires = UnequalWires(0.3, 0.01, {}, sizes, stall_share=0.0, seed=1)
  cluster = _pulled_over(wires, quorum=8)
  cluster.run(300.0)
  merges = _merges(cluster, 20.0)
  assert len(merges) > 0.95 * (300.0 - 20.0) / 2.0
  assert sum(len(m.shares) for m in merges) / len(merges) > 7.8
  kinds = {r.kind for _, r in cluster.observer.records}
  # No pull was late, no learner thrown out.
  assert kinds == {'joined', 'ready'}


@pytest.mark.parametrize(
  'quorum', [1, pytest.param(8, marks=pytest.mark.soak)]
)
def test_one_hanging_path_leaves_the_others_their_rounds(quorum):
  """200 rounds a minute; from 30 s on nothing comes from learner 3."""
  wires = OneOfItsOwn(0.02, learner=3, pull_s=1e6, at_s=30.0)
  options = {'sync_every_steps': 12, 'overlap_steps': 2, 'step_s': 0.1}
  cluster = _pulled_over(wires, quorum=quorum, **options)
  cluster.run(330.0)
  assert len(_merges(cluster, 30.0)) / 5 >= 0.95 * 200
  assert _participation(cluster, 5, from_s=30.0) > 0.95
  # 1, 2 and 4 s until it is known; later trials are not waited for.
  assert _longest_gap_s(cluster) < 8.0


def test_a_link_that_becomes_nine_times_slower_is_pulled_from_again():
  """3 s became 27 s, and K = M: after two pulls in vain it is merged."""
  wires = OneOfItsOwn(3.0, learner=1, pull_s=27.0, at_s=500.0)
  options = {'sync_every_steps': 64, 'overlap_steps': 16, 'step_s': 2.0}
  cluster = _pulled_over(wires, learners=2, quorum=2, **options)
  cluster.run(2000.0)
  late = [r for at_s, r in cluster.observer.records if r.kind == 'late']
  assert [r.learner for r in late] == [1] * len(late) and 1 <= len(late) <= 2
  assert _participation(cluster, 1, from_s=700.0) == 1.0


# Faults planted in the estimates of pulls break no invariant: they show in how
# often which learners are merged.


def _averages_all_pulls(patch):
  """Plants one mean for all learners and all sizes."""

  def transfer_time(state, learner):
    del learner
    return state.transfers.get(0, TransferTime())

  def measure(state, learner, nbytes, took_s):
    del nbytes
    time = transfer_time(state, learner)
    state.resting.pop(learner, None)
    state.transfers[0] = time.add(1, took_s)

  patch.setattr(pulls, '_transfer_time', transfer_time)
  patch.setattr(pulls, '_measure', measure)
  patch.setattr(pulls, '_note_failure', lambda *_: None)
  patch.setattr(TransferTime, 'usual_s', lambda self, nbytes: self.took_s)


def _learns_nothing_from_failures(patch):
  patch.setattr(TransferTime, 'raised', lambda self, *_: self)


def _counts_on_who_has_rested(patch):
  def quorum_now(state):
    live = state.members.live
    awake = [m for m in live if not collecting._rests(state, m)]
    return max(1, min(state.config.quorum, len(awake)))

  patch.setattr(collecting, 'quorum_now', quorum_now)


def _one_hanging_path():
  test_one_hanging_path_leaves_the_others_their_rounds(8)


_slow = test_one_whose_pulls_take_thirty_times_as_long_is_merged
_large = test_a_fragment_ten_times_as_large_costs_nobody_its_part
_slower = test_a_link_that_becomes_nine_times_slower_is_pulled_from_again


@pytest.mark.parametrize(
  'plant,all_is_well,words',
  [
    (_averages_all_pulls, _slow, '_participation'),
    (_averages_all_pulls, _large, 'len|kinds'),
    (_learns_nothing_from_failures, _slower, 'len|_participation'),
    (_counts_on_who_has_rested, _one_hanging_path, '_longest_gap_s'),
  ],
)
def test_a_planted_fault_of_pulls_is_found(
  plant, all_is_well, words, monkeypatch
):
  plant(monkeypatch)
  with pytest.raises(AssertionError, match=words):
    all_is_well()
