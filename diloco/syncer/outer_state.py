# SPDX-License-Identifier: Apache-2.0
"""Θ at the syncer: fragments, outer optimizer, and what is sent of them."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from diloco.numerics import fragments, merge, outer, payload
from diloco.run.spec import RunSpec

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


@dataclasses.dataclass(frozen=True)
class OuterStep:
  """The result of an outer step, to be installed."""

  state: outer.FragmentState
  data: np.ndarray  # Bytes of the outer update.
  crcs: tuple[int, ...]  # CRCs of the resulting pieces.

  @property
  def crc(self) -> int:
    """CRC of the resulting Θ_p, if all its pieces are here."""
    return payload.crc_of(self.crcs)


class OuterState:
  """One state per fragment, replaced as a whole when a round closes.

  Initial parameters are drawn when the state of a fragment is first asked for
  that was not restored before: a process that resumes a run draws none.

  Args:
    shard: the shard whose pieces are here; None: all are.

  Attributes:
    owned: the fragments of which a piece is here.
  """

  def __init__(self, run_spec: RunSpec, shard: int | None = None):
    self._run_spec = run_spec
    owners = run_spec.owners.shard_of
    self._pieces = [
      pieces if shard in (None, owner) else ()
      for pieces, owner in zip(run_spec.layout.fragments, owners)
    ]
    self.owned = tuple(p for p, pieces in enumerate(self._pieces) if pieces)
    self._optimizer = run_spec.outer
    self._known: dict[int, outer.FragmentState] = {}  # Drawn or restored.
    self._crcs: dict[int, tuple[int, ...]] = {}
    # Version and CRCs of Θ_p to which each outer state belongs.
    self._outer: dict[int, tuple[int, tuple[int, ...]]] = {}
    for p, pieces in enumerate(self._pieces):
      if not pieces:
        self.restore(p, outer.init({}, self._optimizer))

  def outer_step(
    self,
    fragment: int,
    contributions: Mapping[int, Arrays],
    weights: Mapping[int, float],
  ) -> OuterStep:
    """Merges, steps and encodes (Alg. 2, lines 12 and 13).

    Nothing changes here until `install` makes the result Θ.

    Args:
      contributions: v_m by learner id.
      weights: w_m by learner id.
    """
    pieces = self._pieces[fragment]
    delta = merge.merge(
      contributions, weights, pieces, *self._run_spec.merge_rules
    )
    state, data = outer.step(
      self.state(fragment),
      delta,
      self._optimizer,
      self._run_spec.down,
      pieces,
      self._run_spec.config.codec.error_feedback,
    )
    return OuterStep(state, data, self._piece_crcs(fragment, state.theta))

  def install(self, fragment: int, outcome: OuterStep):
    """Makes the result of a closed round the new Θ_p."""
    self._known[fragment] = outcome.state
    self._crcs[fragment] = outcome.crcs
    self._outer[fragment] = outcome.state.version, outcome.crcs

  def fragment(self, fragment: int) -> tuple[int, np.ndarray, int]:
    """Returns version, bytes in f32 and CRC of one fragment, consistent."""
    state = self.state(fragment)
    pieces = self._pieces[fragment]
    data = payload.encode(state.theta, pieces, self._run_spec.full)
    return state.version, data, payload.crc_of(self._crcs[fragment])

  def state(self, fragment: int) -> outer.FragmentState:
    """Returns everything of one fragment that a checkpoint keeps."""
    if fragment not in self._known:
      self._draw()
    return self._known[fragment]

  def template(self, fragment: int) -> outer.FragmentState:
    """Returns a state of zeros, for reading a checkpoint of this shape."""
    like = self._run_spec.fragments_like()[fragment]
    zeros = {
      x.name: np.zeros(like[x.name].shape, np.float32)
      for x in self._pieces[fragment]
    }
    return outer.init(zeros, self._optimizer)

  def restore(self, fragment: int, state: outer.FragmentState):
    """Restores one fragment from a checkpoint's state."""
    self._set(fragment, state)
    self._outer[fragment] = state.version, self._crcs[fragment]

  def go_on(self, fragment: int, version: int, theta: Arrays | None):
    """Sets Θ_p to `version`, whatever it was here.

    The outer optimizer's state and the residual stay as they were at an older
    close.

    Args:
      theta: new arrays; None: those that are here.
    """
    state = dataclasses.replace(self.state(fragment), version=version)
    if theta is not None:
      state = dataclasses.replace(state, theta=theta)
    self._set(fragment, state)

  def outer_of(self, fragment: int) -> tuple[int, tuple[int, ...]]:
    """Returns the version and piece CRCs to which the outer state belongs."""
    self.state(fragment)
    return self._outer[fragment]

  def versions(self) -> tuple[int, ...]:
    """Returns the version of every fragment."""
    return tuple(self.state(p).version for p in range(len(self._pieces)))

  def crcs(self) -> tuple[int, ...]:
    """Returns the CRC of every fragment's bytes."""
    return tuple(
      payload.crc_of(self.piece_crcs(p)) for p in range(len(self._pieces))
    )

  def piece_crcs(self, fragment: int) -> tuple[int, ...]:
    """Returns the CRCs of one fragment's pieces that are here."""
    self.state(fragment)
    return self._crcs[fragment]

  def parameters(self) -> dict[str, np.ndarray]:
    """Returns Θ as path -> f32 array."""
    params = {
      path: np.empty(spec.shape, np.float32)
      for path, spec in self._run_spec.specs.items()
    }
    for p, pieces in enumerate(self._pieces):
      params = fragments.put(params, pieces, self.state(p).theta)
    return params

  def _draw(self):
    """Makes the run's initial parameters for fragments without a state."""
    wanted = [
      () if p in self._known else pieces
      for p, pieces in enumerate(self._pieces)
    ]
    for p, theta in enumerate(self._run_spec.initial_fragments(wanted)):
      if p not in self._known:
        self.restore(p, outer.init(theta, self._optimizer))

  def _set(self, fragment: int, state: outer.FragmentState):
    self._known[fragment] = state
    self._crcs[fragment] = self._piece_crcs(fragment, state.theta)

  def _piece_crcs(self, fragment: int, theta: Arrays) -> tuple[int, ...]:
    return payload.piece_crcs(theta, self._pieces[fragment])
