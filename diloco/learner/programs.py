# SPDX-License-Identifier: Apache-2.0
"""A learner's mesh and its programs: inner step, snapshots, blends.

Everything is compiled before the learner says hello, so that no other process
waits for it. Pieces of fragments are sharded like their parameter: no piece is
ever whole on one device, a copy of a fragment leaves each device as that
device's own shards, and comes back as them. Each host likewise has its own
slices.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
  Mesh,
  NamedSharding,
  PartitionSpec,
  SingleDeviceSharding,
)

from diloco.checkpoint.arrays import named
from diloco.config.run_config import RunConfig
from diloco.learner import host_parts
from diloco.models import api, sharding
from diloco.models.kinds import KINDS
from diloco.numerics import boxes, inner
from diloco.numerics.blend import make_blend
from diloco.numerics.fragments import Piece, change, take
from diloco.numerics.mesh_partition import Partition, Slice, Splits
from diloco.numerics.optimizers import INNER
from diloco.run.payload_parts import HostSlices, held_boxes
from diloco.run.spec import RunSpec
from diloco.run.step_profiler import StepProfiler

REPLACE = 'replace'  # Blend of a learner that has made no step since.
# Share of a device's memory that may be in use while θ is copied to be saved.
ROOM = 0.9
ROWS_AT_ONCE = 8  # Of a decoder on one CPU device.
HOST_MEMORY = 'pinned_host'  # JAX's name for memory that its devices can read.
Params = dict[str, jax.Array]  # Path -> parameter.
Arrays = Mapping[str, jax.Array]  # Piece name -> array.


class StepPrograms:
  """One mesh, and the inner step compiled for it.

  Attributes:
    tokens_per_step: B · L.
    partition: how devices and hosts share the parameters.
    own_rows: rows of a batch that this process's devices need.
    compiled: the programs, by name.
    params_like: shapes, dtypes and shardings of the parameters.
    state_like: shapes, dtypes and shardings of the inner state.
  """

  def __init__(
    self, run_spec: RunSpec, devices: Sequence[jax.Device] | None = None
  ):
    config = run_spec.config
    self._run_spec = run_spec
    self.tokens_per_step = config.data.batch * config.data.seq_len
    self._inner = INNER[config.inner.optimizer](
      b1=config.inner.b1,
      b2=config.inner.b2,
      eps=config.inner.eps,
      weight_decay=config.inner.weight_decay,
      clip_norm=config.inner.clip_norm,
      specs=run_spec.specs,
      moments=config.inner.moments,
    )
    mesh = config.mesh
    self._mesh = sharding.make_mesh(
      mesh.fsdp, mesh.tensor, devices, expert=mesh.expert, context=mesh.context
    )
    shapes = {path: spec.shape for path, spec in run_spec.specs.items()}
    self._shardings = sharding.param_shardings(
      run_spec.model.axes, shapes, self._mesh
    )
    self.partition = partition_of(
      self._mesh,
      self._shardings,
      {path: len(shape) for path, shape in shapes.items()},
    )
    self._rows = sharding.batch_sharding(self._mesh)
    self.own_rows = _rows_here(self._rows, config.data.batch)
    self._whole = NamedSharding(self._mesh, PartitionSpec())
    self.params_like = {
      path: _like(shape, self._shardings[path])
      for path, shape in shapes.items()
    }
    self.state_like = self._abstract_state()
    self._state_shardings = jax.tree.map(lambda x: x.sharding, self.state_like)
    self._state_paths = self._paths_of_state()
    self.compiled: dict[str, jax.stages.Compiled] = {}
    self._compiling = threading.Lock()
    self._buffered: jax.stages.Compiled | None = None
    with jax.set_mesh(self._mesh):
      self._init_state = jax.jit(
        self._inner.init, out_shardings=self._state_shardings
      )
    self._step = self._compile_step(self._inner_step, donate_argnums=(0, 1))
    self.compiled['step'] = self._step

  def init(self, params: Mapping[str, np.ndarray]) -> tuple[Params, object]:
    """Puts parameters on the devices, with a fresh inner state."""
    placed = {
      path: place(x, self._shardings[path]) for path, x in params.items()
    }
    return placed, self._init_state(placed)

  def draw(self) -> tuple[Params, object]:
    """Draws the parameters from the run's seed, where they lie; with a fresh
    inner state.

    Their bits depend neither on the mesh nor on the number of hosts. On another
    kind of device than the syncer's they may: a learner that starts differently
    is detected by its CRCs, and takes the syncer's Θ.
    """

    def init(key):
      flat = api.flatten(self._run_spec.model.init(key))
      return {path: x.astype(jnp.float32) for path, x in flat.items()}

    with jax.set_mesh(self._mesh):
      key = jax.random.key(self._run_spec.config.seed)
      params = jax.jit(init, out_shardings=self._shardings)(key)
    return params, self._init_state(params)

  def state_splits(self, name: str) -> Callable[[Partition], Splits]:
    """Returns how any partition splits a leaf of the inner state."""
    path, axes = self._state_paths[name]
    nowhere = (None,) * axes
    return lambda partition: partition.splits[path] if path else nowhere

  def put_state(self, state: host_parts.Parts):
    """Puts an inner state from the host where its parameters lie.

    Args:
      state: as `host_parts.to_host` gives it, to each process its own
        part; emptied.
    """
    return host_parts.place(state, self.state_like)

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
    return self._step(params, state, batch, np.float32(lr), draw)

  @property
  def on_cpu(self) -> bool:
    """True if the devices are the host's own cores."""
    return self._mesh.devices.flat[0].platform == 'cpu'

  def step_double_buffered(self, params, state, batch, lr: float, draw, spare):
    """Dispatches the same inner step, which leaves what it is given as it is.

    Args:
      spare: (parameters, inner state), overwritten by the results; donated.
    """
    draw = np.array(draw, np.uint32)
    return self._buffered(params, state, batch, np.float32(lr), draw, spare)

  def compile_double_buffered(self):
    """Compiles `step_double_buffered`, once for all learners that share it."""
    with self._compiling:
      if self._buffered is not None:
        return

      def step(params, state, batch, lr, draw, spare):
        del spare  # Where the results go.
        return self._inner_step(params, state, batch, lr, draw)

      self._buffered = self._compile_step(
        step,
        (self.params_like, self.state_like),
        donate_argnums=5,
        keep_unused=True,
      )

  def zeros(self, like):
    """Returns buffers like `params_like` or `state_like`, written to once."""
    make = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)  # noqa: E731
    places = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(make, out_shardings=places)()

  def _compile(self, function, out, *like, **options) -> jax.stages.Compiled:
    """Compiles a function for the mesh.

    Args:
      out: shardings of its results.
      *like: shapes, dtypes and shardings of its arguments.
      **options: of `jax.jit`.
    """
    with jax.set_mesh(self._mesh):
      jitted = jax.jit(function, out_shardings=out, **options)
      return jitted.lower(*like).compile()

  def _compile_step(self, step, *more, **options) -> jax.stages.Compiled:
    data = self._run_spec.config.data
    shape = data.batch, data.seq_len + 1
    return self._compile(
      step,
      (self._shardings, self._state_shardings, self._whole),
      self.params_like,
      self.state_like,
      {
        key: _like(shape, self._rows, jnp.int32)
        for key in ('tokens', 'segments')[: 1 + data.segments]
      },
      np.float32(0),
      np.zeros(2, np.uint32),
      *more,
      **options,
    )

  def _inner_step(self, params, state, batch, lr, draw):
    """Runs `numerics.inner.TrainStep` on flat parameters."""

    def loss(flat, batch, key):
      return self._run_spec.model.loss(api.unflatten(flat), batch, key)

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
      return _like(leaf.shape, where, leaf.dtype)

    state = jax.eval_shape(self._inner.init, self.params_like)
    return jax.tree_util.tree_map_with_path(placed, state)

  def _paths_of_state(self) -> dict[str, tuple[str | None, int]]:
    """Returns the parameter with which a leaf of the inner state lies, by name,
    if there is one, and its number of axes.
    """
    leaves = jax.tree_util.tree_leaves_with_path(self.state_like)
    return {
      name: (self._param_of(path, leaf.shape), len(leaf.shape))
      for name, (path, leaf) in zip(named(self.state_like), leaves)
    }

  def _param_of(self, path, shape: tuple[int, ...]) -> str | None:
    key = getattr(path[-1], 'key', None)
    like = self.params_like.get(key)
    return key if like is not None and like.shape == shape else None


