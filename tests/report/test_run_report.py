# SPDX-License-Identifier: Apache-2.0
"""Pages of real runs' folders: whole ones, cut ones, and with holes."""

import json

import pytest

from diloco.metrics import figures, names, run_reader, status
from diloco.metrics.recorded_run import NoReport
from diloco.metrics.status import Evaluation, LearnerStatus, RunStatus
from diloco.metrics.workdir import EVALUATOR, Workdir
from diloco.metrics.writer import JsonlWriter
from diloco.pages.parts import ReportPage
from diloco.prediction import history
from diloco.report import folders, run_charts, run_report
from tests.prediction import recorded

UNTIL_S = 40.0
# Learner 1 dies at 14: away for 4.25 s.
AWAY = {1: ((14.0, 14.25, 18.25),)}
TOKENS = 4 * 32  # Of a step: see experiments/tests_tiny.py.


@pytest.fixture(scope='module', name='whole')
def fixture_whole(tmp_path_factory):
  """Returns the folder of a finished run, which no test writes into."""
  workdir = recorded.write(
    tmp_path_factory.mktemp('runs') / 'run', UNTIL_S, AWAY
  )
  learner = LearnerStatus(
    learner=0, steps=320, tokens=320 * TOKENS, rounds=80, participation=0.5,
    incarnations=1, stall_max_s=0.1, bytes_up=500, bytes_down=900,
  )  # fmt: skip
  status.write_summary(
    workdir.summary,
    RunStatus(
      run='tests-tiny',
      step=159,
      rounds=159,
      fragments=2,
      total_steps=400,
      finished=True,
      elapsed_s=UNTIL_S,
      goodput=0.8,
      uptime=1.0,
      refused=3,
      pulls_up=10,
      pulls_down=20,
      bytes_up=5_000,
      bytes_down=40_000,
      learners=(learner,),
    ),
  )
  status.write_evaluation(
    workdir.evaluation, Evaluation(2_000, 5.5, 1.5, 2.4, 3.1)
  )
  return workdir


@pytest.fixture(name='workdir')
def fixture_workdir(tmp_path):
  """Returns the folder of a run that did not get as far, to be damaged."""
  return recorded.write(tmp_path / 'run', UNTIL_S, AWAY)


def report(*workdirs: Workdir) -> ReportPage:
  return folders.report([w.root for w in workdirs], 'name', 'again')


def part(found: ReportPage, name: str):
  return next(p for p in found.parts if p.name == name)


def column(found: ReportPage, name: str, heading: str) -> list:
  table = part(found, name)
  place = [c.name for c in table.columns].index(heading)
  return [row[place] for row in table.rows]


def without(path, *kinds: str):
  """Drops the lines of these kinds, of a tape or of events."""
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  left = [x for x in lines if x.get('kind', x.get('event')) not in kinds]
  path.write_text('')
  recorded.append(path, *left)


# A whole run ------------------------------------------------------------------


def test_goodput_is_that_of_a_replay(whole):
  (shown,) = column(report(whole), 'runs', 'goodput')
  assert shown == figures.share(history.read(whole.root).goodput)


def test_tokens_are_those_of_all_steps(workdir):
  """320 steps of learner 0, 112 and 174 of learner 1."""
  (tokens,) = column(report(workdir), 'runs', 'tokens')
  assert tokens == f'{(320 + 112 + 174) * TOKENS:,}'


def test_participation_is_the_share_of_rounds(workdir):
  """159 rounds; the odd ones merged learner 1."""
  found = column(report(workdir), 'learners', 'merged')
  assert found == [figures.share(79 / 159), figures.share(80 / 159)]


def test_staleness_counts_versions(whole):
  """Round 2, of learner 0, was one version behind."""
  found = report(whole)
  assert column(found, 'learners', 'most behind') == [1, 0]
  assert column(found, 'rounds', 'stale %') == pytest.approx([100 / 159])


def test_grace_windows_are_as_the_tape_says(whole):
  (grace_s,) = column(report(whole), 'rounds', 'grace s')
  assert grace_s == pytest.approx(recorded.GRACE_S)


