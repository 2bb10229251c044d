# SPDX-License-Identifier: Apache-2.0
"""Slices are lost, come back, and are kept out for longer if they flap."""

from launch.slices import DELAY_MAX_S, FLAPS_S, LiveSlices


def _lose(slices: LiveSlices, lost: int, now_s: float) -> None:
  kept = {i: i != lost for i in slices.live}
  assert slices.ended(kept, now_s) == [lost]


def _come_back(slices: LiveSlices, now_s: float) -> list[int]:
  asked = slices.due(now_s)
  assert slices.due(now_s) == []  # Once.
  assert slices.ended(dict.fromkeys(slices.live, True), now_s) == []
  return asked


def test_a_lost_slice_comes_back_after_its_delay():
  slices = LiveSlices(3, delay_s=10)
  _lose(slices, 0, now_s=100)
  assert slices.live == [1, 2]
  _lose(slices, 2, now_s=105)
  assert slices.live == [1]
  assert slices.due(109.9) == []
  assert _come_back(slices, 110) == [0]
  assert slices.live == [0, 1]
  assert _come_back(slices, 120) == [2]
  assert slices.live == [0, 1, 2]


def test_one_that_flaps_is_kept_out_for_twice_as_long():
  slices, now_s, delay_s = LiveSlices(2, delay_s=10), 0.0, 10.0
  for _ in range(9):
    _lose(slices, 1, now_s)
    assert slices.due(now_s + delay_s - 0.1) == []
    now_s += delay_s
    assert _come_back(slices, now_s) == [1]
    delay_s = min(2 * delay_s, DELAY_MAX_S)
  now_s += FLAPS_S  # It has taken part for long.
  _lose(slices, 1, now_s)
  assert slices.due(now_s + 10) == [1]


def test_where_none_is_left_all_start_again():
  slices = LiveSlices(3, delay_s=10)
  _lose(slices, 1, now_s=0)
  assert slices.ended({0: False, 2: False}, 5) == [0, 2]
  assert slices.live == [0, 1, 2] and slices.due(100) == []


def test_a_slice_that_was_asked_for_may_be_lost_with_another():
  slices = LiveSlices(3, delay_s=10)
  _lose(slices, 1, now_s=0)
  assert slices.due(10) == [1]
  assert slices.ended({0: True, 2: False}, 10) == [2]
  assert slices.live == [0, 1]


def test_one_that_is_kept_away_comes_back_when_it_is_told_to():
  slices = LiveSlices(2, delay_s=10.0)
  slices.keep_away()
  _lose(slices, 1, now_s=0.0)
  assert not slices.due(1e6)
  slices.take_back()
  assert slices.due(0.0) == [1]
