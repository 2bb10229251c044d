# SPDX-License-Identifier: Apache-2.0
"""Checks when a learner stands, on traces made by hand: pauses of 10 s."""

import pytest

from diloco.fleets import failures
from diloco.fleets.failures import Interruption, Stall


def _trace(*times: tuple[float, float]):
  return tuple(Interruption(at_s, 0.5, repair_s) for at_s, repair_s in times)


LOST = Stall(100, 110, 'down')  # At 100 s.
STANDS = Stall(100, 170, 'repair')
# By what is shown: interruptions (when, until the return), and the stops.
ELASTIC = {
  'a loss costs a pause, the return another': (
    [(100, 60)], [LOST, Stall(160, 170, 'up')]
  ),
  # At 105, when the other pauses, nor at 205.
  'what breaks during a pause costs nothing then or later': (
    [(100, 60), (105, 100)], [LOST, Stall(160, 170, 'up')]
  ),
  # That of the first, at 160, falls into the second's pause.
  'a return during a pause is absorbed': (
    [(100, 60), (155, 200)],
    [LOST, Stall(155, 165, 'down'), Stall(355, 365, 'up')],
  ),
  'a return during its own pause is absorbed': ([(100, 5)], [LOST]),
  'what breaks while the learner grows is absorbed': (
    [(100, 60), (165, 60)], [LOST, Stall(160, 170, 'up')]
  ),
  # [begin, end): what breaks at the very end costs a pause of its own.
  'the learner runs at the end of a pause': (
    [(100, 900), (110, 900)], [LOST, Stall(110, 120, 'down')]
  ),
  'slices return in their own order': (
    [(100, 300), (200, 50)],
    [LOST, Stall(200, 210, 'down'), Stall(250, 260, 'up'),
     Stall(400, 410, 'up')],
  ),
}  # fmt: skip
WAITING = {
  'it stands for repair and pause': ([(100, 60)], [STANDS]),
  'what breaks meanwhile is repaired meanwhile': (
    [(100, 60), (120, 500), (169, 500)], [STANDS]
  ),
  'what breaks afterwards is waited for': (
    [(100, 60), (170, 20)], [STANDS, Stall(170, 200, 'repair')]
  ),
}  # fmt: skip


@pytest.mark.parametrize('shown', [*ELASTIC, *WAITING])
def test_when_a_learner_stands(shown):
  rule = failures.elastic if shown in ELASTIC else failures.waiting
  times, stops = (ELASTIC | WAITING)[shown]
  assert rule(_trace(*times), 10.0, 1000.0) == tuple(stops)


def test_nobody_stands_after_the_end_of_the_run():
  trace = _trace((100, 60), (995, 60))
  assert failures.elastic(trace, 10.0, 150.0) == (LOST,)
  assert failures.waiting(trace, 10.0, 100.0) == ()


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
