# SPDX-License-Identifier: Apache-2.0
"""The programs of a learner's devices: inner step, snapshots, blends.

Everything is compiled before the learner says hello, so that no other process
waits for it.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diloco.learner.inner_device import InnerDevice, Params
from diloco.learner.placement import piece_sharding, place_boxes
from diloco.numerics.blend import make_blend
from diloco.numerics.fragments import change, take
from diloco.run.host_slices import HostSlices
from diloco.run.spec import RunSpec
from diloco.run.step_profiler import StepProfiler

OVERWRITE = 'overwrite'  # Blend of a learner that has made no step since.
# Share of a device's memory that may be in use while θ is copied to be saved.
ROOM = 0.9
Arrays = Mapping[str, jax.Array]  # Piece name -> array.


class Device(InnerDevice):
  """One learner's mesh and compiled functions, including those of the exchange.

  Attributes:
    holding: which slices of each fragment this process has.
    profiler: told before each inner step, if there is one.
  """

  profiler: StepProfiler | None = None

  def __init__(
    self, run_spec: RunSpec, devices: Sequence[jax.Device] | None = None
  ):
    super().__init__(run_spec, devices)
    spread = self.partition.host_count > 1
    host = jax.process_index() if spread else 0
    self.holding = HostSlices(run_spec.layout, self.partition, host)
    self._compile_exchange()

  def copy_state(self, state):
    """Dispatches a copy of the inner state, on its way to the host.

    A copy, because the next step is given the buffers of the state itself. It
    takes as much device memory again, until it is on the host.
    """
    copied = self._copy_state(state)
    jax.tree.map(lambda x: x.copy_to_host_async(), copied)
    return copied

  def copy_all(self, params: Params, state):
    """Dispatches a copy of θ and the inner state, on its way to the host.

    Returns:
      θ and the inner state; None if a device has no room for the copy beside an
      inner step, or does not say how much it has.
    """
    step = self.programs['step'].memory_analysis()
    taken = (
      2 * step.argument_size_in_bytes  # Those of the copy, and of the step.
      + step.temp_size_in_bytes
      + step.output_size_in_bytes
      - step.alias_size_in_bytes
      + step.generated_code_size_in_bytes
    )
    # A process's devices are alike.
    known = self._mesh.local_devices[0].memory_stats() or {}
    if taken > ROOM * known.get('bytes_limit', 0):
      return None
    copied = self._copy_all((params, state))
    jax.tree.map(lambda x: x.copy_to_host_async(), copied)
    return copied

  def copy_params(self, params: Params) -> Params:
    """Dispatches a copy of θ."""
    copy = lambda params: jax.tree.map(jnp.copy, params)  # noqa: E731
    return jax.jit(copy, out_shardings=self._shardings)(params)

  def compile_copy_all(self):
    """Compiles `copy_all`."""
    with jax.set_mesh(self._mesh):
      self._copy_all = (
        jax.jit(
          lambda held: jax.tree.map(jnp.copy, held),
          out_shardings=(self._shardings, self._state_shardings),
        )
        .lower((self.params_like, self._state_like))
        .compile()
      )

  def put_fragment(
    self, fragment: int, arrays: Mapping[str, np.ndarray]
  ) -> dict[str, jax.Array]:
    """Puts a fragment of Θ on the devices, to be blended in; waits for it.

    Args:
      arrays: box name -> array; a learner's only process has whole pieces.
    """
    places = self._places[fragment]
    boxes = self.holding.by_piece[fragment]
    placed = {
      piece.name: place_boxes(
        piece, boxes[piece.name], arrays, places[piece.name]
      )
      for piece in self._run_spec.layout.fragments[fragment]
    }
    return jax.block_until_ready(placed)

  def snapshot(self, fragment: int, params: Params) -> dict[str, jax.Array]:
    """Dispatches a copy of one fragment, on its way to the host."""
    arrays = self._snapshots[fragment](params)
    for array in arrays.values():
      array.copy_to_host_async()
    return arrays

  def blend(
    self, fragment: int, params: Params, global_: Arrays, snapshot: Arrays
  ) -> Params:
    """Dispatches the blend of Θ_p into θ; `params` is donated."""
    return self._blends[fragment](params, global_, snapshot)

  def overwrite(self, fragment: int, params: Params, global_: Arrays) -> Params:
    """Dispatches θ_p = Θ_p whatever the rule; `params` is donated.

    A joining learner has no progress that a blend could keep.
    """
    return self._overwrites[fragment](params, global_, global_)

  def _compile_exchange(self):
    params = self.params_like
    with jax.set_mesh(self._mesh):
      self._copy_state = (
        jax.jit(
          lambda state: jax.tree.map(jnp.copy, state),
          out_shardings=self._state_shardings,
        )
        .lower(self._state_like)
        .compile()
      )
      fragments = range(len(self._run_spec.layout.fragments))
      self._places = [
        {
          piece.name: piece_sharding(piece, self.partition, self._mesh)
          for piece in self._run_spec.layout.fragments[p]
        }
        for p in fragments
      ]
      self._snapshots = [self._compile_snapshot(p, params) for p in fragments]
      config = self._run_spec.config
      rule = make_blend(config.protocol.blend, config.protocol.blend_alpha)
      self._blends = [
        self._compile_blend('blend', rule, p, params) for p in fragments
      ]
      self._overwrites = self._blends
      if config.protocol.blend != OVERWRITE:
        rule = make_blend(OVERWRITE)
        self._overwrites = [
          self._compile_blend(OVERWRITE, rule, p, params) for p in fragments
        ]
    self.programs['copy of the inner state'] = self._copy_state

  def _compile_snapshot(self, fragment: int, params):
    pieces = self._run_spec.layout.fragments[fragment]

    def copy(params):
      # Slicing copies, except where a piece is the whole array.
      return {name: jnp.copy(x) for name, x in take(params, pieces).items()}

    used = {piece.path for piece in pieces}
    compiled = (
      jax.jit(copy, out_shardings=self._places[fragment])
      .lower({path: params[path] for path in used})
      .compile()
    )
    self.programs[f'snapshot {fragment}'] = compiled
    return lambda params: compiled({path: params[path] for path in used})

  def _compile_blend(self, name: str, rule, fragment: int, params):
    pieces = self._run_spec.layout.fragments[fragment]
    used = {piece.path for piece in pieces}

    def blend(params, global_, snapshot):
      for piece in pieces:

        def blended(theta, name=piece.name):
          told = (x[name].reshape(theta.shape) for x in (global_, snapshot))
          return rule({name: theta}, *({name: x} for x in told))[name]

        params = change(params, piece, blended)
      return params

    arrays = {
      piece.name: jax.ShapeDtypeStruct(
        piece.shape, jnp.float32, sharding=self._places[fragment][piece.name]
      )
      for piece in pieces
    }
    compiled = (
      jax.jit(
        blend,
        donate_argnums=0,
        out_shardings={path: self._shardings[path] for path in used},
      )
      .lower({path: params[path] for path in used}, arrays, arrays)
      .compile()
    )
    self.programs[f'{name} {fragment}'] = compiled

    def apply(params, global_, snapshot):
      changed = compiled(
        {path: params[path] for path in used}, global_, snapshot
      )
      return {**params, **changed}

    return apply
