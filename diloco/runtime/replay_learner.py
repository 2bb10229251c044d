# SPDX-License-Identifier: Apache-2.0
"""Repeats one learner's process from its script: parameters and steps."""

from collections.abc import Callable

import numpy as np

from diloco.runtime import tape_lines
from diloco.runtime.replay_contents import Given, Standing
from diloco.runtime.replay_plan import Named, NotReplayable, Script


class ReplayedLearner:
  """Executes a script line by line, as far as it is asked to.

  The order is that of `runtime/training.py`: the step, then the lines of its
  boundary.

  Args:
    learner: the learner id.
    script: the script of the process.
    standing: the state that the process starts from; consumed.
    theta: returns Θ_p by its name; each use counts.
  """

  def __init__(
    self,
    learner: int,
    script: Script,
    standing: Standing,
    theta: Callable[[Named], Given],
  ):
    self._learner = learner
    self._script = script
    self._standing: Standing | None = standing
    self._theta = theta
    self._training = False
    self._position = 0
    self._progress = 0  # Schedule argument of the next step.
    self._done = 0  # Number of executed lines.
    self._step = script.begin.step
    self._offers: dict[int, np.ndarray] = {}  # Bytes, by index of the line.
    self._saves: dict[int, list] = {}  # [copy, uses left], by index.

  @property
  def steps(self) -> int:
    """Inner steps so far."""
    return self._step - self._script.begin.step

  def take_offer(self, index: int) -> np.ndarray:
    """Returns the bytes of the snapshot at that line of the script."""
    self._advance(index)
    return self._offers.pop(index)

  def take_save(self, index: int) -> Standing:
    """Returns the state of the process at that line of the script."""
    self._advance(index)
    kept = self._saves[index]
    kept[1] -= 1
    if kept[1]:
      return kept[0].copy()
    return self._saves.pop(index)[0]

  def _advance(self, index: int):
    while self._done <= index:
      said = self._script.lines[self._done].said
      while self._step < said.step:
        self._inner_step()
      self._perform(self._done, said)
      self._done += 1
    if self._done == len(self._script.lines):
      self._standing = None  # All that is needed of it has been copied.

  def _inner_step(self):
    if not self._training:
      raise NotReplayable(
        f'learner {self._learner}, process {self._script.begin.process}: its '
        f'step {self._step + 1} comes before its Begin'
      )
    self._standing.step(self._position, self._progress)
    self._step += 1
    self._position += 1
    self._progress += 1

  def _perform(self, index: int, said):
    match said:
      case tape_lines.Begin():
        self._position = said.position
        self._training = True
      case tape_lines.Progress():
        self._progress = said.progress
      case tape_lines.Snapshot():
        self._snapshot(index, said)
      case tape_lines.Apply():
        self._apply(said)
      case tape_lines.Save():
        uses = self._script.saves.get(index, 0)
        if uses:
          self._saves[index] = [self._standing.copy(), uses]
      case tape_lines.Cease() | tape_lines.Leave():
        pass
      case _:
        raise TypeError(f'Not of a learner: {said!r}.')

  def _snapshot(self, index: int, said: tape_lines.Snapshot):
    if index in self._script.offered:
      copy = self._standing.snapshot(said)
      self._offers[index] = self._standing.offer(said, copy)

  def _apply(self, said: tape_lines.Apply):
    given = self._theta((said.fragment, said.version, said.crc))
    self._standing.apply(said, given, self._training)
