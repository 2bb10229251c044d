# SPDX-License-Identifier: Apache-2.0
"""Checks what a user sees of a run, as text."""

import dataclasses
import io
import pathlib

import pytest
import rich.console

from diloco.metrics import figures, names, status, token_ledger
from diloco.metrics.figures import clock
from diloco.metrics.run_progress import Pace
from diloco.metrics.workdir import EVALUATOR, Workdir
from diloco.metrics.writer import JsonlWriter
from launch import progress
from launch.supervisor import ProcessState

pytestmark = pytest.mark.beside
HERE = pathlib.Path(__file__).parent

LEARNERS = (
  status.LearnerStatus(
    learner=0, state='live', step=15, steps=412, tokens=421_888, loss=2.1234,
    tokens_per_s=15123.4, round=137, lag_versions=0, bytes_up=123_456_789,
    bytes_down=9_876, rounds=127, participation=0.93, incarnations=2,
    stall_max_s=0.01, age_steps=0.57, link_load=1.84,
  ),
  status.LearnerStatus(
    learner=1, state='gone', steps=99, tokens_per_s=0.0, round=0,
    lag_versions=2, bytes_up=0, bytes_down=0, participation=0.0,
    incarnations=1, stall_max_s=0.0,
  ),
)  # fmt: skip
STATUS = status.RunStatus(
  run='quickstart', time_s=0.0, step=412, total_steps=500, rounds=137,
  planned=2, live=(0,), participants=(0,), grace_s=0.25, elapsed_s=65.4,
  goodput=0.87, uptime=1.0, bytes_up=3, bytes_down=6, refused=0,
  heldout_step=384, heldout_loss=2.25, learners=LEARNERS,
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


TIMES = '1:05, 0:18 left'


def shown(width, told=STATUS, times=TIMES):
  lines = text_of(progress.table(told, PROCESSES, times, width), width)
  return [line.rstrip() for line in lines.splitlines()]


@pytest.mark.parametrize('width', [80, 140])
def test_a_terminal_is_used_as_wide_as_it_is(width):
  picture = HERE / f'terminal_{width}.txt'
  assert shown(width) == picture.read_text().splitlines()
  assert all(len(line) <= width for line in shown(width))


@pytest.mark.parametrize('width', [80, 84, 88, 92, 96, 100])
def test_the_headline_of_a_long_run_is_broken_between_its_parts(width):
  long = dataclasses.replace(
    STATUS, run='a-run-of-my-own-text', step=1_234_567, total_steps=9_999_999,
    rounds=411_522, elapsed_s=360_000.0,
  )  # fmt: skip
  times = '100:00:00, 999:59:59 left'
  told = shown(width, long, times)
  head = told[: next(i for i, line in enumerate(told) if '━' in line)]
  assert all(len(line) <= width for line in head)
  whole = '  '.join(progress.headlines(long, times, progress.WIDE - 1))
  parts = whole.split('  ')
  assert 'step 1,234,567 of 9,999,999' in parts
  for part in parts:
    assert any(part in line for line in head), (part, head)


def test_until_a_learner_is_ready_the_clock_is_that_of_the_start():
  file = io.StringIO()
  display = progress.Display(rich.console.Console(file=file, width=120))
  display.show(dataclasses.replace(STATUS, elapsed_s=None), PROCESSES)
  assert 'compiling  0:00' in file.getvalue()


def test_a_learner_that_came_back_has_the_steps_of_all_its_lives():
  """Its own steps begin anew, which looked as if it had lost its work."""
  rows = rows_of('\n'.join(shown(80)))
  assert rows['learner-0'][2] == '412'
  said = progress.lines(STATUS, PROCESSES, TIMES)
  assert 'learner-0 live steps 412 loss' in ' '.join(said)


def test_a_learner_that_was_started_by_hand_has_a_row():
  third = dataclasses.replace(LEARNERS[0], learner=2)
  told = dataclasses.replace(STATUS, learners=(*LEARNERS, third))
  file = io.StringIO()
  display = progress.Display(rich.console.Console(file=file, width=120))
  display.show(told, PROCESSES)
  assert 'learner-2 live steps 412 loss 2.123' in file.getvalue()
  assert progress.joined(told, PROCESSES) == [
    ProcessState('learner-2', 'running', None, 0)
  ]
  assert progress.joined(None, PROCESSES) == []


def test_states_have_colours_on_a_terminal_only():
  view = progress.table(STATUS, PROCESSES, TIMES, 80)
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
  assert 'a [/b] [red]c  Θ' in ' '.join(shown(80, odd))


def test_before_the_first_status_processes_are_shown():
  early = shown(80, None, '0:03')
  assert early[0] == 'starting  0:03'
  rows = rows_of('\n'.join(early))
  assert rows['learner-1'] == ['learner-1', 'waiting', '2']


def test_a_learner_that_has_not_said_hello_compiles():
  """Issue: 45 s of "starting", and a restarted one was "gone" meanwhile."""
  early = dataclasses.replace(STATUS, elapsed_s=None, learners=())
  told = shown(80, early, '0:03')
  assert told[0] == 'quickstart  compiling  0:03'
  assert rows_of('\n'.join(told))['learner-0'][1] == 'compiling'
  for starts, state in ((1, 'gone'), (2, 'compiling')):  # It said one hello.
    again = ProcessState('learner-1', 'running', 12, starts)
    view = progress.table(STATUS, (*PROCESSES[:2], again), TIMES, 80)
    rows = rows_of(text_of(view))
    assert rows['learner-1'][1] == state
    assert rows['learner-0'][1] == 'live'


def test_steps_beyond_the_last_are_not_of_the_planned_ones():
  """Issue: "step 502 of 500": learners train on while the last rounds close."""
  beyond = dataclasses.replace(STATUS, step=502)
  assert 'step 502 (500 planned)' in ' '.join(shown(140, beyond))


def test_a_log_gets_short_lines_and_no_escape_codes():
  console = rich.console.Console(file=io.StringIO(), width=80)
  with progress.Display(console) as display:
    display.update(STATUS, PROCESSES)
    display.update(STATUS, PROCESSES)  # Too early: not shown.
    display.say('learner-1 (7) killed: [why]')
  assert console.file.getvalue() == (
    'quickstart  Θ 2.250 at step 384  step 412 of 500  rounds 137  1:05  '
    'goodput 87.0%  live 1 of 2\n'
    'link 1.8 × too slow (learner 0)\n'  # noqa: RUF001
    '  syncer running | learner-0 live steps 412 loss 2.123 | '
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
  assert told[1].startswith('quickstart  Θ 2.250 at step 384')
  assert '1:05' not in told[1]


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
  found = progress.lines(told, many, TIMES)
  assert max(map(len, found)) <= 120
  assert ' '.join(found).count('loss 2.123') == 9
  assert len(found) == 5


def test_the_status_has_what_the_evaluator_measured(tmp_path):
  workdir = Workdir(tmp_path)
  assert status.of_run(workdir) is None
  status.write_status(
    workdir.status,
    dataclasses.replace(STATUS, heldout_step=None, heldout_loss=None),
  )
  writer = JsonlWriter(workdir.metrics(EVALUATOR))
  writer.write_scalars(200, {names.EVAL_LOSS: 2.5})
  writer.close()
  found = status.of_run(workdir)
  assert (found.heldout_step, found.heldout_loss) == (200, 2.5)


def test_the_time_left_is_judged_by_two_statuses():
  pace = Pace()
  assert pace.left_s(STATUS) is None  # One status has no pace.
  later = dataclasses.replace(STATUS, time_s=11.0, step=434)
  assert pace.left_s(later) == pytest.approx((500 - 434) / 2)


def test_the_time_left_leaves_out_what_it_took_to_start():
  pace = Pace()
  for time_s in (1.0, 5.0, 9.0):  # Compiles.
    pace.left_s(dataclasses.replace(STATUS, time_s=time_s, step=0))
  moving = dataclasses.replace(STATUS, time_s=10.0, step=50)
  assert pace.left_s(moving) == pytest.approx((500 - 50) / 50)


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
  assert figures.in_bytes(nbytes) == text


def test_the_end_table_says_where_the_tokens_went():
  rows = [
    token_ledger.TokenCounts(1000, 900, 50, (('died', 20),), 30),
    token_ledger.TokenCounts(1000, 960, 0, (), 40),
  ]
  text = progress.tokens_text(rows)
  assert text.plain == (
    '93.0% merged, 2.5% overwritten, 1.0% lost (died), 3.5% pending'
  )
  wrong = [*rows, token_ledger.TokenCounts(10, 0, 3, (), 0)]
  assert progress.tokens_text(wrong).plain.endswith(', 7 unexplained')


def test_the_end_table_compares_loss_and_bytes():
  seed, peer = 'at step 0, seed', 'at step 171, learner 0'
  learners = (
    status.LearnerStatus(
      learner=0, steps=500, tokens=512_000, rounds=166, participation=1.0,
      incarnations=1, beginning=seed, stall_max_s=0.012, bytes_up=44_000,
      bytes_down=44_000, age_steps=0.57,
    ),
    status.LearnerStatus(
      learner=1, steps=300, tokens=307_200, rounds=83, participation=0.5,
      incarnations=2, beginning=peer, stall_max_s=0.5, bytes_up=22_000,
      bytes_down=22_000,
    ),
  )  # fmt: skip
  run = status.RunStatus(
    run='x', step=500, total_steps=500, rounds=166, planned=2, fragments=8,
    parameters=4000, elapsed_s=120.0, goodput=0.951, uptime=1.0, refused=2,
    pulls_up=8 * 30, pulls_down=8 * 30, bytes_up=66_000, bytes_down=60_000,
    learners=learners, age_steps=0.62, old_share=0.04, finished=True,
  )  # fmt: skip
  evaluation = status.Evaluation(4000, 5.545, 1.9, 2.426, 3.244)
  text = text_of(
    progress.report(Workdir(pathlib.Path('w')), run, evaluation, 'w/loss.png'),
    100,
  )
  assert '…' not in text
  rows = rows_of(text)
  for name, told in zip(('learner-0', 'learner-1'), learners, strict=True):
    columns = figures.shown(figures.LEARNER, figures.END)
    assert (
      rows[name][1:] == ' '.join(each.text_in(told) for each in columns).split()
    )
  for figure in figures.shown(figures.RUN, figures.END):
    assert f'{figure.label} ' in text and figure.text_in(run) in text, (
      figure.name
    )
  assert rows['refused'] == ['refused', '2']  # Not "1 contributions refused".
  for part in (
    '1.900', '2.741', '2.426', '3.500',  # nats and bits, end and bigram
    '0.550 (f32 4, bf16 2)', '66 kB (f32: 480 kB)', '819,200', '75.0%',
    '500 ms', '95.1%', '100.0%', 'w/logs', 'w/loss.png', '2:00',
    'back again: learner-1', peer, '0.62 steps', '4.0% of the merged offers',
  ):  # fmt: skip
    assert part in text, part
  assert 'where tokens went' not in text