def devices_of(config: RunConfig) -> list[jax.Device]:
  """Returns as many devices as the mesh needs; others may be left over."""
  return jax.devices()[: config.mesh.devices]


class LearnerPrograms(StepPrograms):
  """The programs of a learner: the inner step's, and those of the exchange.

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
    self._copy_state = self._compile(
      _copied, self._state_shardings, self.state_like
    )
    self.compiled['copy of the inner state'] = self._copy_state
    fragments = run_spec.layout.fragments
    self._places = [
      {piece.name: self._place_of(piece) for piece in pieces}
      for pieces in fragments
    ]
    count = range(len(fragments))
    self._snapshots = [self._compile_snapshot(p) for p in count]
    protocol = run_spec.config.protocol
    rule = make_blend(protocol.blend, protocol.blend_alpha)
    self._blends = [self._compile_blend('blend', rule, p) for p in count]
    self._replaces = self._blends
    if protocol.blend != REPLACE:
      rule = make_blend(REPLACE)
      self._replaces = [self._compile_blend(REPLACE, rule, p) for p in count]

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

    If a device has no room for the copy beside an inner step, or does not say
    how much it has, it waits for a copy in the host's memory.
    """
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
    if taken > ROOM * known.get('bytes_limit', 0):
      on_host = jax.tree.map(_copied_to_host, (params, state))
      return jax.block_until_ready(on_host)
    copied = self._copy_all((params, state))
    jax.tree.map(lambda x: x.copy_to_host_async(), copied)
    return copied

  def copy_params(self, params: Params) -> Params:
    """Dispatches a copy of θ."""
    return jax.jit(_copied, out_shardings=self._shardings)(params)

  def compile_copy_all(self):
    """Compiles `copy_all`."""
    self._copy_all = self._compile(
      _copied,
      (self._shardings, self._state_shardings),
      (self.params_like, self.state_like),
    )

  def put_fragment(
    self, fragment: int, arrays: Mapping[str, np.ndarray]
  ) -> dict[str, jax.Array]:
    """Puts a fragment of Θ on the devices, to be blended in; waits for it.

    Args:
      arrays: box name -> array; a learner's only process has whole pieces.
    """
    places = self._places[fragment]
    held = held_boxes(self.holding.needed[fragment], arrays)
    placed = {
      piece.name: place_boxes(piece, held[piece.name], places[piece.name])
      for piece in self._run_spec.layout.fragments[fragment]
    }
    return jax.block_until_ready(placed)

  def bases_like(self) -> list[dict[str, Any]]:
    """Returns shape and dtype, by fragment, of what `bases_to_save` returns.

    For several hosts they have a sharding, too.
    """
    spread = self.partition.host_count > 1
    return [
      {
        piece.name: _like(
          piece.shape,
          self._in_host_memory(places[piece.name]) if spread else None,
        )
        for piece in pieces
      }
      for pieces, places in zip(self._run_spec.layout.fragments, self._places)
    ]

  def bases_to_save(
    self, bases: Mapping[int, Mapping[str, np.ndarray]]
  ) -> dict[int, Mapping[str, np.ndarray | jax.Array]]:
    """Returns Θ as it is saved, by fragment and piece: in the host's memory.

    What several hosts share out becomes jax arrays of all of them. On CPU
    devices these are views where XLA's alignment permits.

    Args:
      bases: box name -> array, by fragment; a learner's only process has whole
        pieces.
    """
    if self.partition.host_count == 1:
      return dict(bases)
    return {
      p: {
        piece.name: place_boxes(
          piece,
          held[piece.name],
          self._in_host_memory(self._places[p][piece.name]),
        )
        for piece in self._run_spec.layout.fragments[p]
      }
      for p, arrays in bases.items()
      for held in [held_boxes(self.holding.needed[p], arrays)]
    }

  def restored_bases(
    self, saved: Mapping[int, Mapping[str, np.ndarray | jax.Array]]
  ) -> list[Mapping[str, np.ndarray]]:
    """Returns box name -> array, by fragment; undoes `bases_to_save`."""
    if self.partition.host_count == 1:
      return [saved[p] for p in sorted(saved)]
    return [take_boxes(self.holding.needed[p], saved[p]) for p in sorted(saved)]

  def _in_host_memory(self, sharding: NamedSharding) -> NamedSharding:
    return sharding if self.on_cpu else sharding.with_memory_kind(HOST_MEMORY)

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

  def replace(self, fragment: int, params: Params, global_: Arrays) -> Params:
    """Dispatches θ_p = Θ_p whatever the rule; `params` is donated.

    A joining learner has no progress that a blend could keep.
    """
    return self._replaces[fragment](params, global_, global_)

  def _place_of(self, piece: Piece) -> NamedSharding:
    splits = self.partition.piece_splits(piece)
    return NamedSharding(self._mesh, PartitionSpec(*splits))

  def _compile_snapshot(self, fragment: int):
    pieces = self._run_spec.layout.fragments[fragment]

    def copy(params):
      # Slicing copies, except where a piece is the whole array.
      return _copied(take(params, pieces))

    used = {piece.path for piece in pieces}
    compiled = self._compile(
      copy,
      self._places[fragment],
      {path: self.params_like[path] for path in used},
    )
    self.compiled[f'snapshot {fragment}'] = compiled
    return lambda params: compiled({path: params[path] for path in used})

  def _compile_blend(self, name: str, rule, fragment: int):
    pieces = self._run_spec.layout.fragments[fragment]
    used = {piece.path for piece in pieces}

    def blend(params, global_, snapshot):
      for piece in pieces:

        def blended(theta, name=piece.name):
          values = (x[name].reshape(theta.shape) for x in (global_, snapshot))
          return rule({name: theta}, *({name: x} for x in values))[name]

        params = change(params, piece, blended)
      return params

    places = self._places[fragment]
    arrays = {x.name: _like(x.shape, places[x.name]) for x in pieces}
    compiled = self._compile(
      blend,
      {path: self._shardings[path] for path in used},
      {path: self.params_like[path] for path in used},
      arrays,
      arrays,
      donate_argnums=0,
    )
    self.compiled[f'{name} {fragment}'] = compiled

    def apply(params, global_, snapshot):
      changed = compiled(
        {path: params[path] for path in used}, global_, snapshot
      )
      return {**params, **changed}

    return apply


