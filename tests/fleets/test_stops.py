# SPDX-License-Identifier: Apache-2.0
"""Checks when a learner stands, on traces made by hand: pauses of 10 s."""

import pytest

from diloco.fleets import failures
from diloco.fleets.failures import Interruption, Stall


def _trace(*times: tuple[float, float]):
  return tuple(Interruption(at_s, 0.5, repair_s) for at_s, repair_s in times)


def _elastic(*times, until_s=1000.0):
  return failures.elastic(_trace(*times), 10.0, until_s)


def _waiting(*times, until_s=1000.0):
  return failures.waiting(_trace(*times), 10.0, until_s)


def test_a_lost_slice_costs_a_pause_and_its_return_another():
  assert _elastic((100, 60)) == (
    Stall(100, 110, 'down'), Stall(160, 170, 'up'),
  )  # fmt: skip


def test_what_breaks_during_a_pause_costs_nothing_then_or_later():
  """It costs nothing at 105, when the other pauses, nor at 205."""
  assert _elastic((100, 60), (105, 100)) == _elastic((100, 60))


def test_a_return_during_a_pause_is_absorbed():
  """The return of the first, at 160, falls into the second's pause."""
  assert _elastic((100, 60), (155, 200)) == (
    Stall(100, 110, 'down'), Stall(155, 165, 'down'), Stall(355, 365, 'up'),
  )  # fmt: skip


def test_a_return_during_its_own_pause_is_absorbed():
  assert _elastic((100, 5)) == (Stall(100, 110, 'down'),)


def test_what_breaks_while_the_learner_grows_is_absorbed():
  assert _elastic((100, 60), (165, 60)) == _elastic((100, 60))


def test_the_learner_runs_at_the_end_of_a_pause():
  """[begin, end): what breaks at the very end costs a pause of its own."""
  assert _elastic((100, 900), (110, 900)) == (
    Stall(100, 110, 'down'), Stall(110, 120, 'down'),
  )  # fmt: skip


def test_slices_return_in_their_own_order():
  assert _elastic((100, 300), (200, 50)) == (
    Stall(100, 110, 'down'), Stall(200, 210, 'down'),
    Stall(250, 260, 'up'), Stall(400, 410, 'up'),
  )  # fmt: skip


def test_no_pause_begins_after_the_end_of_the_run():
  assert _elastic((100, 60), (995, 60), until_s=150.0) == (
    Stall(100, 110, 'down'),
  )


def test_without_elasticity_a_learner_stands_for_repair_and_pause():
  assert _waiting((100, 60)) == (Stall(100, 170, 'repair'),)


def test_what_breaks_meanwhile_is_repaired_meanwhile():
  assert _waiting((100, 60), (120, 500), (169, 500)) == (
    Stall(100, 170, 'repair'),
  )


def test_what_breaks_afterwards_is_waited_for():
  assert _waiting((100, 60), (170, 20)) == (
    Stall(100, 170, 'repair'), Stall(170, 200, 'repair'),
  )  # fmt: skip


def test_no_repair_is_waited_for_after_the_end_of_the_run():
  assert _waiting((100, 60), until_s=100.0) == ()


@pytest.mark.parametrize('rule', [failures.elastic, failures.waiting])
def test_without_failures_nobody_stands(rule):
  assert rule((), 10.0, 1000.0) == ()


# What is left ---------------------------------------------------------------


def test_a_slice_is_missed_until_it_is_back():
  trace = _trace((100, 300), (200, 50))
  own = failures.elastic(trace, 10.0, 1000.0)
  assert failures.capacities(trace, own, 0.25) == (
    (100, 0.75), (200, 0.5), (250, 0.75), (400, 1.0),
  )  # fmt: skip


def test_what_broke_during_a_pause_is_not_missed():
  trace = _trace((100, 60), (105, 100))
  own = failures.elastic(trace, 10.0, 1000.0)
  assert failures.capacities(trace, own, 0.25) == ((100, 0.75), (160, 1.0))


def test_nobody_has_less_than_nothing():
  trace = _trace((100, 300), (200, 300))
  own = failures.elastic(trace, 10.0, 1000.0)
  assert min(s for _, s in failures.capacities(trace, own, 0.6)) == 0.0


def test_a_group_without_all_slices_is_useful_in_part():
  """1 s with all slices, 3 s with half of them, standing, 2 s with all."""
  stops, shares = [Stall(4.0, 6.0, 'down')], ((1.0, 0.5), (5.0, 1.0))
  assert failures.running_s(stops, shares, 8.0) == (1 + 1.5 + 2, 6.0)


def test_a_stop_across_the_end_counts_up_to_it():
  stops = [Stall(3.0, 100.0, 'down'), Stall(100.0, 110.0, 'up')]
  assert failures.running_s(stops, (), 4.0) == (3.0, 3.0)


def test_a_clock_that_starts_later_is_in_the_middle_of_things():
  own = (
    Stall(100, 110, 'down'),
    Stall(155, 165, 'down'),
    Stall(200, 210, 'up'),
  )
  assert failures.stops_from(own, 160.0) == (
    Stall(0, 5, 'down'), Stall(40, 50, 'up'),
  )  # fmt: skip
  shares = ((100, 0.75), (155, 0.5), (200, 0.75))
  assert failures.capacities_from(shares, 160.0) == ((0.0, 0.5), (40.0, 0.75))
  assert failures.capacities_from(shares, 50.0)[0] == (50.0, 0.75)
