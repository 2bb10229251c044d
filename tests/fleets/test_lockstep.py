# SPDX-License-Identifier: Apache-2.0
"""Programs over groups of slices, worked by hand: steps of 1 s."""

import random

import pytest

from diloco.fleets import synchronous
from diloco.fleets.failures import Stall
from diloco.fleets.speeds import Speeds
from diloco.fleets.synchronous import GroupExchange


def _steady(*steps_s: float):
  return [Speeds(s, 0.0, random.Random(0)) for s in steps_s]


def _run(stops, until_s, exchange=None, steps_s=None, **options):
  speeds = _steady(*(steps_s or [1.0] * len(stops)))
  stops = [[Stall(b, e, 'down') for b, e in own] for own in stops]
  return synchronous.run(stops, speeds, until_s, exchange, **options)


def test_a_group_without_stops_steps_all_the_time():
  done = _run([[]], 10.5)
  assert (done.groups[0].steps, done.goodput, done.uptime) == (10, 1.0, 1.0)


def test_a_stop_suspends_a_step():
  """Half of step 3 is made 0.5 s before the stop, half 0.5 s after it."""
  (group,) = _run([[(2.5, 4.5)]], 6.0).groups
  assert group.spans == ((0.0, 2.5), (4.5, 6.0))
  assert (group.steps, group.stepping_s, group.standing_s) == (4, 4.0, 2.0)


def test_stops_that_follow_each_other_are_one():
  (group,) = _run([[(1.0, 2.0), (2.0, 3.0)]], 5.0).groups
  assert group.spans == ((0.0, 1.0), (3.0, 5.0))


def test_a_stop_across_the_end_counts_up_to_it():
  (group,) = _run([[(3.0, 100.0)]], 4.0).groups
  assert (group.stepping_s, group.standing_s) == (3.0, 1.0)


def test_all_wait_for_the_slowest_after_every_h_steps():
  """H = 2. Group 0 stands from 1 to 4, so both begin step 2 at 5."""
  done = _run([[(1.0, 4.0)], []], 7.0, GroupExchange(2))
  slow, fast = done.groups
  assert slow.spans == ((0.0, 1.0), (4.0, 7.0))
  assert fast.spans == ((0.0, 2.0), (5.0, 7.0))
  assert (slow.waiting_s, fast.waiting_s) == (0.0, 3.0)
  assert done.goodput == pytest.approx((4 + 4) / 14)
  assert done.uptime == pytest.approx((2 + 3) / 7)


def test_the_exchange_takes_its_time():
  """H = 2, 0.5 s each: 0 … 2, 2.5 … 4.5, 5 … 6."""
  done = _run([[], []], 6.0, GroupExchange(2, exchange_s=0.5))
  assert done.groups[0].spans == ((0.0, 2.0), (2.5, 4.5), (5.0, 6.0))
  assert done.groups[0].waiting_s == done.groups[1].waiting_s == 1.0


def test_a_stop_while_it_waits_costs_a_group_nothing():
  done = _run([[(1.0, 4.0)], [(2.5, 4.5)]], 7.0, GroupExchange(2))
  fast = done.groups[1]
  assert (fast.stepping_s, fast.waiting_s, fast.standing_s) == (4.0, 1.0, 2.0)


def test_a_stop_that_outlasts_the_wait_is_waited_for_in_turn():
  """Group 0 is at the boundary at 5; group 1 stands until 6."""
  done = _run([[(1.0, 4.0)], [(2.5, 6.0)]], 8.0, GroupExchange(2))
  assert done.groups[0].spans == ((0.0, 1.0), (4.0, 7.0))
  assert done.groups[1].spans == ((0.0, 2.0), (6.0, 8.0))


def test_overlap_hides_an_exchange():
  """s = 1, τ = 2: the result of boundary 1 is needed at step 3, not before."""
  done = _run([[], []], 10.0, GroupExchange(1, overlap_steps=2, exchange_s=2.0))
  assert done.goodput == 1.0


def test_an_exchange_longer_than_the_overlap_is_waited_for():
  """The result of boundary 1 comes at 4, one step after it was needed: each
  further boundary is 3 + 1 s behind the one three steps before."""
  done = _run([[], []], 11.0, GroupExchange(1, overlap_steps=2, exchange_s=3.0))
  assert done.groups[0].spans == ((0.0, 3.0), (4.0, 7.0), (8.0, 11.0))


def test_nobody_is_more_than_the_overlap_past_the_slowest():
  """s = 2, τ = 1: with boundary 2 unsent no group begins step 3."""
  done = _run([[(1.0, 6.0)], []], 8.0, GroupExchange(2, overlap_steps=1))
  assert done.groups[1].spans == ((0.0, 3.0), (7.0, 8.0))


@pytest.mark.parametrize(
  ('step', 'barrier'), [(0, 0), (2, 0), (3, 2), (4, 2), (5, 4)]
)
def test_the_barrier_of_a_step(step, barrier):
  assert GroupExchange(2, overlap_steps=1).barrier(step) == barrier


def test_uneven_steps_end_where_the_slowest_allows():
  """H = 1: a group of 2 s steps leads; the other works every other second."""
  done = _run([[], []], 8.0, GroupExchange(1), steps_s=[1.0, 2.0])
  assert [group.steps for group in done.groups] == [4, 4]
  assert done.goodput == pytest.approx(0.75)


def test_the_times_of_a_group_make_up_the_run():
  rng = random.Random(3)
  begins = sorted(rng.uniform(0, 500) for _ in range(20))
  stops = [[(b, b + 3.0) for b in begins[i::4]] for i in range(4)]
  speeds = [Speeds(1.0, 0.1, random.Random(i)) for i in range(4)]
  done = synchronous.run(
    [[Stall(b, e, 'down') for b, e in own] for own in stops],
    speeds, 500.0, GroupExchange(4, 1, 0.3),
  )  # fmt: skip
  for g in done.groups:
    parts = g.stepping_s + g.waiting_s + g.standing_s
    assert parts == pytest.approx(500.0)


def test_steps_without_all_slices_are_useful_in_part():
  """1 s with all slices, 3 s with half of them, standing, 2 s with all."""
  own = [Stall(4.0, 6.0, 'down')]
  done = synchronous.run(
    [own], _steady(1.0), 8.0, capacities=[((1.0, 0.5), (5.0, 1.0))]
  )
  assert done.groups[0].useful_s == 1 + 1.5 + 2
  assert done.goodput == 4.5 / 8
