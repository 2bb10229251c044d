# SPDX-License-Identifier: Apache-2.0
"""The inner step on a mesh of devices, and the learner's arrays there."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diloco.models import interface, sharding
from diloco.numerics import inner
from diloco.runtime import inner_state
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.placement import partition_of, place

Params = dict[str, jax.Array]  # Path -> parameter.


class InnerDevice:
  """One mesh, and the inner step compiled for it.

  Attributes:
    tokens_per_step: B · L.
    partition: how devices and hosts share the parameters.
    programs: compiled programs, by name.
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
    self.partition = partition_of(
      self._mesh,
      self._shardings,
      {path: len(shape) for path, shape in shapes.items()},
    )
    self._rows = sharding.batch_sharding(self._mesh)
    self._whole = jax.sharding.NamedSharding(
      self._mesh, jax.sharding.PartitionSpec()
    )
    self._state_shardings = self._shardings_of_state()
    self._state_like = self._abstract_state()
    self.programs: dict[str, jax.stages.Compiled] = {}
    self._compile_step()

  def init(self, params: Mapping[str, np.ndarray]) -> tuple[Params, object]:
    """Puts parameters on the devices, with a fresh inner state."""
    placed = {
      path: place(x, self._shardings[path]) for path, x in params.items()
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
    """Puts an inner state from the host where its parameters lie.

    Args:
      state: a pytree of arrays, or of `inner_state.Shards` if the learner has
        several processes, each of which passes its own.
    """
    if self.partition.host_count > 1:
      return inner_state.place_shards(state, self._state_like)
    return jax.tree.map(place, state, self._state_shardings)

  def fresh_state(self, params: Params):
    """Returns the inner state of a learner that has made no step."""
    return self._init_state(params)

  def put_batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Puts a batch on the devices, with its rows spread over the mesh."""
    return {key: place(x, self._rows) for key, x in batch.items()}

  def step(self, params, state, batch, lr: float, draw: tuple[int, int]):
    """Dispatches one inner step; `params` and `state` are donated.

    `draw` is the learner's id and the position of the batch: together with the
    run's seed they give the step its random key.
    """
    draw = np.array(draw, np.uint32)
    return self._step(params, state, batch, np.float32(lr), draw)

  def _abstract_state(self):
    return jax.tree.map(
      lambda leaf, place: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=place
      ),
      jax.eval_shape(self._inner.init, self._abstract(self._shardings)),
      self._state_shardings,
    )

  def _compile_step(self):
    blueprint = self._blueprint
    params = self._abstract(self._shardings)
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
        .lower(
          params, self._state_like, batch, np.float32(0), np.zeros(2, np.uint32)
        )
        .compile()
      )
    self.programs['step'] = self._step

  def _inner_step(self, params, state, batch, lr, draw):
    """Runs `numerics.inner.train_step` on flat parameters."""

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
      self._blueprint.config.inner.accumulate,
    )
    loss_said = interface.reported_loss(metrics['loss'], metrics)
    return params, state, metrics | {'loss': loss_said}

  def _abstract(self, shardings):
    return {
      path: jax.ShapeDtypeStruct(
        spec.shape, jnp.float32, sharding=shardings[path]
      )
      for path, spec in self._blueprint.specs.items()
    }

  def _shardings_of_state(self):
    """Returns shardings: moments lie with their parameter, counters
    everywhere.
    """
    params = self._abstract(self._shardings)

    def place(path, leaf):
      key = getattr(path[-1], 'key', None)
      like = params.get(key)
      same = like is not None and like.shape == leaf.shape
      return self._shardings[key] if same else self._whole

    state = jax.eval_shape(self._inner.init, params)
    return jax.tree_util.tree_map_with_path(place, state)
