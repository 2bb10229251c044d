# SPDX-License-Identifier: Apache-2.0
"""What of θ a learner has done itself, and how it takes in an updated Θ_p.

Everything that does this is here: the training loop, the other hosts of a
learner, the replay of a tape and the lab all call it.
"""

import copy
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from diloco.runtime.device import OVERWRITE, Device

Arrays = Mapping[str, np.ndarray]  # Piece or box name -> f32 array.
Copy = Mapping[str, jax.Array]  # Piece name -> array, on the devices.


class OwnProgress:
  """The bases of a learner's offers, and the copies that they were made of.

  A fragment's offer is its *reference* − θ. The reference is such that the
  difference is the learner's own work and nothing else: the base, Θ_p as it
  was last received; with the blend 'mix', which leaves a share of θ beside
  Θ_p, what θ was set to.

  With the blend 'carry' the copy of each offer that may still be merged is
  kept on the devices: at most `protocol.learner_state.MADE_MAX` of a fragment.

  Args:
    device: takes copies, blends.
    blend: 'overwrite', 'mix' or 'carry'.
    bases: by fragment.
    params: θ as it is now, path -> array. With 'mix' an offer counts from it
      until an update comes: a checkpoint does not say what θ was set to.

  Attributes:
    bases: Θ_p as it was last taken in, by fragment.
  """

  def __init__(
    self,
    device: Device,
    blend: str,
    bases: Mapping[int, Arrays],
    params: Mapping[str, jax.Array],
  ):
    self._device = device
    self._blend = blend
    self.bases = dict(bases)
    self._references: dict[int, Copy] = {}  # Where it is not the base.
    if blend == 'mix':
      self._references = {p: device.snapshot(p, params) for p in bases}
    self._copies: dict[int, dict[int, Copy]] = {}  # By fragment and handle.

  def reference(self, fragment: int) -> Arrays | Copy:
    """What an offer of the fragment is relative to."""
    return self._references.get(fragment, self.bases[fragment])

  def handles(self, fragment: int) -> tuple[int, ...]:
    """Of the copies that are kept."""
    return tuple(self._copies.get(fragment, ()))

  def snapshot(
    self,
    fragment: int,
    params: Mapping[str, jax.Array],
    handle: int,
    keep: Collection[int],
  ) -> Copy:
    """Dispatches a copy of θ_p on its way to the host; keeps it for 'carry'.

    Args:
      fragment: which.
      params: θ, path -> array.
      handle: of the offer that is made of it.
      keep: the handles of those copies of the fragment that are still of use.
    """
    copy = self._device.snapshot(fragment, params)
    if self._blend == 'carry':
      kept = self._kept(fragment, keep)
      self._copies[fragment] = {**kept, handle: copy}
    return copy

  def take_in(
    self,
    fragment: int,
    params: Mapping[str, jax.Array],
    theta: Arrays,
    placed: Copy,
    said: Any,
    training: bool,
  ) -> dict[str, jax.Array]:
    """Blends Θ_p into θ, dispatched; Θ_p is the base from now on.

    Args:
      fragment: which.
      params: θ, path -> array; is given away.
      theta: Θ_p on the host.
      placed: the same on the devices.
      said: has `carry`, `handle` and `keep`, see `protocol.learner_io.Apply`.
      training: False before the first step: there is no progress yet.
    """
    copies = self._copies.get(fragment, {})
    self.bases[fragment] = theta
    self._references.pop(fragment, None)
    self._copies[fragment] = self._kept(fragment, said.keep)
    if training and said.carry:
      since = copies[said.handle]
      return self._device.blend(fragment, params, placed, since)
    if not training or self._blend in (OVERWRITE, 'carry'):
      return self._device.overwrite(fragment, params, placed)
    params = self._device.blend(fragment, params, placed, placed)
    self._references[fragment] = self._device.snapshot(fragment, params)
    return params

  def _kept(self, fragment: int, keep: Collection[int]):
    copies = self._copies.get(fragment, {})
    return {handle: copies[handle] for handle in copies if handle in keep}

  # For another process --------------------------------------------------------

  def state(self) -> dict[str, Any]:
    """All of it but the bases."""
    return {'references': self._references, 'copies': self._copies}

  def go_on(self, bases: Mapping[int, Arrays], state: Mapping[str, Any]):
    """From what `state` gave."""
    self.bases = dict(bases)
    self._references = dict(state['references'])
    self._copies = {p: dict(x) for p, x in state['copies'].items()}

  def copy(self) -> 'OwnProgress':
    """Nothing that happens later changes it."""
    copied = copy.copy(self)
    copied.go_on(self.bases, self.state())
    return copied
