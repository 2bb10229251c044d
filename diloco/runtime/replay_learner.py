# SPDX-License-Identifier: Apache-2.0
"""One learner's process done again from its script: parameters and steps."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from diloco.data import pipeline
from diloco.runtime import contributions, tape_lines
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.device import Device
from diloco.runtime.replay_plan import Named, NotReplayable, Script

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


@dataclasses.dataclass
class Standing:
  """What a process has; `Save` keeps a copy of it."""

  params: dict[str, jax.Array]  # Path -> parameter.
  inner: object  # State of the inner optimizer.
  bases: dict[int, Arrays]  # By fragment.
  snapshots: dict[int, dict[str, jax.Array]]  # By fragment, for blend 'carry'.

  def copy(self) -> 'Standing':
    """A step gives its arrays away; this one keeps them."""
    return Standing(
      jax.tree.map(jnp.copy, self.params),
      jax.tree.map(jnp.copy, self.inner),
      dict(self.bases),
      dict(self.snapshots),
    )


class ReplayedLearner:
  """Goes through a script line by line, as far as it is asked to.

  The order of what is done is that of `runtime/training.py`: the step, then
  the lines of its boundary.

  Args:
    blueprint: of the run.
    device: compiled; shared by all.
    learner: the id.
    script: of the process.
    standing: at its beginning; is taken over.
    theta: gives Θ_p by its name; each use counts.
  """

  def __init__(
    self,
    blueprint: Blueprint,
    device: Device,
    learner: int,
    script: Script,
    standing: Standing,
    theta: Callable[[Named], Arrays],
  ):
    self._blueprint = blueprint
    self._device = device
    self._learner = learner
    self._script = script
    self._standing: Standing | None = standing
    self._theta = theta
    self._schedule = blueprint.schedule()
    self._dataset = blueprint.dataset(learner)
    self._batches = None  # Once it trains.
    self._position = 0
    self._progress = 0  # Of the next step.
    self._done = 0  # Lines.
    self._step = script.begin.step
    self._offers: dict[int, np.ndarray] = {}  # Bytes, by index of the line.
    self._saves: dict[int, list] = {}  # [copy, uses left], by index.

  @property
  def steps(self) -> int:
    """Inner steps so far."""
    return self._step - self._script.begin.step

  def take_offer(self, index: int) -> np.ndarray:
    """The bytes that the snapshot at that line of the script gave."""
    self._advance(index)
    return self._offers.pop(index)

  def take_save(self, index: int) -> Standing:
    """What the process had at that line of the script."""
    self._advance(index)
    kept = self._saves[index]
    kept[1] -= 1
    if kept[1]:
      return kept[0].copy()
    return self._saves.pop(index)[0]

  def close(self):
    """Ends the reading of data."""
    if self._batches is not None:
      self._batches.close()
      self._batches = None

  def _advance(self, index: int):
    while self._done <= index:
      said = self._script.lines[self._done].said
      while self._step < said.step:
        self._inner_step()
      self._perform(self._done, said)
      self._done += 1
    if self._done == len(self._script.lines):
      self._standing = None  # All that is needed of it has been copied.
      self.close()

  def _inner_step(self):
    if self._batches is None:
      raise NotReplayable(
        f'learner {self._learner}, process {self._script.begin.process}: its '
        f'step {self._step + 1} comes before its Begin'
      )
    standing = self._standing
    batch = self._device.put_batch(next(self._batches))
    lr = self._schedule(self._progress)
    standing.params, standing.inner, _ = self._device.step(
      standing.params,
      standing.inner,
      batch,
      lr,
      (self._learner, self._position),
    )
    self._step += 1
    self._position += 1
    self._progress += 1

  def _perform(self, index: int, said):
    match said:
      case tape_lines.Begin():
        self._position = said.position
        self._batches = pipeline.batches(self._dataset, said.position)
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
      case tape_lines.Cease():
        pass
      case _:
        raise TypeError(f'Not of a learner: {said!r}.')

  def _snapshot(self, index: int, said: tape_lines.Snapshot):
    p, standing = said.fragment, self._standing
    carries = self._blueprint.config.protocol.blend == 'carry'
    is_merged = index in self._script.offered
    if not carries and not is_merged:
      return
    theta = self._device.snapshot(p, standing.params)
    if carries:
      standing.snapshots[p] = theta
    if is_merged:
      self._offers[index] = contributions.encode(
        standing.bases[p],
        theta,
        self._blueprint.layout.fragments[p],
        self._blueprint.up,
      )

  def _apply(self, said: tape_lines.Apply):
    p, standing = said.fragment, self._standing
    host = self._theta((p, said.version, said.crc))
    placed = self._device.put_fragment(p, host)
    standing.bases[p] = host
    if self._batches is None:  # Before the first step.
      standing.params = self._device.overwrite(p, standing.params, placed)
      return
    snapshot = standing.snapshots[p] if said.carry else placed
    standing.params = self._device.blend(p, standing.params, placed, snapshot)
