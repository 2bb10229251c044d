# SPDX-License-Identifier: Apache-2.0
"""A plan of faults is of its seed, fits, and says what does not fit."""

import collections
import itertools
import random

import pytest

from diloco import faults
from diloco.config.sections import ConfigError
from diloco.fleets import failures
from launch.chaos import fault_plan, stage
from launch.chaos.fault_plan import RECOVERY_S, FaultTargets

pytestmark = pytest.mark.alone

KINDS = faults.performed_by(stage.RealStage)
CAST = FaultTargets(
  learners=3, ids_max=16, servers=('syncer',), hosts=(1, 1, 1)
)
LARGE = FaultTargets(5, 16, ('syncer', 'shard-1', 'shard-2'), (2, 1, 1, 1, 1))
SLICED = FaultTargets(2, 2, ('syncer',), (6, 1), slices=(3, 1))
SECONDS = 180.0
SEEDS = range(40)


def shapes(*kinds):
  return {kind: KINDS[kind] for kind in kinds}


def usual(cast):
  return {
    name: kind
    for name, kind in KINDS.items()
    if fault_plan.can_befall(kind, cast)
  }


def drawn(seed, cast=CAST, rate=240.0, seconds=SECONDS):
  return fault_plan.draw(seed, seconds, rate, usual(cast), cast)


def test_a_plan_is_of_its_seed():
  assert drawn(7) == drawn(7)
  assert drawn(7) != drawn(8)
  assert [fault.number for fault in drawn(7)] == list(range(1, 13))


@pytest.mark.parametrize('cast', [CAST, LARGE])
def test_every_kind_comes_as_often_as_the_others(cast):
  counts = collections.Counter(
    fault.kind
    for fault in drawn(0, cast, rate=60.0, seconds=60.0 * len(usual(cast)))
  )
  assert set(counts.values()) == {1}
  assert counts.keys() == usual(cast).keys()


@pytest.mark.parametrize('cast', [CAST, LARGE])
def test_nothing_is_hit_before_it_could_recover(cast):
  for seed in SEEDS:
    free_at_s = collections.defaultdict(float)
    for fault in drawn(seed, cast):
      role = fault.target.partition('.')[0]
      assert fault.at_s >= free_at_s[role], (seed, fault)
      free_at_s[role] = fault.end_s + RECOVERY_S
      if fault.kind == 'leave':
        free_at_s[role] = float('inf')
      assert fault.end_s < SECONDS


def test_one_learner_is_left_alone_at_any_time():
  for seed in SEEDS:
    plan = [f for f in drawn(seed) if f.learner is not None]
    for fault in plan:
      hit = {
        f.learner
        for f in plan
        if (f.at_s <= fault.at_s <= f.end_s + RECOVERY_S)
        or (f.kind == 'leave' and f.at_s <= fault.at_s)
      }
      joined = {
        f.learner
        for f in plan
        if f.kind == 'join' and f.at_s + RECOVERY_S <= fault.at_s
      }
      assert {0, 1, 2, *joined} - hit, (seed, fault)


def test_who_leaves_has_joined_if_it_can():
  plan = fault_plan.draw(0, 600.0, 60.0, shapes('join', 'leave'), CAST)
  leaves = [fault for fault in plan if fault.kind == 'leave']
  assert leaves
  new = {f.target: f.at_s for f in plan if f.kind == 'join'}
  for fault in leaves:
    if fault.target in new:
      assert fault.at_s >= new[fault.target] + RECOVERY_S


def test_an_hour_of_all_kinds_fits_and_few_newcomers_stay_at_a_time():
  """Issue: newcomers stayed to the end, until ten more learners ran."""
  cast = FaultTargets(4, 40, ('syncer', 'shard-1'), (2, 1, 1, 1))
  for seed in range(4):
    plan = fault_plan.draw(seed, 3600.0, 240.0, usual(cast), cast)
    counts = collections.Counter(fault.kind for fault in plan)
    assert len(plan) == 240
    assert max(counts.values()) - min(counts.values()) <= 1
    there, most = 4, 4
    for fault in plan:
      there += {'join': 1, 'leave': -1}.get(fault.kind, 0)
      most = max(most, there)
    assert most <= 8


def test_more_newcomers_than_data_has_shards_for_are_refused():
  cast = FaultTargets(4, 16, ('syncer',), (1, 1, 1, 1))
  with pytest.raises(
    ConfigError, match=r'data\.shards=16 lets 12 learners join'
  ):
    fault_plan.draw(0, 3600.0, 240.0, usual(cast), cast)


def test_a_link_is_cut_one_way():
  plan = fault_plan.draw(3, 600.0, 60.0, shapes('cut_one_way'), CAST)
  assert {fault.way for fault in plan} == {'up', 'down'}


def test_no_faults_are_a_plan():
  assert drawn(0, rate=0.0) == ()


def test_too_many_faults_are_refused():
  with pytest.raises(ConfigError) as refused:
    drawn(0, rate=9000.0)
  (said,) = refused.value.problems
  assert said.startswith('--faults_per_hour=9000: 450 faults in 3 minutes do')


def test_a_kind_that_can_befall_nothing_is_refused():
  with pytest.raises(ConfigError, match='--kinds=kill_host: no process'):
    fault_plan.draw(0, SECONDS, 60.0, shapes('kill_host'), CAST)


def test_hosts_and_shards_are_hit():
  targets = {f.target for seed in SEEDS for f in drawn(seed, LARGE)}
  assert {'learner-0.1', 'shard-1', 'shard-2', 'syncer'} <= targets


def test_slices_are_hit_by_their_first_hosts():
  only = shapes('kill_slice', 'slice_away')
  plan = fault_plan.draw(0, 3600.0, 60.0, only, SLICED)
  assert {fault.target for fault in plan} == {
    f'learner-0.{host}' for host in (0, 2, 4)
  }


def of_fleet(cast, chips=2_400_000, seconds=3600.0, seed=0):
  rate = failures.rate_per_s(chips, mtbi_days=365.0)
  repair = failures.make('exponential', 40.0)
  rng = random.Random(seed)
  befalls = failures.draw(rate, seconds, repair, rng)
  return befalls, fault_plan.of_fleet(befalls, seconds, KINDS, cast)


def test_a_fleet_s_interruptions_take_slices_away_until_they_are_repaired():
  """Learner 0 has three slices of two hosts; learner 1, of one, is killed."""
  befalls, plan = of_fleet(SLICED)
  by_time = {round(each.at_s, 3): each for each in befalls}
  targets = collections.Counter()
  for fault in plan:
    each = by_time[fault.at_s]
    if each.place < 0.5:
      place = int(each.place * 2 * 3)
      wanted = 'slice_away', f'learner-0.{2 * place}', round(each.repair_s, 3)
    else:
      wanted = 'kill', 'learner-1', 0.0
    assert (fault.kind, fault.target, fault.hold_s) == wanted
    targets[fault.target] += 1
  assert set(targets) == {
    'learner-0.0', 'learner-0.2', 'learner-0.4', 'learner-1',
  }  # fmt: skip
  assert len(plan) > 20


def test_what_hits_a_learner_that_is_not_whole_is_left_out():
  befalls, plan = of_fleet(SLICED)
  assert len(plan) < len(befalls)
  for one, other in itertools.pairwise(
    fault for fault in plan if fault.process == 'learner-0'
  ):
    assert other.at_s >= one.end_s + RECOVERY_S


def test_a_fleet_that_seldom_fails_has_a_short_plan():
  befalls, plan = of_fleet(SLICED, chips=20_000)
  assert len(befalls) < 10
  assert len(plan) == len(befalls)
