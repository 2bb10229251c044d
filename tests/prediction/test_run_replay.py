# SPDX-License-Identifier: Apache-2.0
"""A run's folder is read; a twin is told its kills and its speeds, no more."""

import dataclasses
import itertools
import re
import shutil

import pytest

from diloco.faults import Fault
from diloco.metrics import goodput as metrics_goodput
from diloco.metrics import names
from diloco.pages.parts import ReportPage
from diloco.prediction import recorded as prediction_recorded
from diloco.prediction import report, twin
from diloco.prediction.recorded import NotPredictable, Speeds, measure
from tests.prediction import recorded

UNTIL_S = 40.0
# Learner 1 dies at 14 and 26: away for 4.2 s, then for 7.2.
AWAY = {1: ((14.0, 14.25, 18.25), (26.0, 26.25, 33.25))}
SPEEDS = Speeds(
  step_s=(0.1, 0.1),
  jitter=0.05,
  stall_share=0.0,
  sync_s=0.01,
  where='nowhere',
  learner_starts_s=(3.0, 3.0),
  syncer_starts_s=(5.0, 5.0),
)


@pytest.fixture(scope='module', name='workdir')
def fixture_workdir(tmp_path_factory):
  """Returns a folder that no test writes into."""
  return recorded.write(tmp_path_factory.mktemp('runs') / 'run', UNTIL_S, AWAY)


def silent(text):
  del text


def column(report: ReportPage, name: str, heading: str) -> list:
  found = next(part for part in report.parts if part.name == name)
  place = [c.name for c in found.columns].index(heading)
  return [row[place] for row in found.rows]


# The folder -------------------------------------------------------------------


def test_goodput_of_a_run_is_what_its_steps_say(workdir):
  """(2 · 40 − 4.25 − 7.25) of 80 s in steps, a tenth of each a stall."""
  run = prediction_recorded.read(workdir.root)
  assert run.until_s == pytest.approx(UNTIL_S, abs=0.01)
  assert run.goodput == pytest.approx(0.9 * 68.5 / 80, abs=1e-3)
  uptime = metrics_goodput.uptime(run.steps, 0.0, run.until_s)
  assert uptime == pytest.approx(1.0, abs=1e-3)
  assert len(run.rounds) == UNTIL_S / recorded.ROUND_S - 1


def test_kills_and_arrivals_of_a_run(workdir):
  run = prediction_recorded.read(workdir.root)
  assert prediction_recorded.kills(run) == (
    Fault(1, 14.0, 'kill', 'learner-1'),
    Fault(2, 26.0, 'kill', 'learner-1'),
  )
  assert prediction_recorded.arrivals(run) == pytest.approx((0, 0), abs=0.01)


def test_steps_between_two_records_count(tmp_path, workdir):
  sparse = recorded.write(tmp_path / 'sparse', UNTIL_S, AWAY, every=10)
  whole, some = (prediction_recorded.read(x.root) for x in (workdir, sparse))
  # What a process did after its last record is not known: up to 9 steps of
  # each of four lives.
  lost = len(whole.steps) - len(some.steps)
  assert 0 <= lost <= 4 * 9
  assert some.goodput == pytest.approx(whole.goodput, abs=0.06)


def test_a_torn_last_line_is_left_out(tmp_path, workdir):
  torn = shutil.copytree(workdir.root, tmp_path / 'torn')
  with (torn / 'metrics' / 'learner-0.jsonl').open('a') as file:
    file.write('{"step": 1')
  whole, found = map(prediction_recorded.read, (workdir.root, torn))
  assert found.steps == whole.steps


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
    prediction_recorded.read(root)


# What is measured -------------------------------------------------------------


def test_steps_are_measured_before_the_first_death_and_starts_at_returns(
  workdir,
):
  speeds = measure(prediction_recorded.read(workdir.root), 0.25)
  assert speeds.where == 'the 14.0 s before the first death'
  assert speeds.step_s == pytest.approx((recorded.STEP_S, recorded.STEP_S))
  assert speeds.stall_share == pytest.approx(0.1)
  assert speeds.learner_starts_s == pytest.approx((4.0, 7.0), abs=0.01)
  assert speeds.leave_s == 0.0


def test_a_start_without_a_syncer_is_not_measured(tmp_path):
  """It is away from 15 to 19, while learner 1 comes back for the first time."""
  run = recorded.write(tmp_path / 'run', UNTIL_S, AWAY)
  for at_s, event, detail in (
    (15.0, 'killed', 'SIGKILL, planned'),
    (15.1, 'exited', 'died of SIGKILL; restart'),
    (15.5, 'started', 'start 2'),
  ):
    record = recorded.event(at_s, 'syncer', event, detail)
    recorded.append(run.events, record)
  found = prediction_recorded.read(run.root)
  assert len(found.lives['syncer']) == 2
  speeds = measure(found, 0.25)
  assert speeds.learner_starts_s == pytest.approx((7.0,), abs=0.01)
  assert speeds.syncer_starts_s == pytest.approx((0.0,), abs=0.3)


def test_a_learner_that_leaves_is_no_death_and_takes_its_time(tmp_path):
  run = recorded.write(tmp_path / 'run', UNTIL_S, AWAY)
  text = run.events.read_text()
  run.events.write_text(
    text.replace('"killed"', '"stopped"').replace(
      'died of SIGKILL; restart', 'exited with code 0'
    )
  )
  found = prediction_recorded.read(run.root)
  assert prediction_recorded.kills(found) == ()
  assert measure(found, 0.05).leave_s == pytest.approx(0.2)


