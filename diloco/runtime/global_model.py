# SPDX-License-Identifier: Apache-2.0
"""Θ at the syncer: fragments, outer optimizer, and what is sent of them."""

from collections.abc import Mapping

import numpy as np

from diloco.numerics import fragments, merge, outer, payload
from diloco.runtime.blueprint import Blueprint

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


class GlobalModel:
  """One state per fragment, replaced as a whole when a round closes.

  `outer_step` is for one thread; the rest may be called from any.
  """

  def __init__(self, blueprint: Blueprint):
    self._blueprint = blueprint
    config = blueprint.config
    self._optimizer = outer.make_outer(
      config.outer.lr, config.outer.momentum, config.outer.nesterov
    )
    self._states = [
      outer.init(theta, self._optimizer)
      for theta in blueprint.initial_fragments()
    ]
    self._compile()

  def _compile(self):
    """Makes a step of every fragment and forgets it: rounds must not wait."""
    for fragment, state in enumerate(self._states):
      zeros = {name: np.zeros_like(x) for name, x in state.theta.items()}
      self.outer_step(fragment, {0: zeros}, {0: 1.0})
      self._states[fragment] = state

  def outer_step(
    self,
    fragment: int,
    contributions: Mapping[int, Arrays],
    weights: Mapping[int, float],
  ) -> tuple[np.ndarray, int]:
    """Merges, steps, encodes (paper: Alg. 2 lines 12 and 13).

    Args:
      fragment: which.
      contributions: v_m by learner id.
      weights: w_m by learner id.

    Returns:
      The bytes of the outer update and the CRC of the resulting Θ_p.
    """
    config = self._blueprint.config
    pieces = self._blueprint.layout.fragments[fragment]
    delta = merge.merge(
      contributions,
      weights,
      pieces,
      rule=config.merge.rule,
      embedding_rule=config.merge.embedding,
    )
    state, data = outer.step(
      self._states[fragment],
      delta,
      self._optimizer,
      self._blueprint.down,
      pieces,
      config.codec.error_feedback,
    )
    self._states[fragment] = state
    return data, payload.crc(state.theta, pieces)

  def fragment(self, fragment: int) -> tuple[int, np.ndarray, int]:
    """Version, bytes in f32 and CRC of one fragment, belonging together."""
    state = self._states[fragment]
    pieces = self._blueprint.layout.fragments[fragment]
    data = payload.encode(state.theta, pieces, self._blueprint.full)
    return state.version, data, payload.crc(state.theta, pieces)

  def state(self, fragment: int) -> outer.FragmentState:
    """Everything of one fragment, as a checkpoint keeps it."""
    return self._states[fragment]

  def restore(self, fragment: int, state: outer.FragmentState):
    """Goes on from a checkpoint's state."""
    self._states[fragment] = state

  def crcs(self) -> tuple[int, ...]:
    """Of the bytes of every fragment."""
    layout = self._blueprint.layout
    return tuple(
      payload.crc(state.theta, pieces)
      for state, pieces in zip(self._states, layout.fragments)
    )

  def parameters(self) -> dict[str, np.ndarray]:
    """Θ as path -> f32 array."""
    params = {
      path: np.empty(spec.shape, np.float32)
      for path, spec in self._blueprint.specs.items()
    }
    for state, pieces in zip(self._states, self._blueprint.layout.fragments):
      params = fragments.put(params, pieces, state.theta)
    return params
