# SPDX-License-Identifier: Apache-2.0
"""What a learner runs on its devices: the inner step, snapshots, blends.

All is compiled before the learner says hello, so that no one waits for it.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diloco.models import interface, sharding
from diloco.numerics import inner
from diloco.numerics.blend import make_blend
from diloco.numerics.fragments import put, take
from diloco.runtime.blueprint import Blueprint

Params = dict[str, jax.Array]  # Path -> parameter.
Arrays = Mapping[str, jax.Array]  # Piece name -> array.


class Device:
  """One learner's mesh and compiled functions.

  Attributes:
    tokens_per_step: B · L.
  """

  def __init__(
    self, blueprint: Blueprint, devices: Sequence[jax.Device] | None = None
  ):
    config = blueprint.config
    self._blueprint = blueprint
    self.tokens_per_step = config.data.batch * config.data.seq_len
    self._inner = inner.make_inner(
      optimizer=config.inner.optimizer,
      b1=config.inner.b1,
      b2=config.inner.b2,
      eps=config.inner.eps,
      weight_decay=config.inner.weight_decay,
      clip_norm=config.inner.clip_norm,
      specs=blueprint.specs,
    )
    self._mesh = sharding.make_mesh(
      config.mesh.fsdp, config.mesh.tensor, devices, expert=config.mesh.expert
    )
    shapes = {path: spec.shape for path, spec in blueprint.specs.items()}
    self._shardings = sharding.param_shardings(
      blueprint.model.axes, shapes, self._mesh
    )
    self._rows = sharding.batch_sharding(self._mesh)
    self._whole = jax.sharding.NamedSharding(
      self._mesh, jax.sharding.PartitionSpec()
    )
    self._state_shardings = self._shardings_of_state()
    self._compile()

  def init(self, params: Mapping[str, np.ndarray]) -> tuple[Params, object]:
    """Parameters and inner state on the devices; the state is fresh."""
    placed = {
      path: jax.device_put(x, self._shardings[path])
      for path, x in params.items()
    }
    return placed, self._init_state(placed)

  @property
  def state_like(self):
    """Shapes, dtypes and shardings of the inner state."""
    return self._state_like

  @property
  def params_like(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of the parameters."""
    return self._abstract(self._shardings)

  def put_state(self, state):
    """An inner state from the host, where its parameters lie."""
    return jax.tree.map(jax.device_put, state, self._state_shardings)

  def copy_state(self, state):
    """Dispatches a copy of the inner state, on its way to the host.

    A copy, because the next step is given the buffers of the state itself. It
    takes as much device memory again, until it is on the host.
    """
    copied = self._copy_state(state)
    jax.tree.map(lambda x: x.copy_to_host_async(), copied)
    return copied

  def fresh_state(self, params: Params):
    """The inner state of a learner that has made no step."""
    return self._init_state(params)

  def put_batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """A batch, rows spread over the mesh."""
    return {key: jax.device_put(x, self._rows) for key, x in batch.items()}

  def put_fragment(
    self, fragment: int, arrays: Mapping[str, np.ndarray]
  ) -> dict[str, jax.Array]:
    """A fragment of Θ, ready to be blended in; waits until it is there."""
    placed = {
      name: jax.device_put(arrays[name], self._whole) for name in arrays
    }
    return jax.block_until_ready(placed)

  def step(self, params, state, batch, lr: float, draw: tuple[int, int]):
    """Dispatches one inner step; `params` and `state` are given away.

    `draw` is the learner's id and the position of the batch: together with
    the run's seed they give the step its random key.
    """
    draw = np.array(draw, np.uint32)
    return self._step(params, state, batch, np.float32(lr), draw)

  def snapshot(self, fragment: int, params: Params) -> dict[str, jax.Array]:
    """Dispatches a copy of one fragment, on its way to the host."""
    arrays = self._snapshots[fragment](params)
    for array in arrays.values():
      array.copy_to_host_async()
    return arrays

  def blend(
    self, fragment: int, params: Params, global_: Arrays, snapshot: Arrays
  ) -> Params:
    """Dispatches the blend of Θ_p into θ; `params` is given away."""
    return self._blends[fragment](params, global_, snapshot)

  def overwrite(self, fragment: int, params: Params, global_: Arrays) -> Params:
    """θ_p = Θ_p whatever the blend rule: on joining there is no progress."""
    pieces = self._blueprint.layout.fragments[fragment]
    return put(params, pieces, global_)

  def _compile(self):
    blueprint = self._blueprint
    params = self._abstract(self._shardings)
    self._state_like = state = jax.tree.map(
      lambda leaf, place: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=place
      ),
      jax.eval_shape(self._inner.init, params),
      self._state_shardings,
    )
    batch = {
      'tokens': jax.ShapeDtypeStruct(
        (blueprint.config.data.batch, blueprint.config.data.seq_len + 1),
        jnp.int32,
        sharding=self._rows,
      )
    }
    with jax.set_mesh(self._mesh):
      self._init_state = jax.jit(
        self._inner.init, out_shardings=self._state_shardings
      )
      self._step = (
        jax.jit(
          self._inner_step,
          donate_argnums=(0, 1),
          out_shardings=(
            self._shardings,
            self._state_shardings,
            self._whole,
          ),
        )
        .lower(params, state, batch, np.float32(0), np.zeros(2, np.uint32))
        .compile()
      )
      self._copy_state = (
        jax.jit(
          lambda state: jax.tree.map(jnp.copy, state),
          out_shardings=self._state_shardings,
        )
        .lower(state)
        .compile()
      )
      fragments = range(len(blueprint.layout.fragments))
      self._snapshots = [self._compile_snapshot(p, params) for p in fragments]
      self._blends = [self._compile_blend(p, params) for p in fragments]

  def _inner_step(self, params, state, batch, lr, draw):
    """`numerics.inner.train_step` on flat parameters."""

    def loss(flat, batch, key):
      return self._blueprint.model.loss(interface.unflatten(flat), batch, key)

    key = jax.random.key(self._blueprint.config.seed)
    key = jax.random.fold_in(jax.random.fold_in(key, draw[0]), draw[1])
    params, state, metrics = inner.train_step(
      loss,
      self._inner,
      params,
      state,
      batch,
      lr,
      key,
      self._blueprint.specs,
    )
    loss_said = interface.reported_loss(metrics['loss'], metrics)
    return params, state, metrics | {'loss': loss_said}

  def _compile_snapshot(self, fragment: int, params):
    pieces = self._blueprint.layout.fragments[fragment]

    def copy(params):
      # Slicing copies, except where a piece is the whole array.
      return {name: jnp.copy(x) for name, x in take(params, pieces).items()}

    used = {piece.path for piece in pieces}
    compiled = (
      jax.jit(copy, out_shardings=self._whole)
      .lower({path: params[path] for path in used})
      .compile()
    )
    return lambda params: compiled({path: params[path] for path in used})

  def _compile_blend(self, fragment: int, params):
    pieces = self._blueprint.layout.fragments[fragment]
    config = self._blueprint.config
    rule = make_blend(config.protocol.blend, config.blend_alpha)
    used = {piece.path for piece in pieces}

    def blend(params, global_, snapshot):
      theta = take(params, pieces)
      return put(params, pieces, rule(theta, global_, snapshot))

    arrays = {
      piece.name: jax.ShapeDtypeStruct(
        piece.shape, jnp.float32, sharding=self._whole
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

    def apply(params, global_, snapshot):
      changed = compiled(
        {path: params[path] for path in used}, global_, snapshot
      )
      return {**params, **changed}

    return apply

  def _abstract(self, shardings):
    return {
      path: jax.ShapeDtypeStruct(
        spec.shape, jnp.float32, sharding=shardings[path]
      )
      for path, spec in self._blueprint.specs.items()
    }

  def _shardings_of_state(self):
    """Moments lie where their parameter lies, counters everywhere."""
    params = self._abstract(self._shardings)

    def place(path, leaf):
      key = getattr(path[-1], 'key', None)
      like = params.get(key)
      same = like is not None and like.shape == leaf.shape
      return self._shardings[key] if same else self._whole

    state = jax.eval_shape(self._inner.init, params)
    return jax.tree_util.tree_map_with_path(place, state)
