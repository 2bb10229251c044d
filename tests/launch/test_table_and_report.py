# SPDX-License-Identifier: Apache-2.0
"""Checks what a user sees of a run, as text."""

import dataclasses
import io
import pathlib

import pytest
import rich.console

from diloco.metrics import status, token_ledger
from diloco.metrics.workdir import Workdir
from launch import progress
from launch.supervisor import ProcessState

pytestmark = pytest.mark.beside

LEARNERS = (
  status.LearnerStatus(
    0, 'live', 412, 2.1234, 15123.4, 137, 0, 123_456_789, 9_876, 0.93, 1, 0.01
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


def test_the_table_fits_80_columns_with_all_columns():
  text = text_of(progress.table(STATUS, PROCESSES))
  assert '…' not in text
  rows = rows_of(text)
  assert rows['process'] == list(progress.COLUMNS)
  assert rows['learner-0'] == [
    'learner-0', 'live', '412', '2.123', '15,123', '137', '0', '123', 'MB',
    '9.9', 'kB', '93%', '1',
  ]  # fmt: skip
  assert rows['learner-1'][:3] == ['learner-1', 'waiting', '99']
  assert rows['syncer'] == ['syncer', 'running', '1']


def test_the_headline_tells_about_the_run():
  text = ' '.join(text_of(progress.table(STATUS, PROCESSES)).split())
  for part in (
    'step 412/500', 'round 137', 'live 1', 'merged 0', 'grace 0.25 s',
    'goodput 87%',
  ):  # fmt: skip
    assert part in text


def test_brackets_in_a_run_s_name_are_no_markup():
  odd = dataclasses.replace(STATUS, run='a [/b] [red]c')
  text = ' '.join(text_of(progress.table(odd, PROCESSES)).split())
  assert 'a [/b] [red]c step' in text


def test_before_the_first_status_processes_are_shown():
  rows = rows_of(text_of(progress.table(None, PROCESSES)))
  assert rows['learner-1'] == ['learner-1', 'waiting', '2']


def test_a_log_gets_lines_and_no_escape_codes():
  console = rich.console.Console(file=io.StringIO(), width=80)
  with progress.Display(console) as display:
    display.update(STATUS, PROCESSES)
    display.update(STATUS, PROCESSES)  # Too early: not shown.
    display.say('learner-1 (7) killed: [why]')
  assert console.file.getvalue() == (
    'quickstart  step 412/500  round 137  live 1  merged 0  grace 0.25 s  '
    'goodput 87% | syncer running | learner-0 live step 412 loss 2.123 | '
    'learner-1 waiting\n'
    'learner-1 (7) killed: [why]\n'
  )


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
  assert text == (
    '2,000 trained, once per fragment: 93.0% merged, 2.5% overwritten, '
    '1.0% lost (died), 3.5% pending'
  )
  wrong = [*rows, token_ledger.TokenCounts(10, 0, 3, (), 0)]
  assert progress.tokens_text(wrong).endswith(', [bold red]7 unexplained[/]')


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