def test_a_run_in_which_a_learner_made_no_step_can_not_be_measured(workdir):
  found = prediction_recorded.read(workdir.root)
  others = tuple(step for step in found.steps if step.learner != 1)
  with pytest.raises(NotPredictable, match='learner 1 made no step after its'):
    measure(dataclasses.replace(found, steps=others), 0.25)


# What the twin does -----------------------------------------------------------


def simulated(kills, until_s=30.0, arrivals=(0.0, 0.0), speeds=SPEEDS):
  config = recorded.config()
  run = dataclasses.replace(config.run, restart_delay_s=1.0)
  return twin.simulate(
    dataclasses.replace(config, run=run),
    speeds,
    arrivals,
    [Fault(0, at_s, 'kill', target) for target, at_s in kills],
    (0.0, until_s),
    seed=0,
  )


def away_s(found, learner) -> list[float]:
  """The gaps between a learner's steps that are longer than a second."""
  steps = [s for s in found.steps if s.learner == learner]
  gaps = (
    after.end_s - after.step_s - before.end_s
    for before, after in itertools.pairwise(steps)
  )
  return [gap for gap in gaps if gap > 1.0]


def test_nobody_is_killed():
  calm = simulated([])
  assert calm.goodput == pytest.approx(1.0, abs=0.01)
  assert calm.participation(0) > 0.9
  assert calm.participation(7) is None


def test_a_kill_costs_the_delay_and_a_start_up():
  killed = simulated([('learner-1', 10.0)])
  assert away_s(killed, 1) == [pytest.approx(1.0 + 3.0, abs=0.3)]
  assert away_s(killed, 0) == []
  assert killed.goodput == pytest.approx(1 - 4.0 / 60, abs=0.01)


def test_who_is_killed_in_its_start_up_starts_anew():
  killed = simulated([('learner-1', 10.0), ('learner-1', 12.5)])
  assert away_s(killed, 1) == [pytest.approx(2.5 + 4.0, abs=0.3)]


def test_who_is_killed_before_its_first_step_starts_anew():
  killed = simulated([('learner-1', 2.0)], arrivals=(0.0, None))
  first = min(s.end_s for s in killed.steps if s.learner == 1)
  assert first == pytest.approx(2.0 + 4.0, abs=0.5)


def test_learners_go_on_without_the_syncer():
  killed = simulated([('syncer', 10.0)])
  assert killed.goodput == pytest.approx(1.0, abs=0.01)


def test_who_comes_back_waits_for_the_syncer():
  """Killed at 10, it would be back at 14; the syncer is away from 12 to 18."""
  killed = simulated([('learner-1', 10.0), ('syncer', 12.0)])
  assert away_s(killed, 1) == [pytest.approx(8.0, abs=0.8)]


def test_a_late_first_step_is_known():
  late = simulated([], arrivals=(0.0, 6.0))
  assert late.goodput == pytest.approx(0.9, abs=0.01)


def test_stalls_are_no_goodput():
  stalling = dataclasses.replace(SPEEDS, stall_share=0.2)
  assert simulated([], speeds=stalling).goodput == pytest.approx(0.8, abs=0.01)


def test_a_start_up_measured_once_varies():
  once = dataclasses.replace(SPEEDS, learner_starts_s=(3.0,))
  kills = [('learner-1', 10.0 * i) for i in range(1, 8)]
  gaps = away_s(simulated(kills, until_s=80.0, speeds=once), 1)
  assert len(set(gaps)) == 7
  assert sum(gaps) / 7 == pytest.approx(4.0, abs=0.6)


# The page ---------------------------------------------------------------------


def test_measured_and_predicted_stand_side_by_side(workdir):
  page = report.report(workdir.root, 8, silent)
  assert column(page, 'agreement', 'quantity')[0] == 'goodput, %'
  measured, predicted = (
    column(page, 'agreement', side)[0] for side in ('measured', 'predicted')
  )
  assert measured == pytest.approx(90 * 68.5 / 80, abs=0.1)
  # Of a predicted learner a death takes the step under way and what no round
  # has merged, two to three steps; the recorded deaths took nothing.
  assert predicted == pytest.approx(measured, abs=2.5)
  assert column(page, 'agreement', 'measured')[5] == pytest.approx(50, abs=1)


def test_the_same_seeds_give_the_same_page(workdir):
  pages = [report.report(workdir.root, 2, silent) for _ in range(2)]
  assert pages[0] == pages[1]


@pytest.mark.parametrize('at_s', [2.01, 10.0])
def test_a_learner_of_slices_goes_on_or_starts_again_without_one(at_s):
  """Before its first boundary it holds nothing, and starts as one that died."""
  config = recorded.config()
  sliced = dataclasses.replace(config.mesh, slices=2)
  found = twin.simulate(
    dataclasses.replace(config, mesh=sliced),
    dataclasses.replace(SPEEDS, reform_s=1.5, first_reform_s=1.5),
    (0.0, 2.0),
    [Fault(0, at_s, 'kill_slice', 'learner-1.0')],
    (0.0, 30.0),
    seed=0,
  )
  steps = [step.end_s for step in found.steps if step.learner == 1]
  assert any(step.learner == 1 and step.end_s > 25.0 for step in found.steps)
  gone_s = 3.0 if at_s < 3.0 else 1.5
  assert len([x for x in steps if at_s < x < at_s + 0.9 * gone_s]) <= 1
