# SPDX-License-Identifier: Apache-2.0
"""Resumes an interrupted run of the lab, and saves what that needs.

A checkpoint is the arrays of one moment, and the number of answers
(`resume_log.py`) before it. The next process repeats the run from its
beginning, with these answers instead of arrays, which costs next to nothing; at
the checkpoint, it takes up the arrays. So the records of a run, which get all
events once more, are written anew and complete.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from diloco.checkpoint.store import Checkpoint, Checkpoints, newest_after
from diloco.config.run_config import RunConfig
from diloco.lab.packing import Likes, Packer, Unpacker

SAVE_S_MAX = 600.0  # For one save; a slower one is lost.


# Records what the arrays of a run have told its machines and clocks, in order.
#
# Nothing else of the arrays affects which process does what at which time. So
# an interrupted run can be replayed up to where its arrays were saved, without
# any array: from these answers.


class Diverged(Exception):
  """The run asks another question than it did when the answers were written."""


class Answers:
  """One JSON line per answer, appended to a file that `sync` makes durable.

  Attributes:
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


class Holder(Protocol):
  """Holds arrays that can be taken out and put in again."""

  likes: Likes

  def state(self) -> Any:
    """Returns all that is needed to resume from here."""

  def go_on(self, state: Any):
    """Resumes from here, with what `state` returned."""


class Resumption:
  """One process of a run; this class starts anew and saves nothing.

  Attributes:
    from_step: step of the checkpoint that it resumes from; 0: none.
    earlier_s: wall time of the earlier processes, up to their checkpoint.
  """

  def __init__(self):
    self.answers = Answers(None, ())
    self.from_step = 0
    self.earlier_s = 0.0

  def steps(self, total: int) -> range:
    """Returns the global steps at which `at` is to be called."""
    return range(0)

  def at(self, step: int, holder: Holder):
    """Called at each such step, with nothing in progress."""

  def close(self):
    """Called when the process ends."""

  def finish(self):
    """Called when the run is over, and its result is written."""


class KeptResumption(Resumption):
  """A resumption that keeps its state in a folder.

  Args:
    folder: used for this alone; contents of another configuration, or of
      another version of jax, are removed.
  """

  def __init__(self, folder: pathlib.Path, config: RunConfig):
    super().__init__()
    self._began_s = time.monotonic()
    self._folder = folder
    self._every = config.lab.checkpoint_steps
    self._written = folder / 'answers.jsonl'
    self._checkpoint = self._open(_header(config))
    known = ()
    if self._checkpoint is not None:
      self.from_step = self._checkpoint.step
      self.earlier_s = self._checkpoint.meta['wall_s']
      known = self._cut(self._checkpoint.meta['answers'])
    self.answers = Answers(self._written, known)
    self._checkpoints = Checkpoints(
      self._arrays, keep_latest=2, keep_best=0, say=_say
    )

  def steps(self, total: int) -> range:
    return range(self._every, total, self._every) if self._every else range(0)

  def at(self, step: int, holder: Holder):
    if not self.answers.replaying:
      self._save(step, holder)
    elif step == self.from_step:
      self.answers.go_live()
      found = self._checkpoint
      unpacker = Unpacker(found.arrays, holder.likes)
      holder.go_on(unpacker.value(found.meta['state']))
      self._checkpoint = None  # Its arrays are in use by the run now.

  def close(self):
    self._checkpoints.close(SAVE_S_MAX)
    self.answers.close()

  def finish(self):
    shutil.rmtree(self._folder)

  @property
  def _arrays(self) -> pathlib.Path:
    return self._folder / 'arrays'

  def _save(self, step: int, holder: Holder):
    self._checkpoints.wait(SAVE_S_MAX)
    self.answers.sync()  # First: a checkpoint is useless without them.
    packer = Packer()
    meta = {
      'answers': self.answers.count,
      'wall_s': self.earlier_s + time.monotonic() - self._began_s,
      'state': packer.plain(holder.state()),
    }
    self._checkpoints.save(step, packer.arrays, meta, loss=None)

  def _open(self, header: Mapping) -> Checkpoint | None:
    """Returns this run's checkpoint, if any; prepares the folder."""
    found = None
    if self._written.exists():
      with self._written.open() as lines:
        if lines.readline() == json.dumps(header) + '\n':
          found = newest_after(self._arrays, 0)
    if found is None:
      shutil.rmtree(self._folder, ignore_errors=True)
      self._folder.mkdir(parents=True)
      self._written.write_text(json.dumps(header) + '\n')
      return None
    for path in self._arrays.iterdir():  # Newer ones can't be read.
      if path.name.isdecimal() and int(path.name) > found.step:
        shutil.rmtree(path)
    return found

  def _cut(self, count: int) -> list[tuple[str, Any]]:
    """Returns the answers before the checkpoint; removes later ones."""
    with self._written.open('r+b') as file:
      file.readline()
      known = [tuple(json.loads(file.readline())) for _ in range(count)]
      file.truncate(file.tell())
    return known


def _header(config: RunConfig) -> dict:
  """Returns what must be equal in every process of a run, as JSON."""
  return {
    'config': dataclasses.asdict(config),
    'jax': jax.__version__,
    'numpy': np.__version__,
    'platform': jax.default_backend(),
  }


def _say(line: str):
  print(line, file=sys.stderr, flush=True)
