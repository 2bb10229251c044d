# SPDX-License-Identifier: Apache-2.0
"""The real machines on a fleet: what befalls it, and what is counted."""

import math

import pytest

from diloco.fleets.failures import Death, FaultEvents, Stall
from diloco.fleets.fleet import DecoupledFleet, Fleet
from diloco.fleets.tally import BusyIntervals
from diloco.simulator.network import SYNCER
from tests.fleets.fleets import config_of, network_of, run


def test_nothing_happens_to_a_fleet():
  outcome = run(until_s=100.0)
  assert outcome.goodput == pytest.approx(1.0)
  assert outcome.uptime == pytest.approx(1.0)
  assert [c.steps for c in outcome.learners.values()] == [100, 100]
  assert outcome.rounds >= 98  # One is due per step; the last is under way.
  assert outcome.participation(0) == outcome.participation(1) == 1.0
  assert outcome.staleness(0) == 0.0
  assert outcome.pace == pytest.approx(outcome.rounds / 100)


def test_a_suspended_learner_costs_nobody_else_anything():
  befalls = FaultEvents(suspensions={1: (Stall(10.5, 30.5, 'down'),)})
  outcome = run(100.0, befalls)
  assert outcome.learners[0].steps == 100
  assert outcome.learners[1].stepping_s == pytest.approx(79.5, abs=0.51)
  assert outcome.goodput == pytest.approx(0.9, abs=0.005)
  assert outcome.uptime == pytest.approx(1.0)
  assert outcome.rounds >= 98  # K = 1.


def test_uptime_is_lost_when_all_stand_still():
  standing = (Stall(20.0, 45.0, 'down'),)
  outcome = run(100.0, FaultEvents(suspensions={0: standing, 1: standing}))
  assert outcome.uptime == pytest.approx(0.75)
  assert outcome.goodput == pytest.approx(0.75)


def test_lost_slices_are_not_goodput():
  outcome = run(100.0, FaultEvents(capacities={0: ((50.0, 0.5),)}))
  assert outcome.goodput == pytest.approx(0.875, abs=0.01)
  assert outcome.learners[0].tokens == pytest.approx(75_000, abs=1000)
  assert outcome.learners[1].tokens == 100_000


def test_a_dead_learner_comes_back_through_a_peer():
  """12 Mbyte of state at 9.6 Mbit/s take 10 s; no other learner waits."""
  befalls = FaultEvents(deaths=(Death(1, 20.2, 30.0),))
  outcome = run(100.0, befalls, network=network_of(learner_bps=9.6e6))
  back = outcome.learners[1]
  assert (back.bootstraps, back.peer_bootstraps) == (2, 1)
  assert 20 + 50 <= back.steps <= 20 + 57  # It shares the donor's link.
  assert outcome.learners[0].steps == 100
  assert outcome.goodput < 0.9


def test_a_learner_that_never_comes_back():
  befalls = FaultEvents(deaths=(Death(1, 20.2, math.inf),))
  outcome = run(100.0, befalls)
  assert outcome.learners[1].steps == 20
  assert outcome.goodput == pytest.approx(0.6)


def test_a_newcomer_is_merged():
  two = Fleet((1.0, 1.0), (1000, 1000))
  fleet = DecoupledFleet(config_of(), two, network_of(), seed=0)
  fleet.join(0)
  fleet.run(50.0)
  fleet.join(1)
  fleet.run(100.0)
  assert 45 <= fleet.learners[1].steps <= 50
  assert fleet.learners[1].peer_bootstraps == 1
  assert fleet.learners[1].merged >= 40


def test_learners_train_on_without_a_syncer():
  befalls = FaultEvents(deaths=(Death(SYNCER, 30.0, 50.0),))
  outcome = run(100.0, befalls)
  assert outcome.goodput == pytest.approx(1.0)
  assert 70 <= outcome.rounds <= 85


def counted(tally):
  """Returns all fields but the objects that it was told of."""
  public = {k: v for k, v in vars(tally).items() if not k.startswith('_')}
  return public | {'stepping': None, 'works': tally.works()}


def test_same_seed_same_outcome_other_seed_another():
  befalls = FaultEvents(deaths=(Death(0, 20.2, 30.0),))
  one, again, other = (
    run(100.0, befalls, jitter=0.2, seed=seed, timeline_s=50.0)
    for seed in (3, 3, 4)
  )
  assert counted(one.tally) == counted(again.tally)
  assert one.goodput == again.goodput
  assert one.tally.steps_spans != other.tally.steps_spans


def test_what_befalls_one_learner_moves_no_step_of_another():
  befalls = FaultEvents(suspensions={1: (Stall(10.5, 30.5, 'down'),)})
  alone, hit = (
    [
      span
      for span in run(50.0, x, jitter=0.2, timeline_s=50.0).tally.steps_spans
      if span[0] == 0
    ]
    for x in (FaultEvents(), befalls)
  )
  assert alone == hit


def test_a_slow_link_makes_rounds_late_and_no_step_longer():
  network = network_of(learner_bps=1e6)  # 2 Mbit down per step of 1 s.
  outcome = run(200.0, network=network)
  assert outcome.goodput == pytest.approx(1.0)
  assert 0.4 < outcome.pace < 0.6
  link = outcome.meters[0, 'in']
  mean_bps = link.bits_until(outcome.now_s) / outcome.now_s
  assert 0.95e6 < mean_bps <= link.peak_bps < 1.001e6


def test_a_union_of_spans_is_measured_once():
  union = BusyIntervals()
  for i in range(10_000):
    union.add([(float(i), i + 0.5), (i + 0.25, i + 0.75)])
  assert union.measure_s(10_000.0) == pytest.approx(7500.0)
  assert union.measure_s(100.5) == pytest.approx(75.5)


def test_steps_that_a_death_takes_are_not_goodput():
  """Offered a step ahead of round 1: three are made since those merged."""
  befalls = FaultEvents(deaths=(Death(0, 6.5, 100.0),))
  outcome = run(9.5, befalls, sync_every_steps=16)
  useful_s = [outcome.learners[m].useful_s for m in (0, 1)]
  assert outcome.learners[0].steps == 6
  assert useful_s == pytest.approx([3.0, 9.0])
  assert outcome.goodput == pytest.approx(12 / 19)
