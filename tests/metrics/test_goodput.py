# SPDX-License-Identifier: Apache-2.0
"""Goodput and uptime against closed forms."""

import random

import pytest

from diloco.metrics.goodput import (
  RunningGoodput,
  StepRecord,
  goodput,
  uptime,
)


def steps_of(learner, start_s, count, step_s, stall_s=0.0):
  return [
    StepRecord(learner, start_s + (i + 1) * step_s, step_s, stall_s)
    for i in range(count)
  ]


def test_two_learners_that_always_step_have_goodput_one():
  steps = steps_of(0, 0, 10, 1.0) + steps_of(1, 0, 5, 2.0)
  assert goodput(steps, 2, 0, 10) == 1.0
  assert uptime(steps, 0, 10) == 1.0


def test_stalls_lower_goodput_and_not_uptime():
  steps = steps_of(0, 0, 10, 1.0, stall_s=0.25)
  assert goodput(steps, 1, 0, 10) == 0.75
  assert uptime(steps, 0, 10) == 1.0


def test_a_dead_learner_costs_its_share():
  # Learner 1 of 2 is gone from 4 to 8 of 10 seconds.
  steps = steps_of(0, 0, 10, 1.0)
  steps += steps_of(1, 0, 4, 1.0) + steps_of(1, 8, 2, 1.0)
  assert goodput(steps, 2, 0, 10) == pytest.approx(1 - 4 / 20)
  assert uptime(steps, 0, 10) == 1.0


def test_uptime_falls_only_when_all_are_gone():
  steps = steps_of(0, 0, 4, 1.0) + steps_of(1, 3, 2, 1.0)
  steps += steps_of(0, 8, 2, 1.0)
  assert uptime(steps, 0, 10) == pytest.approx(0.7)


def test_a_step_across_an_end_counts_with_its_share():
  # [−1, 3] of which a quarter stalls: inside are 3 s, 2.25 s productive.
  steps = [StepRecord(0, 3.0, 4.0, 1.0)]
  assert goodput(steps, 1, 0, 10) == pytest.approx(0.225)
  assert uptime(steps, 0, 2) == 1.0


def test_nothing_is_zero():
  assert goodput([], 3, 0, 1) == 0.0
  assert uptime([], 0, 1) == 0.0


def test_a_stall_beyond_its_step_is_no_negative_work():
  assert goodput([StepRecord(0, 1.0, 1.0, 1.5)], 1, 0, 1) == 0.0


@pytest.mark.parametrize('seed', range(5))
def test_the_running_form_equals_the_formula(seed):
  rng = random.Random(seed)
  steps, now_s = [], {0: 0.0, 1: 3.0, 2: 1.0}
  for _ in range(300):
    learner = rng.randrange(3)
    pause_s = rng.choice([0, 0, 5.0])
    step_s = rng.uniform(0.5, 2.0)
    end_s = now_s[learner] + pause_s + step_s
    now_s[learner] = end_s
    steps.append(StepRecord(learner, end_s, step_s, rng.uniform(0, step_s)))
  steps.sort(key=lambda step: step.end_s)
  running = RunningGoodput(3, start_s=0.0, slack_s=10.0)
  for i, step in enumerate(steps):
    running.add(step)
    if i % 7 == 0:
      good, up = running.at(step.end_s)
      done = steps[: i + 1]
      assert good == pytest.approx(goodput(done, 3, 0.0, step.end_s))
      assert up == pytest.approx(uptime(done, 0.0, step.end_s))


def test_the_running_form_forgets():
  running = RunningGoodput(1, start_s=0.0, slack_s=10.0)
  for step in steps_of(0, 0, 1000, 1.0):
    running.add(step)
    assert running.at(step.end_s) == (1.0, pytest.approx(1.0))
  assert len(running._open) <= 11


def test_a_learner_that_joins_by_hand_is_allocated_from_then_on():
  """Two planned learners and a third from 5 s on, never idle: 100 %."""
  steps = [
    StepRecord(learner, end_s, 1.0, 0.0)
    for learner, begin_s in ((0, 0), (1, 0), (2, 5))
    for end_s in range(begin_s + 1, 11)
  ]
  assert goodput(steps, 2, 0.0, 10.0) == pytest.approx(1.0)
  running = RunningGoodput(2, 0.0)
  for step in sorted(steps, key=lambda step: step.end_s):
    running.add(step)
  assert running.at(10.0)[0] == pytest.approx(1.0)
