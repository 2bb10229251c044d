# SPDX-License-Identifier: Apache-2.0
"""The contents of the lab's processes, driven by the tapes of a real run.

The lab's own arrays do what the run's processes did, in the same order: that
the result has the same bytes shows that the lab computes what a real run does.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from diloco.lab.contents import LabContents, LearnerArrays
from diloco.lab.contents_records import Donated
from diloco.numerics import payload
from diloco.protocol import learner_io, syncer_io
from diloco.protocol.joining import Start
from diloco.runtime import tape_lines
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.device import Device
from diloco.runtime.global_model import Outcome
from diloco.runtime.host_copy import Held
from diloco.runtime.replay_contents import Given
from diloco.runtime.replay_plan import NotReplayable
from diloco.sim.contents import Unusable


class LabFollowing:
  """An implementation of `diloco.runtime.replay_contents.Contents`.

  Args:
    device: compiled; shared by all.
  """

  def __init__(self, blueprint: Blueprint, device: Device):
    self._blueprint = blueprint
    self._lab = LabContents(blueprint, device)
    self._cpu = jax.local_devices(backend='cpu')[0]
    with jax.default_device(self._cpu):
      self._syncer = self._lab.syncer(self._lab.first_crcs, None)
    self.model = self._syncer.model

  def from_seed(self, learner: int) -> 'Following':
    start = Start.from_seed(self._lab.first_crcs)
    arrays = self._lab.learner(learner, start, None)
    return Following(self._blueprint, self._lab, learner, arrays)

  def from_checkpoint(self, learner: int, saved: 'Following') -> 'Following':
    return saved

  def from_peer(
    self, learner: int, donor: 'Following', given: Sequence[Given]
  ) -> 'Following':
    """Adopts a peer's state as a real run does: Θ and inner state, then θ."""
    standing = self.from_seed(learner)
    standing.adopt(donor.arrays, given)
    return standing

  def outer_step(
    self, merge: syncer_io.Merge, offered: Mapping[int, np.ndarray]
  ) -> Outcome:
    try:
      taken = {
        learner: self._syncer.decode(merge.fragment, data)[0]
        for learner, data in offered.items()
      }
    except Unusable as error:
      raise NotReplayable(f'round {merge.round}: {error}') from None
    with jax.default_device(self._cpu):
      self._syncer.merge(merge, taken)
    return self._syncer.merged(merge.fragment)

  def install(self, merge: syncer_io.Merge, outcome: Outcome):
    self._syncer.publish(merge.fragment, merge.version)


class Following:
  """An implementation of `diloco.runtime.replay_contents.Standing`.

  Args:
    lab: made the arrays.
    learner: the learner id.
    arrays: consumed.
  """

  def __init__(
    self,
    blueprint: Blueprint,
    lab: LabContents,
    learner: int,
    arrays: LearnerArrays,
  ):
    self.arrays = arrays
    self._blueprint = blueprint
    self._lab = lab
    self._learner = learner

  def copy(self) -> 'Following':
    saved, crcs = self.arrays.save(), tuple(self.arrays.base_crcs)
    # `apply` decides to which versions they belong.
    start = Start.from_seed(crcs)
    arrays = self._lab.learner(self._learner, start, saved)
    return Following(self._blueprint, self._lab, self._learner, arrays)

  def step(self, position: int, progress: int):
    self.arrays.step(position, progress)

  def snapshot(self, said: tape_lines.Snapshot):
    effect = learner_io.Snapshot(
      handle=said.handle,
      keep=self.arrays.kept(said.fragment),
      round=said.round,
      fragment=said.fragment,
      base_version=said.base_version,
      c_steps=0,
      c_tokens=0,
      step=said.step,
    )
    return self.arrays.snapshot(effect)

  def offer(self, said: tape_lines.Snapshot, copied) -> np.ndarray:
    return self.arrays.offer(said, copied)

  def apply(self, said: tape_lines.Apply, given: Given, training: bool):
    p = said.fragment
    pieces = self._blueprint.layout.fragments[p]
    data = payload.encode(given.theta, pieces, self._blueprint.full)
    reason = self.arrays.replace(p, given.version, data, given.crc)
    if reason is not None:
      raise NotReplayable(f'learner {self._learner}: {reason}')
    effect = learner_io.Apply(p, said.version, said.carry, said.handle)
    self.arrays.apply(effect, training)

  def adopt(self, donor: LearnerArrays, given: Sequence[Given]):
    """Adopts a donor's inner state, and the given Θ."""
    held = [Held(each.version, each.theta, each.crc) for each in given]
    self.arrays.adopt(None, Donated(held, donor.donate().inner))
    self.arrays.adopt_inner()
    for p, each in enumerate(given):
      effect = learner_io.Apply(p, each.version, carry=False)
      self.arrays.apply(effect, training=False)
