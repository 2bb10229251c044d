# SPDX-License-Identifier: Apache-2.0
"""Measures how far a run or a command is, and when it will be over.

A command that takes long shows a `ProgressLine`, and goes through its parts by
`counted`.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

from diloco.metrics.figures import clock
from diloco.metrics.status import RunStatus

PACE_S = 60.0  # The time left is judged by the last minute.
CLEAR = '\r\x1b[K'
TERMINAL_EVERY_S, TICK_S = 0.05, 1.0  # What a line may cost in a fast loop.
LOG_EVERY_S, SAME_EVERY_S = 10.0, 60.0
Part = TypeVar('Part')


class Pace:
  """Judges by the statuses of a run when it will be over."""

  def __init__(self):
    self._known: list[tuple[float, int]] = []  # (time, step) of statuses.

  def left_s(self, status: RunStatus) -> float | None:
    """Takes a status; returns the seconds left, None: not known yet."""
    now_s, step = status.time_s, status.step
    recent = [p for p in self._known if 0 < now_s - p[0] <= PACE_S]
    # What it took to start says nothing of the pace since.
    while len(recent) > 1 and recent[0][1] == recent[1][1]:
      recent.pop(0)
    self._known = [*recent, (now_s, step)]
    began_s, began = self._known[0]
    if step <= began or status.finished:
      return None
    return (
      max(0, status.total_steps - step) * (now_s - began_s) / (step - began)
    )


class ProgressLine:
  """Says on standard error how far a command is, while it is in a `with` block.

  A terminal has one line, rewritten at least every second. Elsewhere, as in a
  log, there is a line every 10 s, every minute where nothing new is said: a
  short command leaves none.

  Args:
    stream: standard error unless given.
    now_s: the clock.
  """

  def __init__(
    self,
    stream: TextIO | None = None,
    now_s: Callable[[], float] = time.monotonic,
  ):
    self._stream = sys.stderr if stream is None else stream
    self._in_place = self._stream.isatty()
    self._now_s = now_s
    self._began_s = self._shown_s = now_s()
    self._text = self._shown = ''
    self._is_there = False
    self._lock = threading.Lock()
    self._over = threading.Event()
    self._ticks = threading.Thread(target=self._tick, daemon=True)

  def __enter__(self) -> 'ProgressLine':
    self._ticks.start()
    return self

  def __exit__(self, *exception) -> None:
    self._over.set()
    self._ticks.join(TICK_S)
    self.end()

  def say(self, text: str) -> None:
    """Replaces what the line says, as soon as it may be shown."""
    with self._lock:
      self._text = text
      self._show(TERMINAL_EVERY_S)

  def stay(self, text: str) -> None:
    """Writes a line of its own."""
    self.end()
    print(text, file=self._stream, flush=True)

  def end(self) -> None:
    """Takes the line away that was written in place; another may follow."""
    # Ctrl-C may have come where the lock was taken, which then stays so.
    free = self._lock.acquire(timeout=TICK_S)
    if self._is_there:
      self._stream.write(CLEAR)
      self._stream.flush()
      self._is_there = False
    if free:
      self._lock.release()

  def _tick(self) -> None:
    while not self._over.wait(TICK_S):
      with self._lock:
        if not self._over.is_set():  # Late, it would bring the line back.
          self._show(TERMINAL_EVERY_S)

  def _show(self, every_s: float) -> None:
    now_s = self._now_s()
    if not self._in_place:
      every_s = LOG_EVERY_S if self._text != self._shown else SAME_EVERY_S
    first = self._in_place and not self._is_there
    if not self._text or (now_s - self._shown_s < every_s and not first):
      return
    self._shown_s, self._shown = now_s, self._text
    line = f'{clock(now_s - self._began_s)}  {self._text}'
    if self._in_place:
      line = f'{CLEAR}{line[: _width(self._stream) - 1]}'
      self._is_there = True
    self._stream.write(line if self._in_place else f'{line}\n')
    self._stream.flush()


def _width(terminal: TextIO) -> int:
  columns = 0  # A terminal that does not know its width says so, too.
  with contextlib.suppress(OSError):
    columns = os.get_terminal_size(terminal.fileno()).columns
  return columns or shutil.get_terminal_size().columns


def counted(
  parts: Sequence[Part],
  say: Callable[[str], None],
  words: Callable[[Part], str] = str,
  cost: Callable[[Part], float] = lambda part: 1.0,
) -> Iterator[Part]:
  """Yields the parts of a work; says before each how far the whole is.

  Args:
    say: such as that of a `ProgressLine`.
    words: what a part is.
    cost: of a part, beside the others.
  """
  costs = [cost(part) for part in parts]
  began_s = second_s = time.monotonic()
  spent, left = 0.0, sum(costs)
  for done, part in enumerate(parts):
    if done == 1:
      second_s = time.monotonic()
    if done == 2:  # The first may have compiled what all others use.
      began_s, spent = second_s, costs[1]
    line = count(done, len(parts), began_s, spent / (spent + left))
    say(f'{line}  {words(part)}'.rstrip())
    yield part
    spent, left = spent + costs[done], left - costs[done]


def counter(
  say: Callable[[str], None], words: str = ''
) -> Callable[[int, int], None]:
  """Returns what takes (done, n), and shows it with the time left."""
  began_s = time.monotonic()
  return lambda done, n: say(f'{count(done, n, began_s)}  {words}'.rstrip())


def count(
  done: int, total: int, since_s: float, share: float | None = None
) -> str:
  """Returns '2/3, about 0:40 left'; before any is done, '0/3'.

  Args:
    since_s: when the first of them began, of time.monotonic().
    share: of the work, that is done; None: all are alike.
  """
  share = done / total if share is None else share
  text = f'{done:,}/{total:,}'
  if not 0 < share < 1:
    return text
  left_s = (time.monotonic() - since_s) / share * (1 - share)
  return f'{text}, about {clock(left_s)} left' if left_s else text