def test_a_death_and_how_long_until_it_was_started_again(whole):
  found = report(whole)
  assert column(found, 'deaths', 'process') == ['learner-1']
  assert column(found, 'deaths', 'at s') == pytest.approx([14.0])
  assert column(found, 'deaths', 'started again after s') == pytest.approx(
    [0.25]
  )


def test_deaths_are_marked_in_the_goodput_chart(whole):
  ((at_s, group, label),) = part(report(whole), 'goodput').moments
  assert (group, label) == (1, 'learner-1 dies')
  assert at_s == pytest.approx(14.0)


def test_bytes_per_parameter_of_a_round_trip(whole):
  """10 pulls of 500 bytes, 2 fragments, 2,000 parameters."""
  found = report(whole)
  assert column(found, 'runs', 'bytes per parameter, up') == ['0.500']
  assert column(found, 'runs', 'bytes per parameter, down') == ['2.000']


def test_validation_loss_at_the_begin_and_at_the_end(whole):
  lines = part(report(whole), 'loss-tokens').lines
  (line,) = [line for line in lines if line.kind == 'validation']
  assert line.ys == (5.5, 1.5)
  assert line.xs == (0, (320 + 112 + 174) * TOKENS)


def test_what_an_evaluator_found_is_on_the_curve(workdir):
  writer = JsonlWriter(workdir.metrics(EVALUATOR))
  time_s = recorded.scalars(UNTIL_S / 2)[names.TIME]
  writer.write_scalars(80, {names.TIME: time_s, names.EVAL_LOSS: 3.25})
  writer.close()
  lines = part(report(workdir), 'loss-time').lines
  (line,) = [line for line in lines if line.kind == 'validation']
  assert (line.xs, line.ys) == (pytest.approx((UNTIL_S / 2,)), (3.25,))


def test_lanes_show_the_dead_and_the_returning(whole):
  timeline = part(report(whole), 'timeline')
  spans = {
    (span.lane, span.kind): (span.begin_s, span.end_s)
    for span in timeline.spans
    if span.lane == 1
  }
  assert spans[1, 'dead'] == pytest.approx((14.0, 14.25))
  assert spans[1, 'bootstrap'] == pytest.approx((14.25, 18.25), abs=0.01)


def test_a_finished_run_has_nothing_to_excuse(whole):
  assert not [p for p in report(whole).paragraphs if 'did not finish' in p]


# Several ----------------------------------------------------------------------


def test_several_runs_share_their_charts(whole, workdir):
  chart = part(report(whole, workdir), 'loss-time')
  assert len({line.label for line in chart.lines}) == 2
  assert {line.group for line in chart.lines} == {0, 1}


def test_runs_of_one_name_are_told_apart_by_their_parents(whole, workdir):
  first, second = column(report(whole, workdir), 'runs', 'run')
  assert first.endswith('/run')
  assert first != second


# Not whole --------------------------------------------------------------------


def test_a_run_that_goes_on_says_so(workdir):
  without(workdir.tape, 'End')
  without(workdir.events, 'exited')
  found = report(workdir)
  assert column(found, 'runs', 'state') == [run_report.GOING]
  (said,) = [p for p in found.paragraphs if 'did not finish' in p]
  assert 'step 159 of 60' in said


def test_a_run_that_was_stopped_says_so(workdir):
  without(workdir.tape, 'End')
  recorded.append(
    workdir.events,
    *(
      recorded.event(UNTIL_S, name, 'stopped', 'SIGTERM')
      for name in ('learner-0', 'learner-1')
    ),
  )
  assert column(report(workdir), 'runs', 'state') == [run_report.STOPPED]


@pytest.mark.parametrize(
  'name', ['tape', 'events', 'summary', 'evaluation', 'status']
)
def test_a_missing_file_is_named(workdir, name):
  path = getattr(workdir, name)
  path.unlink(missing_ok=True)
  said = [p for p in report(workdir).paragraphs if 'There is no' in p]
  assert len(said) == 1 and f'no {path.name}' in said[0]


def test_nothing_but_a_configuration_is_a_page_too(workdir):
  for path in (workdir.tape, workdir.events, *workdir.root.glob('metrics/*')):
    path.unlink()
  found = report(workdir)
  assert column(found, 'runs', 'state') == [run_report.GOING]
  assert column(found, 'runs', 'training loss') == [None]
  assert any('No inner step of it is known.' in p for p in found.paragraphs)


