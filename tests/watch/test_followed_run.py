# SPDX-License-Identifier: Apache-2.0
"""Checks what is known of a run while its folder grows."""

import json
import pathlib

import pytest

from diloco.metrics import jsonl, names, recorded_run, status
from diloco.metrics.recorded_run import FollowedRun, NoReport, ThinnedCurve
from diloco.metrics.workdir import EVALUATOR, Workdir
from diloco.pages import page
from diloco.watch.folders import FollowedFolders
from tests.prediction import recorded

UNTIL_S = 20.0
AWAY = {1: ((8.0, 8.25, 10.0),)}
FILES = ('tape.jsonl', 'events.jsonl', 'metrics/learner-0.jsonl',
         'metrics/learner-1.jsonl')  # fmt: skip


@pytest.fixture(name='workdir')
def fixture_workdir(tmp_path):
  return recorded.write(tmp_path / 'run', UNTIL_S, AWAY)


def followed(workdir: Workdir) -> FollowedRun:
  run = FollowedRun(workdir.root)
  run.update()
  return run


def told(step: int, at_s: float) -> status.RunStatus:
  learner = status.LearnerStatus(
    learner=0, state='live', step=12, steps=12, loss=2.5, tokens_per_s=900.0,
    round=3, lag_versions=1, bytes_up=40, bytes_down=50, participation=0.75,
    incarnations=1, stall_max_s=0.02, age_steps=0.5,
  )  # fmt: skip
  return status.RunStatus(
    run='tests-tiny', time_s=recorded.BEGAN_S + at_s, step=step, total_steps=60,
    rounds=9, live=(0,), participants=(0,), quorum_s=0.1, grace_s=0.2,
    sync_s=0.1, goodput=0.9, uptime=1.0, bytes_up=40, bytes_down=50, refused=2,
    learners=(learner,), age_steps=0.5, old_share=0.1,
  )  # fmt: skip


def of_page(folders: FollowedFolders) -> dict:
  """All that the page shows of a run, at one time."""
  return page.as_data(folders.page()) | {'where': ''}


def grow(source: pathlib.Path, target: pathlib.Path, share: float) -> None:
  """Makes the files of `target` as long as a share of those of `source`."""
  for name in FILES:
    whole, path = (source / name).read_bytes(), target / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(whole[: round(share * len(whole))])


def test_what_is_read_piece_by_piece_is_what_is_read_at_once(workdir, tmp_path):
  """Pieces end within lines, and between a round's Merge and its Publish."""
  target = tmp_path / 'growing'
  target.mkdir()
  (target / 'config.json').write_text(workdir.config.read_text())
  growing = FollowedFolders([target])
  for i in range(101):
    grow(workdir.root, target, i / 100)
    growing.page()
  found = of_page(growing)
  assert found == of_page(FollowedFolders([workdir.root]))
  assert growing.status.rounds == 79 and not found['problem']


def test_a_second_look_reads_only_what_is_new(workdir, monkeypatch):
  parsed = []
  whole = jsonl._record
  monkeypatch.setattr(
    jsonl, '_record', lambda line, at: parsed.append(line) or whole(line, at)
  )
  run = followed(workdir)
  assert len(parsed) > 400
  parsed.clear()
  run.update()
  assert not parsed
  recorded.append(workdir.tape, recorded.line(UNTIL_S, 'refused', reason='no'))
  run.update()
  assert len(parsed) == 1
  assert run.kinds['refused'] == 1


def test_a_death_is_a_life_with_an_end_and_a_new_life(workdir):
  run = followed(workdir)
  first, second = run.lives()[0]['learner-1']
  assert first.ended_s - recorded.BEGAN_S == pytest.approx(8.0)
  assert 'SIGKILL' in first.death
  assert second.started_s - recorded.BEGAN_S == pytest.approx(8.25)
  assert second.used_s - recorded.BEGAN_S == pytest.approx(10.0, abs=0.01)
  assert second.ended_s == float('inf')
  assert run.deaths() == [first]


