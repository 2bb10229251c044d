# SPDX-License-Identifier: Apache-2.0
"""Goodput, uptime and the share of steps against closed forms."""

import dataclasses
import json
import random

import pytest

from diloco.metrics import goodput as metrics_goodput
from diloco.metrics.goodput import (
  RunningUptime,
  StepRecord,
  Work,
  stepping,
  uptime,
)


def steps_of(learner, start_s, count, step_s, stall_s=0.0):
  return [
    StepRecord(learner, start_s + (i + 1) * step_s, step_s, stall_s)
    for i in range(count)
  ]


def test_two_learners_that_always_step_have_goodput_one():
  steps = steps_of(0, 0, 10, 1.0) + steps_of(1, 0, 5, 2.0)
  assert stepping(steps, 2, 0, 10) == 1.0
  assert uptime(steps, 0, 10) == 1.0


def test_stalls_lower_goodput_and_not_uptime():
  steps = steps_of(0, 0, 10, 1.0, stall_s=0.25)
  assert stepping(steps, 1, 0, 10) == 0.75
  assert uptime(steps, 0, 10) == 1.0


def test_a_dead_learner_costs_its_share():
  # Learner 1 of 2 is gone from 4 to 8 of 10 seconds.
  steps = steps_of(0, 0, 10, 1.0)
  steps += steps_of(1, 0, 4, 1.0) + steps_of(1, 8, 2, 1.0)
  assert stepping(steps, 2, 0, 10) == pytest.approx(1 - 4 / 20)
  assert uptime(steps, 0, 10) == 1.0


def test_uptime_falls_only_when_all_are_gone():
  steps = steps_of(0, 0, 4, 1.0) + steps_of(1, 3, 2, 1.0)
  steps += steps_of(0, 8, 2, 1.0)
  assert uptime(steps, 0, 10) == pytest.approx(0.7)


def test_a_step_across_an_end_counts_with_its_share():
  # [−1, 3] of which a quarter stalls: inside are 3 s, 2.25 s productive.
  steps = [StepRecord(0, 3.0, 4.0, 1.0)]
  assert stepping(steps, 1, 0, 10) == pytest.approx(0.225)
  assert uptime(steps, 0, 2) == 1.0


def test_nothing_is_zero():
  assert stepping([], 3, 0, 1) == 0.0
  assert uptime([], 0, 1) == 0.0


def test_a_stall_beyond_its_step_is_no_negative_work():
  assert stepping([StepRecord(0, 1.0, 1.0, 1.5)], 1, 0, 1) == 0.0


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
  running = RunningUptime(start_s=0.0, slack_s=10.0)
  for i, step in enumerate(steps):
    running.add(step)
    if i % 7 == 0:
      up = running.at(step.end_s)
      done = steps[: i + 1]
      assert up == pytest.approx(uptime(done, 0.0, step.end_s))


def test_the_running_form_forgets():
  running = RunningUptime(start_s=0.0, slack_s=10.0)
  for step in steps_of(0, 0, 1000, 1.0):
    running.add(step)
    assert running.at(step.end_s) == pytest.approx(1.0)
  assert len(running._open[0]) <= 11


def test_reports_that_were_held_up_count_from_when_their_steps_were_made():
  running = RunningUptime(start_s=0.0)
  for step in steps_of(0, 0, 10, 1.0):
    running.add(step)
  for _ in range(20):  # All steps of 20 s are read at once.
    running.add(StepRecord(0, 30.0, 1.0, 0.0))
  assert running.at(30.0) == pytest.approx(1.0)
  running.add(StepRecord(0, 40.0, 1.0, 0.0))  # It really paused.
  assert running.at(40.0) == pytest.approx(31 / 40)


def test_a_restarted_process_goes_on_from_what_was_observed_before():
  first = RunningUptime(start_s=0.0)
  for step in steps_of(0, 0, 10, 1.0):
    first.add(step)
  assert first.counts(20.0) == (20.0, 10.0)
  second = RunningUptime(start_s=500.0, before=first.counts(20.0))
  assert second.at(500.0) == 0.5
  second.add(StepRecord(0, 510.0, 10.0, 0.0))
  assert second.at(510.0) == pytest.approx(20 / 30)


# Goodput ----------------------------------------------------------------------


def begun(learners: int) -> Work:
  """Greets all learners at −1 with process 7; they are ready at 0."""
  work = Work(learners)
  for learner in range(learners):
    work.join(learner, 7, -1.0)
    work.ready(0.0)
  return work


def train(work: Work, learner: int, first: int, last: int, process: int = 7):
  """Steps of 1 s each, of which a quarter is a stall."""
  for step in range(first, last + 1):
    work.step(learner, process, step, 0.75 * step)


def taped(work: Work, *later: dict) -> Work:
  """Returns the work as a reader of the event log finds it."""
  line = {
    'time_s': 1.0,
    'kind': 'Worked',
    'begin_s': work.begin_s,
    'learners': [dataclasses.asdict(x) for x in work.learners.values()],
  }
  lines = json.loads(json.dumps([line, *later]))
  return metrics_goodput.work_of_tape(reversed(lines), 2)


def test_learners_that_always_step_have_no_goodput_but_for_their_stalls():
  work = begun(2)
  train(work, 0, 1, 10)
  assert work.goodput(10.0) == pytest.approx(7.5 / 20)
  train(work, 1, 1, 10)
  assert work.goodput(10.0) == pytest.approx(0.75)


def test_before_a_learner_is_ready_there_is_no_goodput():
  work = Work(2)
  work.join(0, 7, 0.0)
  assert work.goodput(5.0) == 0.0


