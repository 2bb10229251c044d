# SPDX-License-Identifier: Apache-2.0
"""Records what the arrays of a run have told its machines and clocks, in order.

Nothing else of the arrays affects which process does what at which time. So an
interrupted run can be replayed up to where its arrays were saved, without any
array: from these answers.
"""

import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any


class Diverged(Exception):
  """The run asks another question than it did when the answers were written."""


class Answers:
  """One JSON line per answer, appended to a file that `sync` makes durable.

  Attributes:
    count: number of answers so far, earlier ones included.
    replaying: answers come from an earlier process, and no array is there; the
      holder of the saved arrays decides when that ends.

  Args:
    path: the file; None: nothing is kept.
    known: (question, answer) of an earlier process; empty: there was none.
  """

  def __init__(
    self, path: pathlib.Path | None, known: Sequence[tuple[str, Any]]
  ):
    self.count = 0
    self.replaying = bool(known)
    self._known = known
    self._file = path.open('a') if path is not None else None

  def of(self, question: str, work: Callable[[], Any]) -> Any:
    """Returns the answer: plain JSON from `work`, or from the earlier process.

    Raises:
      Diverged: another question was asked at this point before.
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
    """Switches from recorded answers to those of the arrays.

    Raises:
      Diverged: there are answers that were not asked for.
    """
    if self.count != len(self._known):
      raise Diverged(f'{self.count} questions for {len(self._known)} answers')
    self.replaying = False

  def sync(self):
    """Makes the answers so far survive the process, and the machine."""
    if self._file is not None:
      self._file.flush()
      os.fsync(self._file.fileno())

  def close(self):
    """Closes the file; nothing is answered afterwards."""
    if self._file is not None:
      self._file.close()