@pytest.mark.parametrize('is_over', [False, True])
def test_a_run_without_a_status_is_counted_from_its_tape(workdir, is_over):
  """The lab has no syncer's process, and no launcher."""
  events = jsonl.read_jsonl(workdir.events)
  workdir.events.unlink()
  recorded.append(
    workdir.events, *(each for each in events if each['event'] == 'started')
  )
  if is_over:
    workdir.result.write_text('{"goodput": 0.75}')
  else:
    lines = workdir.tape.read_text().splitlines(keepends=True)
    workdir.tape.write_text(''.join(x for x in lines if '"End"' not in x))
  run = followed(workdir)
  run.clock_s = lambda: recorded.BEGAN_S + UNTIL_S + 600.0
  assert run.state() == ('finished' if is_over else 'running')
  assert run.end_s() == run.last_s  # It has a clock of its own.
  counted = run.status
  assert (counted.step, counted.rounds) == (79, 79)
  assert counted.goodput == (0.75 if is_over else pytest.approx(0.855))
  first, *_ = counted.learners
  assert first.participation == pytest.approx(39 / 79)
  assert first.loss == recorded.LOSS
  how = run.states()
  assert how['learner-0'] == ('ended' if is_over else 'live')


def test_a_broken_result_is_a_problem_and_no_more(workdir):
  workdir.result.write_text('{}')
  run = followed(workdir)
  assert str(workdir.result) in run.problem
  assert len(run.rounds) == 79


def test_participation_and_goodput_are_curves(workdir):
  run = followed(workdir)
  for learner in run.learners.values():  # They take turns.
    assert [y for _, y in learner.merged.points()][:5] == [0.5] * 5
  ((_, goodput),) = run.goodput.points()
  assert goodput == pytest.approx(0.9 * (40 - 2) / 40, abs=0.01)


def test_held_out_losses_of_the_way_and_of_the_end(workdir):
  recorded.append(
    workdir.metrics(EVALUATOR),
    {
      'step': 30,
      names.TIME: recorded.BEGAN_S + 9.0,
      names.GLOBAL_STEP: 30.0,
      names.EVAL_LOSS: 3.5,
    },
  )
  run = followed(workdir)
  ((at_s, step, loss),) = run.heldout()
  assert (step, loss) == (30.0, 3.5)
  # Two learners until 9 s, one of them away from 8 s on.
  assert run.tokens_at(at_s) == pytest.approx(
    (9 + 8) / recorded.STEP_S * recorded.TOKENS, rel=0.02
  )
  status.write_evaluation(
    workdir.evaluation, status.Evaluation(2_000, 5.5, 1.5, None, None)
  )
  assert [x for *_, x in followed(workdir).heldout()] == [5.5, 3.5, 1.5]


def test_the_state_is_told_by_files_and_clock(workdir):
  exited = [
    line
    for line in workdir.events.read_text().splitlines()
    if json.loads(line)['event'] != 'exited'
  ]
  workdir.events.write_text('\n'.join(exited) + '\n')
  tape = [
    line
    for line in workdir.tape.read_text().splitlines(keepends=True)
    if '"End"' not in line
  ]
  workdir.tape.unlink()

  def state(at_s: float) -> str:
    run = followed(workdir)
    run.clock_s = lambda: recorded.BEGAN_S + at_s
    return run.state()

  assert state(0.0) == recorded_run.STARTING
  workdir.tape.write_text(next(x for x in tape if '"Started"' in x))
  assert state(0.0) == recorded_run.COMPILING
  workdir.tape.write_text(''.join(tape))
  status.write_status(workdir.status, told(10, 5.0))
  assert state(6.0) == recorded_run.RUNNING
  assert state(6.0 + recorded_run.SILENT_S) == recorded_run.SILENT
  ends = ('syncer', 'learner-0', 'learner-1')
  recorded.append(
    workdir.events,
    *(recorded.event(UNTIL_S, name, 'stopped', 'SIGTERM') for name in ends),
  )
  assert state(6.0) == recorded_run.STOPPED


def test_a_broken_status_is_said_and_the_last_one_stays(workdir):
  status.write_status(workdir.status, told(10, 5.0))
  run = followed(workdir)
  workdir.status.write_text('{')
  run.update()
  assert 'status.json' in run.problem
  assert run.status.step == 10


@pytest.mark.parametrize('make', [False, True])
def test_a_folder_without_a_run_is_refused(tmp_path, make):
  if make:
    (tmp_path / 'x').mkdir()
  with pytest.raises(NoReport, match='x: '):
    FollowedRun(tmp_path / 'x')


def test_a_course_stays_short_and_keeps_its_mean():
  course = ThinnedCurve(points_max=8)
  for i in range(1000):
    course.add(i, 2 * i)
  points = course.points()
  assert 4 <= len(points) <= 8
  assert all(y == 2 * x for x, y in points)
  assert points[0][0] < 128 and points[-1][0] > 900


def test_a_course_shows_its_last_values_at_once():
  course = ThinnedCurve(values_per_point=8)
  course.add(1.0, 5.0)
  assert course.points() == [(1.0, 5.0)]
