# SPDX-License-Identifier: Apache-2.0
"""Performs the work of a replayed run's processes on a device.

A replay asks `ReplayBackend` for what a process starts from, and has it repeat
what the tapes record.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diloco.learner.device import Device
from diloco.learner.own_progress import OwnProgress
from diloco.numerics import payload
from diloco.protocol.learner import events as learner_events
from diloco.protocol.syncer import events as syncer_events
from diloco.run import contributions, tape_events
from diloco.run.spec import RunSpec
from diloco.syncer.outer_state import OuterState, OuterStep

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


@dataclasses.dataclass(frozen=True)
class Given:
  """Θ_p as a learner takes it in."""

  version: int
  crc: int  # CRC of its bytes.
  theta: Arrays


class ReplayBackend:
  """Creates learners' states, and acts as the syncer, on one device."""

  def __init__(self, run_spec: RunSpec, device: Device):
    self._run_spec = run_spec
    self._device = device
    # The syncer is a process without other devices.
    self._cpu = jax.local_devices(backend='cpu')[0]
    with jax.default_device(self._cpu):
      self.model = OuterState(run_spec)

  def from_seed(self, learner: int) -> 'ReplayState':
    """Returns the state of a process that started from the configuration
    alone.
    """
    params, inner = self._device.init(self._run_spec.initial_parameters())
    bases = dict(enumerate(self._run_spec.initial_fragments()))
    return self._state(learner, params, inner, bases)

  def from_peer(
    self, learner: int, donor: 'ReplayState', given: Sequence[Given]
  ) -> 'ReplayState':
    """Returns the state of a process with a donor's inner state and Θ.

    The donor's state is consumed.
    """
    # All of θ consists of fragments: its earlier values do not matter.
    params = donor.params
    for p, each in enumerate(given):
      placed = self._device.put_fragment(p, each.theta)
      params = self._device.overwrite(p, params, placed)
    bases = {p: each.theta for p, each in enumerate(given)}
    return self._state(learner, params, donor.inner, bases)

  def outer_step(
    self, merge: syncer_events.Merge, offered: Mapping[int, np.ndarray]
  ) -> OuterStep:
    """Makes a round's outer step from the `offered` bytes, by learner."""
    pieces = self._run_spec.layout.fragments[merge.fragment]
    taken = {
      learner: payload.decode(data, pieces, self._run_spec.up)
      for learner, data in offered.items()
    }
    weights = {share.learner: share.weight for share in merge.shares}
    with jax.default_device(self._cpu):
      return self.model.outer_step(merge.fragment, taken, weights)

  def install(self, merge: syncer_events.Merge, outcome: OuterStep):
    """Installs the outer step of a round that has closed."""
    self.model.install(merge.fragment, outcome)

  def _state(self, learner: int, params, inner, bases) -> 'ReplayState':
    blend = self._run_spec.config.protocol.blend
    own = OwnProgress(self._device, blend, bases, params)
    return ReplayState(
      self._run_spec, self._device, learner, params, inner, own
    )


@dataclasses.dataclass
class ReplayState:
  """The state of a learner's process."""

  run_spec: RunSpec
  device: Device
  learner: int
  params: dict[str, jax.Array]  # Path -> parameter.
  inner: object  # State of the inner optimizer.
  own: OwnProgress

  def __post_init__(self):
    self._schedule = self.run_spec.schedule()
    self._dataset = self.run_spec.dataset(self.learner)

  def copy(self) -> 'ReplayState':
    """Returns a copy with arrays of its own, since a step donates its
    arrays.
    """
    return dataclasses.replace(
      self,
      params=jax.tree.map(jnp.copy, self.params),
      inner=jax.tree.map(jnp.copy, self.inner),
      own=self.own.copy(),
    )

  def step(self, position: int, progress: int):
    """Makes one inner step on the batch at `position`."""
    batch = self.device.put_batch(self._dataset[position])
    lr = self._schedule(progress)
    self.params, self.inner, _ = self.device.step(
      self.params, self.inner, batch, lr, (self.learner, position)
    )

  def snapshot(self, said: tape_events.Snapshot) -> dict[str, jax.Array]:
    """Returns a copy of θ_p at this boundary."""
    p = said.fragment
    # Only merged snapshots are made, so all are needed.
    return self.own.snapshot(p, self.params, said.handle, self.own.handles(p))

  def offer(self, said: tape_events.Snapshot, copy) -> np.ndarray:
    """Returns the bytes of that snapshot against its base."""
    p = said.fragment
    pieces = self.run_spec.layout.fragments[p]
    reference = self.own.reference(p)
    return contributions.encode(reference, copy, pieces, self.run_spec.up)

  def apply(self, said: tape_events.Apply, given: Given, training: bool):
    """Takes Θ_p into θ_p."""
    p = said.fragment
    placed = self.device.put_fragment(p, given.theta)
    effect = learner_events.Apply(p, said.version, said.carry, said.handle)
    self.params = self.own.take_in(
      p, self.params, given.theta, placed, effect, training
    )