def partition_of(
  mesh: Mesh, shardings: Mapping[str, NamedSharding], ranks: Mapping[str, int]
) -> Partition:
  """Returns how `mesh` cuts parameters, in terms that a syncer understands.

  Args:
    shardings: of the parameters, by path.
    ranks: number of axes of each parameter, by path.
  """
  processes = [device.process_index for device in mesh.devices.flat]
  hosts = sorted(set(processes))
  return Partition(
    axes=tuple((str(name), size) for name, size in mesh.shape.items()),
    hosts=tuple(hosts.index(process) for process in processes),
    splits={
      path: (*sharding.spec, *(None,) * (ranks[path] - len(sharding.spec)))
      for path, sharding in shardings.items()
    },
  )


def _rows_here(rows: NamedSharding, batch: int) -> range:
  shape = batch, 1
  indices = rows.addressable_devices_indices_map(shape).values()
  ends = [boxes.at(index, shape)[0] for index in indices]
  return range(min(a for a, _ in ends), max(b for _, b in ends))


def place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """Puts `x` on this process's devices of `sharding`.

  Every process of the mesh calls it with the same `x`; no communication takes
  place.
  """
  return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])


def place_boxes(
  piece: Piece, held: boxes.Held, sharding: NamedSharding
) -> jax.Array:
  """Assembles a piece of which each process has its own boxes.

  Args:
    held: what this process has: all that its devices need.
  """

  def part(index: tuple[slice, ...]) -> np.ndarray:
    found = boxes.read(held, boxes.at(index, piece.shape))
    assert found is not None, f'{piece.name}{index} is not here'
    return found

  return jax.make_array_from_callback(piece.shape, sharding, part)


