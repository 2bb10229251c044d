# SPDX-License-Identifier: Apache-2.0
"""Tracks a learner's own progress in θ, and takes in an updated Θ_p.

All of this logic is here: the train loop, the other hosts of a learner, the
replay of an event log and the lab call it.
"""

import copy
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from diloco.learner.exchange_programs import ExchangePrograms
from diloco.protocol.config import blending_of

Arrays = Mapping[str, np.ndarray]  # Piece or box name -> f32 array.
Copy = Mapping[str, jax.Array]  # Piece name -> array, on the devices.


class LocalDelta:
  """The bases of a learner's offers, and the copies they were made from.

  A fragment's offer is its *reference* − θ. The reference is chosen such that
  the difference is the learner's own work and nothing else: the base, which is
  Θ_p as last received; with the blend 'interpolate', which leaves a share of θ
  next to Θ_p, what θ was set to.

  With a blend that rebases, the copy of each offer that may still be merged is
  kept on the devices: at most `protocol.learner.state.OWN_OFFERS_MAX` of a
  fragment.

  Args:
    programs: copy and blend fragments.
    blend: as of `protocol.config.ProtocolConfig`.
    bases: Θ_p by fragment.
    params: the current θ, path -> array; None: it will be set to the bases.
      With 'interpolate' an offer counts from it until an update comes: a
      checkpoint does not say what θ was set to.

  Attributes:
    bases: Θ_p as last taken in, by fragment.
  """

  def __init__(
    self,
    programs: ExchangePrograms,
    blend: str,
    bases: Mapping[int, Arrays],
    params: Mapping[str, jax.Array] | None,
  ):
    self._programs = programs
    self._blending = blending_of(blend)
    self.bases = dict(bases)
    # Only where it differs from the base.
    self._references: dict[int, Copy] = {}
    if self._blending.interpolates and params is not None:
      self._references = {p: programs.snapshot(p, params) for p in bases}
    self._copies: dict[int, dict[int, Copy]] = {}  # By fragment and handle.

  def reference(self, fragment: int) -> Arrays | Copy:
    """Returns what an offer of the fragment is relative to."""
    return self._references.get(fragment, self.bases[fragment])

  def handles(self, fragment: int) -> tuple[int, ...]:
    """Returns the handles of the copies that are kept."""
    return tuple(self._copies.get(fragment, ()))

  def snapshot(
    self,
    fragment: int,
    params: Mapping[str, jax.Array],
    handle: int,
    keep: Collection[int],
  ) -> Copy:
    """Dispatches a copy of θ_p on its way to the host; keeps it to rebase.

    Args:
      params: θ, path -> array.
      handle: handle of the offer that is made from it.
      keep: handles of the fragment's copies that are still needed.
    """
    copy = self._programs.snapshot(fragment, params)
    if self._blending.rebases:
      kept = self._kept(fragment, keep)
      self._copies[fragment] = {**kept, handle: copy}
    return copy

  def take_in(
    self,
    fragment: int,
    params: Mapping[str, jax.Array],
    theta: Arrays,
    placed: Copy,
    order: Any,
    training: bool,
  ) -> dict[str, jax.Array]:
    """Dispatches the blend of Θ_p into θ and makes Θ_p the new base.

    Args:
      params: θ, path -> array; donated.
      theta: Θ_p on the host.
      placed: Θ_p on the devices.
      order: has `carry`, `handle` and `keep`, as
        `protocol.learner.events.Apply` has.
      training: False before the first step: there is no progress yet.
    """
    copies = self._copies.get(fragment, {})
    self.bases[fragment] = theta
    self._references.pop(fragment, None)
    self._copies[fragment] = self._kept(fragment, order.keep)
    if training and order.carry:
      since = copies[order.handle]
      return self._programs.blend(fragment, params, placed, since)
    if not training or not self._blending.interpolates:
      return self._programs.replace(fragment, params, placed)
    params = self._programs.blend(fragment, params, placed, placed)
    self._references[fragment] = self._programs.snapshot(fragment, params)
    return params

  def _kept(self, fragment: int, keep: Collection[int]):
    copies = self._copies.get(fragment, {})
    return {handle: copies[handle] for handle in copies if handle in keep}

  def copy(self) -> 'LocalDelta':
    """Returns a copy that later changes do not affect."""
    copied = copy.copy(self)
    copied.bases = dict(self.bases)
    copied._references = dict(self._references)
    copied._copies = {p: dict(x) for p, x in self._copies.items()}
    return copied
