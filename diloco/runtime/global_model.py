# SPDX-License-Identifier: Apache-2.0
"""Θ at the syncer: fragments, outer optimizer, and what is sent of them."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import optax

from diloco.config import RunConfig
from diloco.numerics import fragments, merge, outer, payload
from diloco.runtime.blueprint import Blueprint

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What an outer step leads to, once it is installed."""

  state: outer.FragmentState
  data: np.ndarray  # The bytes of the outer update.
  crc: int  # Of the resulting Θ_p.


def make_optimizer(config: RunConfig) -> optax.GradientTransformation:
  """The outer optimizer of one fragment; it counts the fragment's rounds."""
  settings = config.outer
  anneal = None
  if settings.anneal_fraction:
    rounds = config.protocol.total_steps / config.protocol.sync_every_steps
    anneal = outer.Anneal(
      begin=(1 - settings.anneal_fraction) * rounds,
      end=rounds,
      final_lr=settings.final_lr,
    )
  return outer.make_outer(
    settings.lr, settings.momentum, settings.nesterov, anneal
  )


class GlobalModel:
  """One state per fragment, replaced as a whole when a round closes."""

  def __init__(self, blueprint: Blueprint):
    self._blueprint = blueprint
    config = blueprint.config
    self._optimizer = make_optimizer(config)
    self._states = [
      outer.init(theta, self._optimizer)
      for theta in blueprint.initial_fragments()
    ]
    self._crcs = [
      self._crc(p, state.theta) for p, state in enumerate(self._states)
    ]
    self._compile()

  def outer_step(
    self,
    fragment: int,
    contributions: Mapping[int, Arrays],
    weights: Mapping[int, float],
  ) -> Outcome:
    """Merges, steps, encodes (paper: Alg. 2 lines 12 and 13).

    Changes nothing: Θ is the new one when `install` says so.

    Args:
      fragment: which.
      contributions: v_m by learner id.
      weights: w_m by learner id.
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
    return Outcome(state, data, self._crc(fragment, state.theta))

  def install(self, fragment: int, outcome: Outcome):
    """The round has closed: from now on this is Θ_p."""
    self._states[fragment] = outcome.state
    self._crcs[fragment] = outcome.crc

  def fragment(self, fragment: int) -> tuple[int, np.ndarray, int]:
    """Version, bytes in f32 and CRC of one fragment, belonging together."""
    state = self._states[fragment]
    pieces = self._blueprint.layout.fragments[fragment]
    data = payload.encode(state.theta, pieces, self._blueprint.full)
    return state.version, data, self._crcs[fragment]

  def state(self, fragment: int) -> outer.FragmentState:
    """Everything of one fragment, as a checkpoint keeps it."""
    return self._states[fragment]

  def restore(self, fragment: int, state: outer.FragmentState):
    """Goes on from a checkpoint's state."""
    self._states[fragment] = state
    self._crcs[fragment] = self._crc(fragment, state.theta)

  def go_on(self, fragment: int, version: int, theta: Arrays | None):
    """Θ_p is at `version` from now on, whatever it was here.

    The outer optimizer's state and the residual stay: of an older close.

    Args:
      fragment: which.
      version: that it has in the run.
      theta: its arrays; None: those that are here.
    """
    state = dataclasses.replace(self._states[fragment], version=version)
    if theta is not None:
      state = dataclasses.replace(state, theta=theta)
    self.restore(fragment, state)

  def versions(self) -> tuple[int, ...]:
    """Of every fragment."""
    return tuple(state.version for state in self._states)

  def crcs(self) -> tuple[int, ...]:
    """Of the bytes of every fragment."""
    return tuple(self._crcs)

  def parameters(self) -> dict[str, np.ndarray]:
    """Θ as path -> f32 array."""
    params = {
      path: np.empty(spec.shape, np.float32)
      for path, spec in self._blueprint.specs.items()
    }
    for state, pieces in zip(self._states, self._blueprint.layout.fragments):
      params = fragments.put(params, pieces, state.theta)
    return params

  def _compile(self):
    """Makes a step of every fragment and forgets it: rounds must not wait."""
    for fragment, state in enumerate(self._states):
      zeros = {name: np.zeros_like(x) for name, x in state.theta.items()}
      self.outer_step(fragment, {0: zeros}, {0: 1.0})

  def _crc(self, fragment: int, theta: Arrays) -> int:
    return payload.crc(theta, self._blueprint.layout.fragments[fragment])