def test_steps_since_the_last_merged_boundary_are_lost_with_a_death():
  work = begun(1)
  train(work, 0, 1, 6)
  work.merge(0, 7, 4)
  assert work.goodput(10.0) == pytest.approx(4.5 / 10)
  work.leave(0, in_order=False)
  assert work.goodput(10.0) == pytest.approx(3.0 / 10)
  work.join(0, 8, 7.0)
  train(work, 0, 1, 2, process=8)
  assert work.goodput(10.0) == pytest.approx((3.0 + 1.5) / 10)


def test_slices_that_go_on_lose_what_came_after_their_boundary():
  work = begun(1)
  train(work, 0, 1, 6)
  work.merge(0, 7, 2)
  work.leave(0, in_order=False)
  work.join(0, 8, 7.0)
  assert work.goodput(10.0) == pytest.approx(2 * 0.75 / 10)
  work.reform(0, step=5, slices_share=2 / 3)
  assert work.goodput(10.0) == pytest.approx(5 * 0.75 / 10)
  train(work, 0, 1, 2, process=8)
  assert work.goodput(10.0) == pytest.approx((5 + 2 * 2 / 3) * 0.75 / 10)


def test_steps_until_the_last_checkpoint_are_not_lost():
  work = begun(1)
  train(work, 0, 1, 4)
  work.merge(0, 7, 2)
  work.step(0, 7, 5, 3.75, saved_step=3)
  work.leave(0, in_order=False)
  assert work.goodput(10.0) == pytest.approx(3 * 0.75 / 10)


def test_a_merge_may_come_before_the_report_of_its_step():
  work = begun(1)
  train(work, 0, 1, 3)
  work.merge(0, 7, 4)
  train(work, 0, 4, 5)
  work.leave(0, in_order=False)
  assert work.goodput(10.0) == pytest.approx(4 * 0.75 / 10)


def test_who_leaves_in_good_order_loses_nothing():
  work = begun(1)
  train(work, 0, 1, 4)
  work.leave(0, in_order=True)
  assert work.goodput(10.0) == pytest.approx(0.3)
  work.join(0, 8, 7.0)
  assert work.goodput(10.0) == pytest.approx(0.3)


def test_a_successor_without_a_word_of_the_death_makes_it_one():
  work = begun(1)
  train(work, 0, 1, 4)
  work.join(0, 8, 7.0)
  assert work.goodput(10.0) == 0.0


def test_a_session_that_is_lost_and_comes_back_costs_nothing():
  """Unheard steps cost nothing either: each report includes them all."""
  work = begun(1)
  train(work, 0, 1, 2)
  work.leave(0, in_order=False)
  work.join(0, 7, 5.0)
  train(work, 0, 6, 6)
  assert work.goodput(10.0) == pytest.approx(6 * 0.75 / 10)


def test_a_syncer_that_begins_anew_changes_no_useful_time():
  """The syncer goes on from its event log; a learner died meanwhile."""
  undisturbed, work = begun(2), begun(2)
  for each in (undisturbed, work):
    train(each, 0, 1, 4)
    train(each, 1, 1, 4)
    each.merge(1, 7, 2)
  work = taped(work)
  work.forget_sessions()
  for each in (undisturbed, work):
    each.join(0, 7, 5.0)
    train(each, 0, 8, 8)
    each.join(1, 8, 6.0)
    train(each, 1, 1, 3, process=8)
    each.end(10.0)
  found = work.goodput(11.0)
  assert found == undisturbed.goodput(11.0)
  assert found == pytest.approx(0.75 * (8 + 2 + 3) / 20)
  assert taped(work, {'time_s': 10.0, 'kind': 'End'}).goodput(99.0) == found


def test_a_learner_that_joins_by_hand_is_allocated_from_then_on():
  """Two planned learners and a third from 5 s on, never idle: 100 %."""
  work = begun(2)
  work.join(2, 7, 5.0)
  for learner, steps in ((0, 10), (1, 10), (2, 5)):
    work.step(learner, 7, steps, float(steps))
  assert work.goodput(10.0) == 1.0
  work.step(2, 7, 6, 6.0)  # Its clock is faster.
  assert work.goodput(10.0) == 1.0
  work.leave(2, in_order=False)
  assert work.goodput(20.0) == pytest.approx(20 / (2 * 20 + 15))


def test_a_visitor_is_not_allocated_while_it_has_left():
  """Two planned learners; a third from 2 s to 4 s, and from 8 s on."""
  work = begun(2)
  for planned in (0, 1):
    work.step(planned, 7, 10, 10.0)
  work.join(2, 7, 2.0)
  work.step(2, 7, 2, 2.0)
  work.leave(2, in_order=True, at_s=4.0)
  assert work.goodput(10.0) == 1.0
  assert taped(work).goodput(10.0) == 1.0
  work.join(2, 8, 8.0)
  work.step(2, 8, 1, 1.0)
  assert work.goodput(10.0) == pytest.approx((20 + 3) / (20 + 4))


def test_a_planned_learner_is_allocated_while_it_has_left():
  work = begun(1)
  work.step(0, 7, 5, 5.0)
  work.leave(0, in_order=True, at_s=5.0)
  assert work.goodput(10.0) == 0.5


def test_a_step_of_a_process_that_was_replaced_counts_nothing():
  work = begun(1)
  work.join(0, 8, 1.0)
  train(work, 0, 1, 4, process=7)
  assert work.goodput(10.0) == 0.0


def test_marks_of_a_learner_that_is_never_merged_are_bounded():
  work = begun(1)
  train(work, 0, 1, 5000)
  assert len(work._marks[0]) == metrics_goodput.MARKS_MAX


def test_a_tape_without_such_a_line_says_nothing():
  assert (
    metrics_goodput.work_of_tape([{'time_s': 1.0, 'kind': 'End'}], 2) is None
  )
