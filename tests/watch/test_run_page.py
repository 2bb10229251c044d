# SPDX-License-Identifier: Apache-2.0
"""The page of runs: what is asked first comes first, and colours are honest."""

import dataclasses
import json
import shutil

import pytest

from diloco.metrics import figures, status
from diloco.metrics.recorded_run import FollowedRun, NoReport
from diloco.metrics.workdir import EVALUATOR
from diloco.pages.parts import Chart, Prose, Table
from diloco.watch import run_page
from diloco.watch.folders import FollowedFolders
from tests.golden.test_golden import unpack
from tests.prediction import recorded
from tests.watch.test_followed_run import AWAY, UNTIL_S, followed, told

EVALUATION = status.Evaluation(2_000, 5.5, 1.5, 2.0, None, 7.9, 2.16)


@pytest.fixture(name='workdir')
def fixture_workdir(tmp_path):
  return recorded.write(tmp_path / 'run', UNTIL_S, AWAY)


@pytest.fixture(scope='module', name='golden')
def fixture_golden(tmp_path_factory):
  """A real run of two learners, one of which was killed."""
  return unpack('run', tmp_path_factory.mktemp('golden'))


def page_of(*folders):
  return FollowedFolders(folders).page()


def part(report, name):
  return next(each for each in report.parts if each.name == name)


def going_on(workdir, *, dead: bool):
  """Cuts the run where learner 1 is dead, or before it dies."""
  until_s = recorded.BEGAN_S + (8.1 if dead else 7.0)
  for path in (workdir.tape, workdir.events):
    lines = path.read_text().splitlines(keepends=True)
    kept = [x for x in lines if json.loads(x)['time_s'] <= until_s]
    path.write_text(''.join(kept))
  learner = status.LearnerStatus
  status.write_status(
    workdir.status,
    status.RunStatus(
      run='tests-tiny',
      time_s=until_s,
      step=10,
      live=(0, 1),
      planned=2,
      learners=(
        learner(learner=0, state='live'),
        learner(learner=1, state='live'),
      ),
    ),
  )
  return until_s


@pytest.mark.parametrize(
  ('dead', 'text', 'tone'),
  [(False, 'running', 'good'), (True, '1 of 2 learners', 'wait')],
)
def test_green_says_running_only_while_every_learner_lives(
  workdir, dead, text, tone
):
  now_s = going_on(workdir, dead=dead)
  run = followed(workdir)
  run.clock_s = lambda: now_s
  badge = run_page.badge(run)
  assert (badge.text, badge.tone) == (text, tone)


def test_the_loss_of_the_model_comes_first_with_what_bigrams_reach(workdir):
  status.write_evaluation(workdir.evaluation, EVALUATION)
  over = dataclasses.replace(told(60, UNTIL_S), finished=True)
  status.write_summary(workdir.summary, over)
  first, *others = page_of(workdir.root).tiles
  assert (first.name, first.value) == ('held-out loss of Θ', '1.500')
  assert 'beats a table of bigrams, 2.000' in first.note
  assert first.large and not any(tile.large for tile in others)
  loss = part(page_of(workdir.root), 'loss')
  theta, bigrams, *training = loss.lines
  assert theta.ys == (5.5, 1.5) and theta.ink
  assert set(bigrams.ys) == {2.0} and bigrams.dashed
  assert len(training) == 2


def test_a_model_that_got_worse_is_called_so(workdir):
  worse = status.Evaluation(2_000, 5.5, 7.5, 2.0, None)
  status.write_evaluation(workdir.evaluation, worse)
  note = page_of(workdir.root).tiles[0].note
  assert 'not yet a table of bigrams' in note
  assert 'the best was 5.500, at step 0' in note


def test_before_an_evaluation_the_page_says_when_there_will_be_one(workdir):
  assert 'is evaluated' in page_of(workdir.root).tiles[0].note


def test_every_figure_of_the_table_is_on_the_page_under_its_name(workdir):
  """The page has no figure of its own."""
  status.write_status(workdir.status, told(10, 5.0))
  report = page_of(workdir.root)
  found = followed(workdir).status
  table = part(report, 'figures')
  shown = {row[0]: (row[1], row[2]) for row in table.rows}
  for figure in figures.shown(figures.RUN, figures.PAGE):
    value = figure.value(found)
    if value is not None:
      assert shown[figure.label] == (figure.text_in(found), value)
  for tile in report.tiles[1:]:
    figure = next(x for x in figures.RUN if x.label == tile.name)
    assert tile.value == figure.text(figure.value(found))


