# SPDX-License-Identifier: Apache-2.0
"""What the arrays of a run have told its machines and clocks, in order.

Nothing else of the arrays has an effect on who does what when. So a run that
was cut is made again up to where its arrays were saved, without touching one:
by these answers.
"""

import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any


class Diverged(Exception):
  """The run asks something else than it did when the answers were written."""


class Answers:
  """One JSON line each, appended to a file that `sync` makes durable.

  Attributes:
    count: of all so far, those of before included.
    replaying: they are those of before, and no array is there; the holder of
      the saved arrays says when that ends.

  Args:
    path: of the file, to which is appended; None: nothing is kept.
    known: of the process before, (question, answer); empty: there was none.
  """

  def __init__(
    self, path: pathlib.Path | None, known: Sequence[tuple[str, Any]]
  ):
    self.count = 0
    self.replaying = bool(known)
    self._known = known
    self._file = path.open('a') if path is not None else None

  def of(self, question: str, work: Callable[[], Any]) -> Any:
    """Its answer: plain JSON that `work` gives, or that it gave before.

    Raises:
      Diverged: another question was asked here before.
    """
    if self.replaying:
      asked, answer = (
        self._known[self.count]
        if self.count < len(self._known)
        else ('nothing', None)
      )
      if asked != question:
        raise Diverged(f'answer {self.count} is to {asked!r}, not {question!r}')
    else:
      answer = work()
      if self._file is not None:
        self._file.write(json.dumps([question, answer]) + '\n')
    self.count += 1
    return answer

  def go_live(self):
    """From now on the arrays answer.

    Raises:
      Diverged: there are answers that nobody has asked for.
    """
    if self.count != len(self._known):
      raise Diverged(f'{self.count} questions for {len(self._known)} answers')
    self.replaying = False

  def sync(self):
    """What was answered so far survives the process, and the machine."""
    if self._file is not None:
      self._file.flush()
      os.fsync(self._file.fileno())

  def close(self):
    """Nothing is answered afterwards."""
    if self._file is not None:
      self._file.close()
