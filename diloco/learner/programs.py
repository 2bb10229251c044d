# SPDX-License-Identifier: Apache-2.0
"""A learner's mesh, its inner step, and the programs of the exchange beside it.

Everything is compiled before the learner says hello, so that no other process
waits for it.
"""

import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from diloco.config.run_config import RunConfig
from diloco.learner.exchange_programs import (
  ROOM,
  ExchangePrograms,
  Params,
  like,
  place,
)
from diloco.learner.kept_programs import KeptPrograms
from diloco.models import api, sharding
from diloco.models.kinds import KINDS
from diloco.numerics import boxes, inner
from diloco.run.on_devices import frozen_arrays, read_shards
from diloco.run.spec import RunSpec
from diloco.run.step_profiler import StepProfiler

ROWS_AT_ONCE = 8  # Of a decoder on one CPU device.


class StepPrograms(ExchangePrograms):
  """One mesh, and the inner step compiled for it.

  Attributes:
    tokens_per_step: B · L.
    own_rows: rows of a batch that this process's devices need.
    frozen_like: shapes, dtypes and shardings of what is not trained.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    devices: Sequence[jax.Device] | None = None,
    kept: KeptPrograms | None = None,
  ):
    config = run_spec.config
    self.tokens_per_step = config.data.batch * config.data.seq_len
    self._inner = run_spec.inner
    mesh = config.mesh
    mesh = sharding.make_mesh(
      mesh.fsdp,
      mesh.tensor,
      devices,
      expert=mesh.expert,
      context=mesh.context,
      slices=mesh.slices,
    )
    places = sharding.param_shardings(
      run_spec.model.axes, run_spec.all_shapes, mesh
    )
    super().__init__(
      run_spec,
      mesh,
      {path: like(x.shape, places[path]) for path, x in run_spec.specs.items()},
      kept,
    )
    self.frozen_like = {
      path: like(x.shape, places[path], x.dtype)
      for path, x in run_spec.frozen.items()
    }
    self._rows = sharding.batch_sharding(mesh)
    self.own_rows = _rows_here(self._rows, config.data.batch)
    self._whole = NamedSharding(mesh, PartitionSpec())
    self.set_state_like(self._abstract_state())
    self._compiling = threading.Lock()
    self._buffered: jax.stages.Compiled | None = None
    with jax.set_mesh(self._mesh):
      self._init_state = jax.jit(
        self._inner.init, out_shardings=self._state_shardings
      )
    self._step = self._compile_step(
      'step', self._inner_step, donate_argnums=(0, 1)
    )

  def init(self, params: Mapping[str, np.ndarray]) -> tuple[Params, object]:
    """Puts parameters on the devices, with a fresh inner state."""
    placed = {
      path: place(x, self._shardings[path]) for path, x in params.items()
    }
    return placed, self._init_state(placed)

  def draw(self, zeros: Params | None = None) -> tuple[Params, object]:
    """Draws the parameters from the run's seed, where they lie, or reads there
    those of `model.init_from`; with a fresh inner state.

    Args:
      zeros: deleted before, as whoever started this process may still refer to
        them.

    Their bits depend neither on the mesh nor on the number of hosts. On another
    kind of device than the syncer's they may: a learner that starts differently
    is detected by its CRCs, and takes the syncer's Θ. What is read has the same
    bits on all.
    """
    for array in (zeros or {}).values():
      array.delete()
    run_spec = self._run_spec
    if not run_spec.is_drawn:
      params = read_shards(run_spec.weights, self.params_like)
      return params, self._init_state(params)

    def init(key):
      flat = run_spec.draw(key, run_spec.specs)
      return {path: x.astype(jnp.float32) for path, x in flat.items()}

    with jax.set_mesh(self._mesh):
      key = jax.random.key(self._run_spec.config.seed)
      params = jax.jit(init, out_shardings=self._shardings)(key)
    return params, self._init_state(params)

  @functools.cached_property
  def frozen(self) -> Params:
    """Frozen parameters on the devices; read or drawn at the first use."""
    places = {path: x.sharding for path, x in self.frozen_like.items()}
    return frozen_arrays(self._run_spec, places, self._mesh)

  def fresh_state(self, params: Params):
    """Returns the inner state of a learner that has made no step."""
    return self._init_state(params)

  def put_batch(
    self, batch: Mapping[str, np.ndarray], first: int = 0
  ) -> dict[str, jax.Array]:
    """Puts a batch on the devices, with its rows spread over the mesh.

    Args:
      batch: all of it, or at least `own_rows`.
      first: number of its first row that is given.
    """
    size = self._run_spec.config.data.batch

    def placed(x: np.ndarray) -> jax.Array:
      shape = size, *x.shape[1:]
      here = ((first, first + len(x)), *boxes.whole(x.shape[1:]))
      return jax.make_array_from_callback(
        shape,
        self._rows,
        lambda index: x[boxes.index(boxes.at(index, shape), here)],
      )

    return {key: placed(x) for key, x in batch.items()}

  def step(self, params, state, batch, lr: float, draw: tuple[int, int]):
    """Dispatches one inner step; `params` and `state` are donated.

    `draw` is the learner's id and the number of the batch's first row:
    together with the run's seed they give the step its random key.
    """
    draw = np.array(draw, np.uint32)
    return self._step(params, state, self.frozen, batch, np.float32(lr), draw)

  def step_double_buffered(self, params, state, batch, lr: float, draw, spare):
    """Dispatches the same inner step, which leaves what it is given as it is.

    Args:
      spare: (parameters, inner state), overwritten by the results; donated.
    """
    draw = np.array(draw, np.uint32)
    lr = np.float32(lr)
    return self._buffered(params, state, self.frozen, batch, lr, draw, spare)

  def compile_double_buffered(self):
    """Compiles `step_double_buffered`, once for all learners that share it."""
    with self._compiling:
      if self._buffered is not None:
        return

      def step(params, state, frozen, batch, lr, draw, spare):
        del spare  # Where the results go.
        return self._inner_step(params, state, frozen, batch, lr, draw)

      self._buffered = self._compile_step(
        'double-buffered step',
        step,
        (self.params_like, self.state_like),
        donate_argnums=6,
        keep_unused=True,
      )

  def _compile_step(
    self, name: str, step, *more, **options
  ) -> jax.stages.Compiled:
    data = self._run_spec.config.data
    shape = data.batch, data.seq_len + 1
    return self._compile(
      name,
      step,
      (self._shardings, self._state_shardings, self._whole),
      self.params_like,
      self.state_like,
      self.frozen_like,
      {key: like(shape, self._rows, jnp.int32) for key in data.batch_keys},
      np.float32(0),
      np.zeros(2, np.uint32),
      *more,
      **options,
    )

  def _inner_step(self, params, state, frozen, batch, lr, draw):
    """Runs `numerics.inner.TrainStep` on flat parameters."""

    def loss(flat, batch, key):
      params = api.unflatten(flat | frozen)
      return self._run_spec.model.loss(params, batch, key)

    key = jax.random.key(self._run_spec.config.seed)
    key = jax.random.fold_in(jax.random.fold_in(key, draw[0]), draw[1])
    step = inner.TrainStep(
      loss, self._inner, self._run_spec.specs, self._parts(), api.COUNTED
    )
    params, state, metrics = step(params, state, batch, lr, key)
    loss_said = api.reported_loss(metrics['loss'], metrics)
    return params, state, metrics | {'loss': loss_said}

  def _parts(self) -> int:
    """Returns in how many parts a step processes its batch.

    One CPU device takes few rows at once: activations of 32 do not fit its
    caches, and take 1.7 times as long as four times those of 8. A mixture of
    experts balances each part by itself, so that its parts are as asked for.
    """
    config = self._run_spec.config
    parts = config.inner.accumulate
    rows = config.data.batch // parts
    kind = KINDS.get(config.model.kind)
    dense = kind is not None and kind.sizes and not kind.has_experts
    if not (dense and self.on_cpu and self._mesh.size == 1):
      return parts
    return parts * (1 if rows % ROWS_AT_ONCE else rows // ROWS_AT_ONCE)

  def _abstract_state(self):
    """Returns the inner state's shapes: moments lie with their parameter,
    counters everywhere.
    """

    def placed(path, leaf):
      key = self._param_of(path, leaf.shape)
      where = self.params_like[key].sharding if key else self._whole
      return like(leaf.shape, where, leaf.dtype)

    state = jax.eval_shape(self._inner.init, self.params_like)
    return jax.tree_util.tree_map_with_path(placed, state)


def devices_of(config: RunConfig) -> list[jax.Device]:
  """Returns as many devices as the mesh needs; others may be left over."""
  return jax.devices()[: config.mesh.devices]


class LearnerPrograms(StepPrograms):
  """The programs of a learner: the inner step's, and those of the exchange.

  Attributes:
    profiler: told before each inner step, if there is one.
  """

  profiler: StepProfiler | None = None

  def __init__(
    self,
    run_spec: RunSpec,
    devices: Sequence[jax.Device] | None = None,
    kept: KeptPrograms | None = None,
  ):
    super().__init__(run_spec, devices, kept)
    self.compile_exchange()

  @property
  def double_buffers(self) -> bool:
    return self.on_cpu

  def _has_room(self) -> bool:
    step = self.compiled['step'].memory_analysis()
    taken = (
      2 * step.argument_size_in_bytes  # Those of the copy, and of the step.
      + step.temp_size_in_bytes
      + step.output_size_in_bytes
      - step.alias_size_in_bytes
      + step.generated_code_size_in_bytes
    )
    # A process's devices are alike.
    known = self._mesh.local_devices[0].memory_stats() or {}
    return taken <= ROOM * known.get('bytes_limit', 0)


def _rows_here(rows: NamedSharding, batch: int) -> range:
  shape = batch, 1
  indices = rows.addressable_devices_indices_map(shape).values()
  ends = [boxes.at(index, shape)[0] for index in indices]
  return range(min(a for a, _ in ends), max(b for _, b in ends))


class LearnerKinds:
  """The programs of unlike learners in one process.

  Args:
    programs: those of the run's configuration, if they are compiled already.
  """

  def __init__(
    self, run_spec: RunSpec, programs: LearnerPrograms | None = None
  ):
    self._run_spec = run_spec
    self._made = {}
    if programs is not None:
      self._made[_kind(run_spec.config)] = run_spec, programs

  def of(self, config: RunConfig) -> tuple[RunSpec, LearnerPrograms]:
    """Returns those of a learner's configuration, compiled once for each kind.

    Args:
      config: the run's, but for batch, accumulation and mesh.
    """
    kind = _kind(config)
    if kind not in self._made:
      run_spec = dataclasses.replace(self._run_spec, config=config)
      self._made[kind] = run_spec, LearnerPrograms(run_spec, devices_of(config))
    return self._made[kind]


def _kind(config: RunConfig) -> tuple:
  return config.data.batch, config.inner.accumulate, config.mesh
