# SPDX-License-Identifier: Apache-2.0
"""Checks what a user sees of a run, as text."""

import dataclasses
import io
import pathlib

import pytest
import rich.console

from diloco.metrics import names, status, token_ledger
from diloco.metrics.run_progress import ProgressMeter, RunProgress, clock
from diloco.metrics.workdir import EVALUATOR, Workdir
from diloco.metrics.writer import JsonlWriter
from launch import progress
from launch.supervisor import ProcessState

pytestmark = pytest.mark.beside
HERE = pathlib.Path(__file__).parent

LEARNERS = (
  status.LearnerStatus(
    0,
    'live',
    412,
    2.1234,
    15123.4,
    137,
    0,
    123_456_789,
    9_876,
    0.93,
    1,
    0.01,
    0.57,
  ),
  status.LearnerStatus(1, 'gone', 99, None, 0.0, 0, 2, 0, 0, 0.0, 1, 0.0),
)
STATUS = status.RunStatus(
  'quickstart', 0.0, 412, 500, 137, (0,), (0,), 0.1, 0.25, 0.02, 0.87, 1.0,
  3, 6, 0, False, LEARNERS,
)  # fmt: skip
PROCESSES = (
  ProcessState('syncer', 'running', 10, 1),
  ProcessState('learner-0', 'running', 11, 1),
  ProcessState('learner-1', 'waiting', None, 2),
)


def text_of(view, width=80):
  console = rich.console.Console(file=io.StringIO(), width=width)
  console.print(view)
  return console.file.getvalue()


def rows_of(text):
  return {line.split()[0]: line.split() for line in text.splitlines() if line}


PROGRESS = RunProgress(65.4, 18.2, {'learner-0': 411}, (384, 2.25))


def shown(width, told=STATUS, found=PROGRESS):
  lines = text_of(progress.table(told, PROCESSES, found, width), width)
  return [line.rstrip() for line in lines.splitlines()]


@pytest.mark.parametrize('width', [80, 140])
def test_a_terminal_is_used_as_wide_as_it_is(width):
  picture = HERE / f'terminal_{width}.txt'
  assert shown(width) == picture.read_text().splitlines()
  assert all(len(line) <= width for line in shown(width))


def test_a_learner_that_came_back_is_shown_at_the_global_step():
  """Its own steps begin anew, which looked as if it had lost its work."""
  back = dataclasses.replace(LEARNERS[0], step=15, incarnations=2)
  told = dataclasses.replace(STATUS, learners=(back,))
  rows = rows_of('\n'.join(shown(80, told)))
  assert rows['learner-0'][2] == '411'
  said = progress.lines(told, PROCESSES, PROGRESS)
  assert 'learner-0 live at step 411 loss' in ' '.join(said)


def test_a_learner_that_was_started_by_hand_has_a_row():
  third = dataclasses.replace(LEARNERS[0], learner=2)
  told = dataclasses.replace(STATUS, learners=(*LEARNERS, third))
  file = io.StringIO()
  display = progress.Display(rich.console.Console(file=file, width=120))
  display.show(told, PROCESSES)
  assert 'learner-2 live at step 412 loss 2.123' in file.getvalue()
  assert progress.joined(told, PROCESSES) == [
    ProcessState('learner-2', 'running', None, 0)
  ]
  assert progress.joined(None, PROCESSES) == []


def test_states_have_colours_on_a_terminal_only():
  view = progress.table(STATUS, PROCESSES, PROGRESS, 80)
  stream = io.StringIO()
  console = rich.console.Console(
    file=stream, width=80, force_terminal=True, color_system='standard'
  )
  console.print(view)
  assert '\x1b[32mlive' in stream.getvalue()
  assert '\x1b[33mwaiting' in stream.getvalue()
  assert '\x1b' not in text_of(view)


def test_brackets_in_a_run_s_name_are_no_markup():
  odd = dataclasses.replace(STATUS, run='a [/b] [red]c')
  assert 'a [/b] [red]c  step' in ' '.join(shown(80, odd))


def test_before_the_first_status_processes_are_shown():
  early = shown(80, None, RunProgress(3.0))
  assert early[0] == 'starting  0:03 elapsed'
  rows = rows_of('\n'.join(early))
  assert rows['learner-1'] == ['learner-1', 'waiting', '2']


def test_a_log_gets_short_lines_and_no_escape_codes():
  console = rich.console.Console(file=io.StringIO(), width=80)
  with progress.Display(console) as display:
    display.update(STATUS, PROCESSES)
    display.update(STATUS, PROCESSES)  # Too early: not shown.
    display.say('learner-1 (7) killed: [why]')
  assert console.file.getvalue() == (
    'quickstart  step 412/500  0:00 elapsed  round 137  live 1  merged 0  '
    'grace 0.25 s  goodput 87%\n'
    '  syncer running | learner-0 live at step 412 loss 2.123 | '
    'learner-1 waiting\n'
    'learner-1 (7) killed: [why]\n'
  )


