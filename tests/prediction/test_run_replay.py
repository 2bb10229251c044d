# SPDX-License-Identifier: Apache-2.0
"""A run's folder is read; a prediction is told its kills, no more."""

import dataclasses
import itertools
import random
import re
import shutil

import pytest

from diloco.metrics import names
from diloco.pages.parts import ReportPage, Table
from diloco.prediction import history as prediction_history
from diloco.prediction import report
from diloco.prediction.history import NotPredictable
from diloco.prediction.prediction import (
  Calibration,
  Measured,
  PredictionInputs,
  calibrate,
  predict,
)
from diloco.simulator.network import SYNCER
from tests.prediction import recorded

UNTIL_S = 40.0
# Learner 1 dies at 14 and 26: away for 4.2 s, then for 7.2.
AWAY = {1: ((14.0, 14.25, 18.25), (26.0, 26.25, 33.25))}
SPEEDS = Calibration(
  step_s=(0.1, 0.1),
  jitter=0.05,
  stall_share=0.0,
  sync_s=0.01,
  where='nowhere',
  learner_start_s=Measured((3.0, 3.0), (), 'nowhere'),
  syncer_start_s=Measured((5.0, 5.0), (), 'nowhere'),
)


@pytest.fixture(scope='module', name='workdir')
def fixture_workdir(tmp_path_factory):
  """Returns a folder that no test writes into."""
  return recorded.write(tmp_path_factory.mktemp('runs') / 'run', UNTIL_S, AWAY)


def silent(text):
  del text


def table(report: ReportPage, name: str) -> Table:
  return next(part for part in report.parts if part.name == name)


def column(report: ReportPage, name: str, heading: str) -> list:
  found = table(report, name)
  place = [c.name for c in found.columns].index(heading)
  return [row[place] for row in found.rows]


# The folder -------------------------------------------------------------------


def test_goodput_of_a_run_is_what_its_steps_say(workdir):
  """(2 · 40 − 4.25 − 7.25) of 80 s in steps, a tenth of each a stall."""
  history = prediction_history.read(workdir.root)
  assert history.until_s == pytest.approx(UNTIL_S, abs=0.01)
  assert history.goodput == pytest.approx(0.9 * 68.5 / 80, abs=1e-3)
  assert history.uptime == pytest.approx(1.0, abs=1e-3)


def test_lives_of_a_run(workdir):
  first, second, third = prediction_history.read(workdir.root).lives[
    'learner-1'
  ]
  assert (first.started_s, first.ended_s) == (-recorded.FIRST_START_S, 14.0)
  assert first.death == 'killed: SIGKILL, planned'
  assert second.started_s == pytest.approx(14.25)
  assert second.spoke_s == pytest.approx(18.2)
  assert second.stepped_s == pytest.approx(18.25, abs=0.01)
  assert (third.ended_s, third.death) == (float('inf'), '')


def test_participation_and_rounds(workdir):
  history = prediction_history.read(workdir.root)
  assert len(history.closes) == UNTIL_S / recorded.ROUND_S - 1
  assert history.participation(0) == pytest.approx(0.5, abs=0.01)


def test_steps_between_two_records_count(tmp_path, workdir):
  sparse = recorded.write(tmp_path / 'sparse', UNTIL_S, AWAY, every=10)
  whole, some = (prediction_history.read(w.root) for w in (workdir, sparse))
  # What a process did after its last record is not known: up to 9 steps of
  # each of four lives.
  lost = len(whole.steps) - len(some.steps)
  assert 0 <= lost <= 4 * 9
  assert some.goodput == pytest.approx(whole.goodput, abs=0.06)


def test_a_torn_last_line_is_left_out(tmp_path, workdir):
  torn = shutil.copytree(workdir.root, tmp_path / 'torn')
  with (torn / 'metrics' / 'learner-0.jsonl').open('a') as file:
    file.write('{"step": 1')
  assert (
    prediction_history.read(torn).steps
    == prediction_history.read(workdir.root).steps
  )


def remove(name):
  return lambda root: (root / name).unlink()


def add(name, record):
  return lambda root: recorded.append(root / name, record)