def test_a_sentence_says_what_a_death_cost(golden):
  report = page_of(golden)
  (told_,) = part(report, 'deaths').lines
  for words in (
    'learner-1 at ', 'down for ', 'lost 256 tokens',
    'inner state from learner 0', 'merged again ',
  ):  # fmt: skip
    assert words in told_
  names = [each.name for each in report.parts]
  assert names.index('deaths') < names.index('timeline') < names.index('loss')


def test_a_death_that_was_not_healed_says_so(workdir):
  going_on(workdir, dead=True)
  (told_,) = part(page_of(workdir.root), 'deaths').lines
  assert told_.endswith('s so far, has not come back.')


def test_shards_have_a_sentence_and_the_hosts_of_a_learner_one_together(
  workdir,
):
  with workdir.events.open('a') as events:
    for at_s, process, event, detail in (
      (0.0, 'shard-1', 'started', 'start 1'),
      (0.0, 'learner-0.1', 'started', 'start 1'),
      (5.0, 'shard-1', 'killed', 'by the plan'),
      (5.1, 'shard-1', 'exited', 'died of SIGKILL; restart 1'),
      (5.2, 'learner-0.1', 'exited', 'exited with code 75'),
      (6.5, 'shard-1', 'started', 'start 2'),
    ):
      line = {'process': process, 'event': event, 'pid': 1, 'detail': detail}
      at_s += recorded.BEGAN_S
      events.write(json.dumps({'time_s': at_s, **line}) + '\n')
  told_ = part(page_of(workdir.root), 'deaths').lines
  assert [x.split(' at ')[0] for x in told_] == ['shard-1', 'learner-1']
  assert told_[0].endswith('killed: by the plan: down for 1.5 s.')


def test_a_newcomer_that_has_left_is_not_absent_from_then_on():
  learner = status.LearnerStatus
  told_ = status.RunStatus(
    run='tests-tiny',
    step=10,
    planned=2,
    live=(0, 3),
    learners=(
      learner(learner=0, state='live', participation=0.9),
      learner(learner=1, state='gone', participation=0.7),
      learner(learner=2, state='gone', participation=0.1),
      learner(learner=3, state='live', participation=0.2),
    ),
  )
  [figure] = [x for x in figures.RUN if x.label == 'participation']
  assert figure.value(told_) == pytest.approx((0.9 + 0.7 + 0.2) / 3)


def test_model_protocol_and_machine_stand_in_one_sentence(golden):
  (sentence,) = page_of(golden).paragraphs
  for words in (
    '9,776 parameters', '2 learners (M)', 'quorum 1 (K)', '4 steps (H)',
    '2 fragments (P)', 'jax 0.10.2',
  ):  # fmt: skip
    assert words in sentence


def test_the_machine_is_known_where_a_learner_took_fragments_in_first(
  golden, tmp_path
):
  """As one does that joins after the first rounds have closed."""
  shutil.copytree(golden, tmp_path / 'run')
  tape = FollowedRun(tmp_path / 'run').workdir.learner_tape(0)
  lines = tape.read_text().splitlines(keepends=True)
  first = next(line for line in lines if json.loads(line)['kind'] == 'Apply')
  tape.write_text(''.join([first, *lines]))
  (sentence,) = page_of(tmp_path / 'run').paragraphs
  assert 'jax 0.10.2' in sentence


def test_what_f32_would_have_needed_is_said(golden):
  tiles = {tile.name: tile for tile in page_of(golden).tiles}
  assert (tiles['bytes up'].value, tiles['bytes up'].note) == (
    '459 kB', '(f32: 3.6 MB)',
  )  # fmt: skip


def test_lanes_show_the_dead_and_the_returning(workdir):
  timeline = part(page_of(workdir.root), 'timeline')
  lane = timeline.lanes.index('learner-1')
  kinds = [
    (span.kind, round(span.begin_s, 1), round(span.end_s, 1))
    for span in timeline.spans
    if span.lane == lane and span.kind != 'step'
  ]
  assert ('dead', 8.0, 8.2) in kinds
  assert ('bootstrap', 8.2, 10.0) in kinds
  assert (8.0, lane, 'death') in [
    (round(at_s, 1), where, word) for at_s, where, word in timeline.marks
  ]
  labels = {span.label for span in timeline.spans if span.kind == 'grace'}
  assert 'round 4 at step 4 merged 0' in labels


