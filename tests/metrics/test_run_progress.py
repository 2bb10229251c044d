# SPDX-License-Identifier: Apache-2.0
"""The line of progress, in a terminal and in a log; counts and times left."""

import io
import os

import pytest

from diloco.metrics import run_progress
from diloco.metrics.run_progress import (
  LOG_EVERY_S,
  SAME_EVERY_S,
  ProgressLine,
  count,
  counted,
  counter,
)
from tests import waiting

pytestmark = pytest.mark.beside

CLEAR = '\r\x1b[K'


class Terminal(io.StringIO):
  def isatty(self):
    return True


class Clock:
  def __init__(self):
    self.now_s = 100.0

  def __call__(self):
    return self.now_s


def _line(stream):
  now = Clock()
  return ProgressLine(stream, now), now


def test_a_terminal_has_one_line_that_is_rewritten():
  seen = Terminal()
  line, now = _line(seen)
  line.say('one')
  now.now_s += 3.0
  line.say('two')
  line.stay('page')
  line.end()
  assert seen.getvalue() == (f'{CLEAR}0:00  one{CLEAR}0:03  two{CLEAR}page\n')


def test_a_fast_loop_rewrites_it_now_and_then():
  seen = Terminal()
  line, now = _line(seen)
  for i in range(1000):
    now.now_s += 0.001
    line.say(f'{i}')
  assert 10 < seen.getvalue().count(CLEAR) < 25


def test_a_terminal_cuts_the_line_to_its_width(monkeypatch):
  monkeypatch.setenv('COLUMNS', '20')
  seen = Terminal()
  line, _ = _line(seen)
  line.say('x' * 100)
  assert seen.getvalue() == CLEAR + '0:00  ' + 'x' * 13


def test_a_terminal_that_does_not_know_its_width_is_of_eighty(monkeypatch):
  monkeypatch.delenv('COLUMNS', raising=False)
  ours, theirs = os.openpty()  # Of 0 columns, unless told.
  with open(theirs, 'w') as terminal:
    line, _ = _line(terminal)
    line.say('x' * 100)
    assert os.read(ours, 999).decode() == CLEAR + '0:00  ' + 'x' * 73
  os.close(ours)


def test_a_log_has_a_line_every_ten_seconds_and_none_of_a_short_command():
  seen = io.StringIO()
  line, now = _line(seen)
  line.say('begins')
  now.now_s += LOG_EVERY_S - 0.5
  line.say('goes on')
  line.end()
  assert not seen.getvalue()
  for i in range(60):
    now.now_s += 0.5
    line.say(f'part {i}')
  assert seen.getvalue().splitlines() == [
    '0:10  part 0', '0:20  part 20', '0:30  part 40',
  ]  # fmt: skip


def test_a_log_hears_every_minute_of_what_does_not_change():
  seen = io.StringIO()
  line, now = _line(seen)
  for _ in range(130):
    now.now_s += 1.0
    line.say('compiles')
  assert LOG_EVERY_S + 2 * SAME_EVERY_S == 130
  assert seen.getvalue().splitlines() == [
    '0:10  compiles', '1:10  compiles', '2:10  compiles',
  ]  # fmt: skip


def test_it_goes_on_by_itself_while_a_part_lasts(monkeypatch):
  monkeypatch.setattr(run_progress, 'TICK_S', 0.01)
  seen = Terminal()
  line, now = _line(seen)
  with line:
    line.say('a long part')
    now.now_s += 7.0
    waiting.until(
      lambda: '0:07  a long part' in seen.getvalue(), 60.0, 'the next second'
    )
    monkeypatch.setattr(run_progress, 'TICK_S', 60.0)  # Its thread's time.
  assert seen.getvalue().endswith(CLEAR), 'the line stays behind'
  ended = seen.getvalue()
  now.now_s += 7.0
  assert not line._ticks.is_alive() and seen.getvalue() == ended


def test_a_late_tick_does_not_bring_the_line_back(monkeypatch):
  seen = Terminal()
  line, now = _line(seen)
  with line:
    line.say('a part')
  now.now_s += 7.0
  ends = iter([False, True])  # The first as it was before the end.
  monkeypatch.setattr(line._over, 'wait', lambda _: next(ends))
  line._tick()
  assert seen.getvalue() == f'{CLEAR}0:00  a part{CLEAR}'


def test_counts_say_how_long_the_rest_takes(monkeypatch):
  monkeypatch.setattr('time.monotonic', lambda: 50.0)
  assert count(0, 3, 10.0) == '0/3'
  assert count(2, 3, 10.0) == '2/3, about 0:20 left'
  assert count(3, 3, 10.0) == '3/3'
  assert count(1000, 10**7, 50.0) == '1,000/10,000,000'
  # The first of two was nine tenths of the work.
  assert count(1, 2, 14.0, 0.9) == '1/2, about 0:04 left'


def test_a_counter_says_the_same_again_and_again(monkeypatch):
  now, said = Clock(), []
  monkeypatch.setattr('time.monotonic', now)
  far = counter(said.append, 'bytes')
  now.now_s += 5.0
  far(1, 3)
  far(3, 3)
  assert said == ['1/3, about 0:10 left  bytes', '3/3  bytes']


def test_what_the_first_part_compiles_does_not_count(monkeypatch):
  now, said = Clock(), []
  monkeypatch.setattr('time.monotonic', now)
  for part in counted(range(5), said.append, lambda part: ''):
    now.now_s += 2.0 if part else 60.0
  assert said == [
    '0/5', '1/5, about 4:00 left', '2/5, about 0:06 left',
    '3/5, about 0:04 left', '4/5, about 0:02 left',
  ]  # fmt: skip


@pytest.mark.parametrize(
  ('costs', 'second'),
  [({'a': 1, 'b': 1}, '1/2, about 0:06 left  b'),
   ({'a': 1, 'b': 2}, '1/2, about 0:12 left  b')],
)  # fmt: skip
def test_parts_are_announced_with_what_is_left(monkeypatch, costs, second):
  now, said, parts = Clock(), [], []
  monkeypatch.setattr('time.monotonic', now)
  for part in counted('ab', said.append, cost=costs.get):
    now.now_s += 6.0
    parts.append(part)
  assert parts == ['a', 'b']
  assert said == ['0/2  a', second]