def take_boxes(
  wanted: Sequence[Slice], arrays: Mapping[str, jax.Array]
) -> dict[str, np.ndarray]:
  """Returns the slices' values from this process's shards, on the host.

  Args:
    wanted: each is tiled by whole shards.
    arrays: piece name -> array.
  """
  taken = {}
  for each in wanted:
    array = arrays[each.piece.name]
    here = array.is_fully_addressable or array.is_fully_replicated
    if each.is_whole and here:
      taken[each.name] = np.asarray(array)  # It may be on the host already.
      continue
    held = (
      (boxes.at(shard.index, array.shape), shard.data)
      for shard in array.addressable_shards
    )
    taken[each.name] = boxes.read(held, each.ranges)
  return taken


def _like(shape, where, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def _copied_to_host(array: jax.Array) -> jax.Array:
  """Returns a copy in the memory of the hosts, each of which has its shards."""
  place = lambda device: SingleDeviceSharding(device, memory_kind=HOST_MEMORY)  # noqa: E731
  return jax.make_array_from_single_device_arrays(
    array.shape,
    array.sharding.with_memory_kind(HOST_MEMORY),
    [jax.device_put(x.data, place(x.device)) for x in array.addressable_shards],
  )


def _copied(tree):
  return jax.tree.map(jnp.copy, tree)


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