def test_a_pause_is_a_lane_s_pause(workdir):
  recorded.append(
    workdir.events,
    recorded.event(3.0, 'learner-0', 'paused', 'for 2 s'),
    recorded.event(5.0, 'learner-0', 'went on', ''),
  )
  timeline = part(page_of(workdir.root), 'timeline')
  (pause,) = [span for span in timeline.spans if span.kind == 'pause']
  assert (pause.lane, pause.begin_s, pause.end_s) == pytest.approx((0, 3, 5))


def test_several_runs_are_compared_first(workdir, tmp_path):
  other = tmp_path / 'elsewhere' / 'run'
  shutil.copytree(workdir.root, other)
  for folder in (workdir.root, other):
    path = FollowedRun(folder).workdir.evaluation
    status.write_evaluation(path, EVALUATION)
  report = page_of(workdir.root, other)
  first, loss, *_ = report.parts
  labels = [column.name for column in first.columns if not column.hidden]
  assert labels[1:3] == [f'{tmp_path.name}/run', 'elsewhere/run']
  assert [line.label for line in loss.lines] == labels[1:3]
  assert part(report, 'loss-tokens').lines[0].ys == (5.5, 1.5)
  assert {'timeline-0', 'timeline-1'} <= {each.name for each in report.parts}


def test_no_part_says_its_title_twice(workdir):
  report = page_of(workdir.root)
  titles = [each.title for each in report.parts]
  assert len(set(titles)) == len(titles)


def test_the_sample_stands_at_the_end(workdir):
  workdir.sample.write_text('once upon a time')
  *_, last = page_of(workdir.root).parts
  assert isinstance(last, Prose) and last.lines == ('once upon a time',)


def test_nothing_but_a_configuration_is_a_page_too(workdir):
  for path in (workdir.tape, workdir.events):
    path.unlink()
  shutil.rmtree(workdir.root / 'metrics')
  report = page_of(workdir.root)
  assert report.badge.text == 'starting'
  assert all(x.is_empty for x in report.parts if isinstance(x, Chart))


def test_a_corrupt_line_is_named(workdir):
  recorded.append(workdir.tape, recorded.line(UNTIL_S, 'Publish', round=99))
  assert 'Publish' in page_of(workdir.root).problem


def test_faults_of_a_plan_have_a_table(workdir):
  workdir.chaos.mkdir()
  hit = {
    'number': 1, 'kind': 'cut', 'target': 'learner-1', 'begun_s': 5.0,
    'counted': 70, 'back_s': 4.5, 'lost_s': 0.0, 'stall_s': 0.03, 'failed': '',
  }  # fmt: skip
  (workdir.chaos / 'verdict.json').write_text(json.dumps({'outcomes': [hit]}))
  began = {'began_s': recorded.BEGAN_S}
  (workdir.chaos / 'course.json').write_text(json.dumps(began))
  table = part(page_of(workdir.root), 'faults')
  assert isinstance(table, Table) and table.rows[0][:4] == (
    1, 'cut', 'learner-1', 5.0,
  )  # fmt: skip


def test_an_evaluator_s_losses_are_on_the_curve(workdir):
  recorded.append(
    workdir.metrics(EVALUATOR),
    {'step': 30, 'time_s': recorded.BEGAN_S + 9.0, 'eval/loss': 3.5},
  )
  theta = part(page_of(workdir.root), 'loss').lines[0]
  assert (theta.xs, theta.ys) == ((9.0,), (3.5,))


def test_every_folder_that_is_neither_is_named(tmp_path):
  with pytest.raises(NoReport) as raised:
    page_of(tmp_path / 'a', tmp_path)
  assert 'is no folder' in str(raised.value)
  assert 'holds neither' in str(raised.value)


def test_the_texts_of_several_models_are_on_one_page(tmp_path):
  folders = [tmp_path / name for name in ('a', 'b')]
  for folder in folders:
    workdir = recorded.write(folder, UNTIL_S, AWAY)
    workdir.sample.write_text(f'text of {folder.name}')
  report = page_of(*folders)
  assert part(report, 'sample-0').lines == ('text of a',)
  assert part(report, 'sample-1').lines == ('text of b',)