def test_a_corrupt_file_is_left_out_and_named(workdir):
  path = workdir.metrics('learner-1')
  path.write_text('{"step": 1}\nno JSON\n')
  found = report(workdir)
  assert column(found, 'learners', 'steps') == ['320', '0']
  assert any(f'{path}:2' in p for p in found.paragraphs)


def test_a_torn_last_line_is_no_harm(workdir):
  with workdir.tape.open('a') as file:
    file.write('{"time_s": 17')
  assert column(report(workdir), 'rounds', 'rounds') == [159]


def test_a_round_whose_merge_line_is_lost_has_no_windows(workdir):
  without(workdir.tape, 'Merge')
  found = report(workdir)
  assert column(found, 'rounds', 'rounds') == [159]
  assert column(found, 'rounds', 'grace s') == [None]


def test_a_broken_round_is_counted_among_the_gaps(workdir):
  recorded.append(workdir.tape, recorded.line(9.0, 'Publish', round=7))
  found = report(workdir)
  assert column(found, 'rounds', 'rounds') == [159]
  assert any('Publish' in p and '(1 times)' in p for p in found.paragraphs)


def test_a_pause_is_a_lane_s_pause(workdir):
  recorded.append(
    workdir.events,
    recorded.event(5.0, 'learner-0', 'paused', 'SIGSTOP'),
    recorded.event(8.0, 'learner-0', 'went on', 'SIGCONT'),
  )
  spans = part(report(workdir), 'timeline').spans
  (pause,) = [span for span in spans if span.kind == 'pause']
  assert (pause.lane, pause.begin_s, pause.end_s) == (
    0, pytest.approx(5.0), pytest.approx(8.0),
  )  # fmt: skip


def test_a_run_that_was_stopped_and_continued_is_one(workdir):
  recorded.append(
    workdir.events, recorded.event(30.0, 'learner-0', 'started', 'start 1')
  )
  assert column(report(workdir), 'learners', 'starts') == [2, 2]


def test_steps_that_were_not_written_count(tmp_path):
  """Every tenth of the steps is written, and the first: 1, 10, …, 320."""
  workdir = recorded.write(tmp_path / 'run', UNTIL_S, {}, every=10)
  assert column(report(workdir), 'learners', 'steps') == ['320', '320']


def test_losses_of_held_out_text_on_the_way(workdir):
  path = workdir.metrics('learner-0')
  records = [json.loads(line) for line in path.read_text().splitlines()]
  records[79][names.EVAL_LOSS] = 1.75  # At 10 s: 80 steps of each.
  path.write_text('')
  recorded.append(path, *records)
  run = run_reader.read(workdir.root, 'run')
  (loss,) = run.validation
  assert (loss.loss, loss.tokens) == (1.75, 160 * TOKENS)


# No run -----------------------------------------------------------------------


@pytest.mark.parametrize(
  ('text', 'reason'),
  [
    ('{', 'is not JSON'),
    ('[]', 'name=None'),
    ('{"name": "x", "protocol": {"learners": 0}}', 'protocol.learners=0'),
  ],
)
def test_a_config_that_is_none_of_a_run(tmp_path, text, reason):
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(NoReport, match=reason):
    folders.report([tmp_path], 'name', 'again')


def test_every_folder_that_is_neither_is_named(tmp_path):
  (tmp_path / 'empty').mkdir()
  with pytest.raises(NoReport) as raised:
    folders.report([tmp_path / 'empty', tmp_path / 'none'], 'n', 'again')
  first, second = str(raised.value).splitlines()
  assert first.startswith(f'{tmp_path / "empty"}: holds neither a run')
  assert second == f'{tmp_path / "none"}: is no folder'


def test_windows_hold_weighted_means():
  values = [(1.0, 4.0, 1.0), (3.0, 8.0, 3.0), (9.0, 1.0, 1.0)]
  values.append((9.5, float('nan'), 1.0))
  assert run_charts.means(values, 10.0, 2) == [(2.5, 7.0), (9.0, 1.0)]
