# SPDX-License-Identifier: Apache-2.0
"""Shows progress on standard error, in place on a terminal."""

import shutil
import sys
from typing import TextIO

CLEAR = '\r\x1b[K'


class Line:
  """One line that is rewritten on a terminal; otherwise plain lines.

  Args:
    stream: standard error unless given.
  """

  def __init__(self, stream: TextIO | None = None):
    self._stream = sys.stderr if stream is None else stream
    self._in_place = self._stream.isatty()
    self._is_there = False

  def say(self, text: str) -> None:
    """Replaces the line by `text`."""
    if not self._in_place:
      self.stay(text)
      return
    width = shutil.get_terminal_size().columns - 1
    self._stream.write(f'{CLEAR}{text[:width]}')
    self._stream.flush()
    self._is_there = True

  def stay(self, text: str) -> None:
    """A line of its own."""
    self.end()
    print(text, file=self._stream, flush=True)

  def end(self) -> None:
    """Takes the line away that was written in place."""
    if self._is_there:
      self._stream.write(CLEAR)
      self._stream.flush()
      self._is_there = False