@pytest.mark.parametrize(
  ('spoil', 'reason'),
  [
    (shutil.rmtree, 'is no folder'),
    (remove('config.json'), 'holds no run, there is no config.json'),
    (remove('events.jsonl'), 'events.jsonl: is missing; was it started by'),
    (remove('tape.jsonl'), 'tape.jsonl: is missing'),
    (lambda root: (root / 'config.json').write_text('{}'), 'missing'),
    (
      lambda root: (root / 'tape.jsonl').write_text('nonsense\n'),
      'tape.jsonl:1: Expecting value',
    ),
    (add('tape.jsonl', {'kind': 'End'}), 'has no time_s'),
    (
      add('tape.jsonl', recorded.line(9.0, 'joined', learner=7)),
      'learner-7 joined, whom the launcher did not start',
    ),
    (
      add('metrics/learner-0.jsonl', {'step': 9, names.TIME: 0.0}),
      'has no perf/step_s, perf/stall_s',
    ),
    (
      add('events.jsonl', recorded.event(9.0, 'learner-0', 'paused', '')),
      "learner-0 was 'paused'",
    ),
    (
      add('events.jsonl', recorded.event(99.0, 'syncer', 'started', 'start 1')),
      'was stopped and continued',
    ),
  ],
)
def test_what_is_no_run_is_refused(tmp_path, workdir, spoil, reason):
  root = shutil.copytree(workdir.root, tmp_path / 'spoilt')
  spoil(root)
  with pytest.raises(NotPredictable, match=re.escape(reason)):
    prediction_history.read(root)


# What a prediction is given ---------------------------------------------------


def test_calm_is_before_the_first_death(workdir):
  speeds = calibrate(prediction_history.read(workdir.root), returns_max=1)
  assert speeds.where == 'the 14.0 s before the first death'
  assert speeds.step_s == pytest.approx((recorded.STEP_S, recorded.STEP_S))
  assert speeds.stall_share == pytest.approx(0.1)
  assert speeds.learner_start_s.values == pytest.approx((4.0,), abs=0.01)


def test_a_run_in_which_a_learner_made_no_step_can_not_be_measured(workdir):
  found = prediction_history.read(workdir.root)
  others = tuple(step for step in found.steps if step.learner != 1)
  with pytest.raises(NotPredictable, match='learner 1 made no step after its'):
    calibrate(dataclasses.replace(found, steps=others))


def test_of_another_run_all_returns_are_known(workdir):
  speeds = calibrate(prediction_history.read(workdir.root))
  assert speeds.learner_start_s.values == pytest.approx((4.0, 7.0), abs=0.01)


def test_the_second_down_time_is_not_known(tmp_path, workdir):
  """The second down time is another here; the prediction is the same."""
  away = {1: (AWAY[1][0], (26.0, 26.25, 28.25))}
  other = recorded.write(tmp_path / 'other', UNTIL_S, away)
  pages = [report.report(w.root, 2, silent) for w in (workdir, other)]
  for name, heading in (
    ('agreement', 'quantity'),
    ('deaths', 'process'),
    ('learners', 'quantity'),
  ):
    predicted = [
      [
        guess
        for what, guess in zip(
          column(page, name, heading),
          column(page, name, 'predicted'),
          strict=True,
        )
        if what != 'goodput, %, start-ups known'  # That row does know it.
      ]
      for page in pages
    ]
    assert predicted[0] == predicted[1], name
  measured = [column(page, 'agreement', 'measured') for page in pages]
  assert measured[0] != measured[1]


# What it predicts -------------------------------------------------------------


def plan(kills, until_s=30.0, restart_delay_s=1.0) -> PredictionInputs:
  config = recorded.config()
  run = dataclasses.replace(config.run, restart_delay_s=restart_delay_s)
  config = dataclasses.replace(config, run=run)
  return PredictionInputs(config, until_s, {0: 0.0, 1: 0.0}, tuple(kills))


def away_s(prediction, learner) -> list[float]:
  """The gaps between a learner's steps that are longer than a second."""
  steps = [s for s in prediction.steps if s.learner == learner]
  gaps = (
    after.end_s - after.step_s - before.end_s
    for before, after in itertools.pairwise(steps)
  )
  return [gap for gap in gaps if gap > 1.0]