def test_a_line_with_its_own_clock_gets_no_elapsed_time():
  told = []
  console = rich.console.Console(file=io.StringIO())
  with progress.Display(console, tell=told.append) as display:
    display.show(None, PROCESSES)
    display.show(STATUS, PROCESSES)
  assert told[0] == 'starting'
  assert told[1].startswith('quickstart  step 412/500  round 137  live 1')


def test_lines_of_a_log_are_at_most_120_characters():
  many = [ProcessState(f'learner-{m}', 'running', 1, 1) for m in range(9)]
  told = dataclasses.replace(
    STATUS,
    run='a-longer-name-of-a-run',
    learners=tuple(
      dataclasses.replace(LEARNERS[0], learner=m) for m in range(9)
    ),
    participants=tuple(range(9)),
  )
  found = progress.lines(told, many, PROGRESS)
  assert max(map(len, found)) <= 120
  assert ' '.join(found).count('loss 2.123') == 9
  assert len(found) == 5


def test_what_files_tell_of_the_progress(tmp_path):
  workdir = Workdir(tmp_path)
  meter = ProgressMeter(workdir)
  assert meter.look(None, ['learner-0']).steps == {}
  for name, record in (
    ('learner-0', {'step': 15, names.GLOBAL_STEP: 219.0}),
    (EVALUATOR, {'step': 200, names.EVAL_LOSS: 2.5}),
  ):
    writer = JsonlWriter(workdir.metrics(name))
    writer.write_scalars(record.pop('step'), record)
    writer.close()
  found = meter.look(STATUS, ['learner-0', 'syncer'])
  assert (found.steps, found.heldout) == ({'learner-0': 219}, (200, 2.5))
  assert found.left_s is None  # One status has no pace.
  later = dataclasses.replace(STATUS, time_s=11.0, step=434)
  assert meter.look(later, []).left_s == pytest.approx((500 - 434) / 2)


def test_the_time_left_leaves_out_what_it_took_to_start():
  meter = ProgressMeter(None)
  for time_s in (1.0, 5.0, 9.0):  # Compiles.
    meter.look(dataclasses.replace(STATUS, time_s=time_s, step=0), [])
  moving = dataclasses.replace(STATUS, time_s=10.0, step=50)
  assert meter.look(moving, []).left_s == pytest.approx((500 - 50) / 50)


@pytest.mark.parametrize(
  ('time_s', 'text'), [(4.6, '0:05'), (723, '12:03'), (11523, '3:12:03')]
)
def test_times_are_read_as_on_a_clock(time_s, text):
  assert clock(time_s) == text


@pytest.mark.parametrize(
  ('nbytes', 'text'),
  [
    (0, '0 B'), (999, '999 B'), (1000, '1.0 kB'), (9_949, '9.9 kB'),
    (9_951, '10 kB'), (999_499, '999 kB'), (999_500, '1.0 MB'),
    (1_234_567_890, '1.2 GB'), (5 * 10**15, '5000.0 TB'),
  ],
)  # fmt: skip
def test_bytes_have_units(nbytes, text):
  assert progress.in_units(nbytes) == text


def test_the_end_table_says_where_the_tokens_went():
  rows = [
    token_ledger.TokenCounts(1000, 900, 50, (('died', 20),), 30),
    token_ledger.TokenCounts(1000, 960, 0, (), 40),
  ]
  text = progress.tokens_text(rows)
  assert text.plain == (
    '2,000 trained, once per fragment: 93.0% merged, 2.5% overwritten, '
    '1.0% lost (died), 3.5% pending'
  )
  wrong = [*rows, token_ledger.TokenCounts(10, 0, 3, (), 0)]
  assert progress.tokens_text(wrong).plain.endswith(', 7 unexplained')


def test_the_end_table_compares_loss_and_bytes():
  seed, peer = 'at step 0, seed', 'at step 171, learner 0'
  learners = (
    status.LearnerSummary(
      0, 500, 512_000, 166, 1, seed, 0.012, 44_000, 44_000, 0.57
    ),
    status.LearnerSummary(1, 300, 307_200, 83, 2, peer, 0.5, 22_000, 22_000),
  )
  run = status.RunSummary(
    'x', 500, 166, 8, 120.0, 0.951, 1.0, 2, 8 * 30, 8 * 30, 66_000, 60_000,
    learners, 0.62, 0.04,
  )  # fmt: skip
  evaluation = status.Evaluation(4000, 5.545, 1.9, 2.426, 3.244)
  text = text_of(
    progress.report(Workdir(pathlib.Path('w')), run, evaluation, 'w/loss.png')
  )
  assert '…' not in text
  rows = rows_of(text)
  assert rows['learner-0'][1:3] == ['166', '(100%)']
  assert rows['learner-0'][3] == '0.57'
  assert rows['learner-1'][1:3] == ['83', '(50%)']
  for part in (
    '1.900', '2.741', '2.426', '3.500',  # nats and bits, end and bigram
    'up 0.550, down 0.500 (f32 4, bf16 2)',
    '500 ms', '95.1%', '100.0%', 'w/logs', 'w/loss.png',
    'back again: learner-1', peer, '0.62 steps, 4% older than 1.5',
  ):  # fmt: skip
    assert part in text, part
  assert 'once per fragment' not in text