def test_nobody_is_killed():
  calm = predict(plan([]), SPEEDS, seed=0)
  assert calm.goodput == pytest.approx(1.0, abs=0.01)
  assert calm.deaths == ()


def test_a_kill_costs_the_delay_and_a_start_up():
  killed = predict(plan([(1, 10.0)]), SPEEDS, seed=0)
  assert away_s(killed, 1) == [pytest.approx(1.0 + 3.0, abs=0.3)]
  assert away_s(killed, 0) == []
  assert killed.goodput == pytest.approx(1 - 4.0 / 60, abs=0.01)


def test_who_is_killed_in_its_start_up_starts_anew():
  killed = predict(plan([(1, 10.0), (1, 12.5)]), SPEEDS, seed=0)
  assert away_s(killed, 1) == [pytest.approx(2.5 + 4.0, abs=0.3)]


def test_learners_go_on_without_the_syncer():
  killed = predict(plan([(SYNCER, 10.0)]), SPEEDS, seed=0)
  assert killed.goodput == pytest.approx(1.0, abs=0.01)


def test_who_comes_back_waits_for_the_syncer():
  """Killed at 10, it would be back at 14; the syncer is away from 12 to 18."""
  killed = predict(plan([(1, 10.0), (SYNCER, 12.0)]), SPEEDS, seed=0)
  assert away_s(killed, 1) == [pytest.approx(8.0, abs=0.8)]


def test_a_late_first_step_is_known():
  late = dataclasses.replace(plan([]), arrivals={0: 0.0, 1: 6.0})
  assert predict(late, SPEEDS, seed=0).goodput == pytest.approx(0.9, abs=0.01)


def test_stalls_are_no_goodput():
  stalling = dataclasses.replace(SPEEDS, stall_share=0.2)
  found = predict(plan([]), stalling, seed=0)
  assert found.goodput == pytest.approx(0.8, abs=0.01)


def test_a_start_up_measured_once_varies():
  once = Measured((4.0,), (), '')
  drawn = [once.draw(random.Random(seed)) for seed in range(200)]
  assert sum(drawn) / len(drawn) == pytest.approx(4.0, abs=0.2)
  assert len(set(drawn)) == len(drawn)


# The page ---------------------------------------------------------------------


def test_measured_and_predicted_stand_side_by_side(workdir):
  page = report.report(workdir.root, 8, silent)
  measured = prediction_history.read(workdir.root).goodput
  row = table(page, 'agreement').rows[0]
  assert row[:2] == ('goodput, %', pytest.approx(100 * measured))
  # The second start-up took 3 s more than what the first one lets expect, and
  # the recorded launcher waited for 0.25 s where the configuration has 0.2. Of
  # a predicted learner a death takes the step under way and what no round has
  # merged, two to three steps; the recorded deaths took nothing.
  lost_s = 2 * 2.5 * recorded.STEP_S
  expected = pytest.approx(100 * 0.9 * (3.1 - lost_s) / 80, abs=1.5)
  assert row[4] == expected
  assert column(page, 'deaths', 'was given') == ['its start-up', None]


def test_the_same_seeds_give_the_same_page(workdir):
  pages = [report.report(workdir.root, 2, silent) for _ in range(2)]
  assert pages[0] == pages[1]


def test_the_lives_stand_over_one_another(workdir):
  page = report.report(workdir.root, 1, silent)
  lives = next(part for part in page.parts if part.name == 'lives')
  assert lives.lanes[-2:] == ('learner-1, measured', 'learner-1, predicted')
  measured, predicted = (
    [span.kind for span in lives.spans if span.lane == lane]
    for lane in (len(lives.lanes) - 2, len(lives.lanes) - 1)
  )
  there_and_away = ['step', 'dead', 'bootstrap']
  assert measured == predicted == [*there_and_away, *there_and_away, 'step']


def test_speeds_of_a_run_with_other_learners_are_refused(tmp_path, workdir):
  other = recorded.write(tmp_path / 'other', UNTIL_S, {}, learners=1)
  with pytest.raises(NotPredictable, match='1 learners, the run to be'):
    report.report(workdir.root, 1, silent, calibration=other.root)
