# SPDX-License-Identifier: Apache-2.0
"""The inner step on a mesh of devices, and the inner state as bytes."""

import math
import threading
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diloco.learner.placement import partition_of, place
from diloco.models import api, sharding
from diloco.numerics import inner
from diloco.numerics.optimizers import INNER
from diloco.run.spec import RunSpec

CHUNK_BYTES_MAX = 1 << 26  # Per payload: bounds what a lost pull costs.
Params = dict[str, jax.Array]  # Path -> parameter.


# Converts an inner optimizer state to bytes for another learner, and back.
#
# A learner of one process sends each leaf whole. If there are several, each
# host sends the shards of its own devices to the host of the same number in
# another learner, whose devices hold the same shards if both are partitioned
# alike.

Ranges = tuple[tuple[int, int], ...]  # (first, last + 1) by axis.
Shards = Mapping[Ranges, np.ndarray]  # What one host gives of one leaf.


def size_bytes(like) -> int:
  """Returns the bytes of a whole state of this structure.

  Args:
    like: a pytree of arrays or of `jax.ShapeDtypeStruct`.
  """
  return sum(
    math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
    for leaf in jax.tree.leaves(like)
  )


def bytes_here(like) -> int:
  """Returns how many bytes `to_chunks` gives for this structure.

  Args:
    like: a pytree of `jax.ShapeDtypeStruct`, with shardings.
  """
  return sum(
    _shard_nbytes(leaf, ranges)
    for leaf in jax.tree.leaves(like)
    for ranges in _ranges_here(leaf)
  )


def to_chunks(state) -> list[np.ndarray]:
  """Cuts this process's part of all leaves, in order, into uint8 payloads.

  Bits are copied without conversion. A state of no bytes, such as that of SGD
  without momentum, gives no chunks.
  """
  return _cut(
    np.asarray(data)
    for leaf in jax.tree.leaves(state)
    for _, data in sorted(_held(leaf).items(), key=lambda item: item[0])
  )


def from_chunks(chunks: Sequence[np.ndarray], like):
  """Returns the pytree of `Shards` that `to_chunks` cut.

  Args:
    like: shapes, dtypes and shardings of the state.

  Raises:
    ValueError: the number of bytes is wrong.
  """
  whole, wanted = _joined(chunks), bytes_here(like)
  if whole.size != wanted:
    raise ValueError(
      f'{whole.size} bytes of inner state, this host has {wanted}'
    )
  leaves, structure = jax.tree.flatten(like)
  found, start = [], 0
  for leaf in leaves:
    shards = {}
    for ranges in _ranges_here(leaf):
      stop = start + _shard_nbytes(leaf, ranges)
      shape = tuple(b - a for a, b in ranges)
      shards[ranges] = whole[start:stop].view(leaf.dtype).reshape(shape)
      start = stop
    found.append(shards)
  return structure.unflatten(found)


def place_state(state, like):
  """Puts a state on the devices; each process adds its own part.

  Args:
    state: as `from_chunks` gives it.
    like: shapes, dtypes and shardings.
  """
  leaves, structure = jax.tree.flatten(like)
  return structure.unflatten(
    jax.make_array_from_callback(
      leaf.shape,
      leaf.sharding,
      lambda index, leaf=leaf, shards=shards: _values(shards, index, leaf),
    )
    for leaf, shards in zip(leaves, structure.flatten_up_to(state))
  )


def _held(leaf: jax.Array) -> dict[Ranges, jax.Array]:
  if leaf.is_fully_addressable:
    return {_whole(leaf): leaf}
  return {
    _ranges(shard.index, leaf.shape): shard.data
    for shard in leaf.addressable_shards
  }


def _ranges_here(leaf) -> list[Ranges]:
  if leaf.sharding.is_fully_addressable:
    return [_whole(leaf)]
  here = leaf.sharding.addressable_devices_indices_map(leaf.shape)
  return sorted({_ranges(index, leaf.shape) for index in here.values()})


def _values(shards: Shards, index: tuple[slice, ...], leaf) -> np.ndarray:
  if leaf.sharding.is_fully_addressable:
    return shards[_whole(leaf)][index]
  return shards[_ranges(index, leaf.shape)]


def _whole(leaf) -> Ranges:
  return tuple((0, size) for size in leaf.shape)


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> Ranges:
  return tuple(s.indices(size)[:2] for s, size in zip(index, shape))


def _shard_nbytes(leaf, ranges: Ranges) -> int:
  size = math.prod(b - a for a, b in ranges)
  return size * np.dtype(leaf.dtype).itemsize


def _cut(arrays: Iterable[np.ndarray]) -> list[np.ndarray]:
  """Cuts the arrays' bytes into chunks, with one more array in memory at a
  time.
  """
  chunks: list[np.ndarray] = []
  open_parts: list[np.ndarray] = []
  room = CHUNK_BYTES_MAX
  for array in arrays:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    while data.size:
      part, data = data[:room], data[room:]
      open_parts.append(part)
      room -= part.size
      if not room:
        chunks.append(_joined(open_parts))
        open_parts, room = [], CHUNK_BYTES_MAX
  if open_parts:
    chunks.append(_joined(open_parts))
  return chunks


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate([np.empty(0, np.uint8), *parts])


def is_finite(state) -> bool:
  """Returns True if no value of a host's copy is NaN or infinite."""
  return all(
    bool(np.isfinite(leaf).all())
    for leaf in jax.tree.leaves(state)
    if np.issubdtype(leaf.dtype, np.floating)
  )


class InnerDevice:
  """One mesh, and the inner step compiled for it.

  Attributes:
    tokens_per_step: B · L.
    partition: how devices and hosts share the parameters.
    programs: compiled programs, by name.
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
    )
    self._mesh = sharding.make_mesh(
      config.mesh.fsdp, config.mesh.tensor, devices, expert=config.mesh.expert
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
    self._whole = jax.sharding.NamedSharding(
      self._mesh, jax.sharding.PartitionSpec()
    )
    self._state_shardings = self._shardings_of_state()
    self._state_like = self._abstract_state()
    self.programs: dict[str, jax.stages.Compiled] = {}
    self._compiling = threading.Lock()
    self._step_beside: jax.stages.Compiled | None = None
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
      state: as `from_chunks` gives it, to each process its own part.
    """
    return place_state(state, self._state_like)

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

  @property
  def on_cpu(self) -> bool:
    """True if the devices are the host's own cores."""
    return self._mesh.devices.flat[0].platform == 'cpu'

  def step_beside(self, params, state, batch, lr: float, draw, spare):
    """Dispatches the same inner step, which leaves what it is given as it is.

    Args:
      spare: (parameters, inner state), overwritten by the results; donated.
    """
    draw = np.array(draw, np.uint32)
    return self._step_beside(params, state, batch, np.float32(lr), draw, spare)

  def compile_step_beside(self):
    """Compiles `step_beside`, once for all learners on this device."""
    with self._compiling:
      if self._step_beside is not None:
        return

      def step(params, state, batch, lr, draw, spare):
        del spare  # Where the results go.
        return self._inner_step(params, state, batch, lr, draw)

      like = self._abstract(self._shardings), self._state_like
      self._step_beside = self._compiled_step(
        step, *like, spare=like, donate_argnums=5, keep_unused=True
      )

  def empty_params(self) -> Params:
    """Returns buffers of the parameters' shapes, written to once."""
    return self._zeros(self._abstract(self._shardings), self._shardings)

  def empty_state(self):
    """Returns buffers of the inner state's shapes, written to once."""
    return self._zeros(self._state_like, self._state_shardings)

  def _zeros(self, like, shardings):
    make = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)  # noqa: E731
    return jax.jit(make, out_shardings=shardings)()

  def _abstract_state(self):
    return jax.tree.map(
      lambda leaf, place: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=place
      ),
      jax.eval_shape(self._inner.init, self._abstract(self._shardings)),
      self._state_shardings,
    )

  def _compile_step(self):
    params = self._abstract(self._shardings)
    with jax.set_mesh(self._mesh):
      self._init_state = jax.jit(
        self._inner.init, out_shardings=self._state_shardings
      )
    self._step = self._compiled_step(
      self._inner_step, params, self._state_like, donate_argnums=(0, 1)
    )
    self.programs['step'] = self._step

  def _compiled_step(self, step, params, state, spare=None, **options):
    section = self._run_spec.config.data
    batch = {
      'tokens': jax.ShapeDtypeStruct(
        (section.batch, section.seq_len + 1), jnp.int32, sharding=self._rows
      )
    }
    places = self._shardings, self._state_shardings, self._whole
    draw = np.zeros(2, np.uint32)
    arguments = params, state, batch, np.float32(0), draw
    if spare is not None:
      arguments += (spare,)
    with jax.set_mesh(self._mesh):
      made = jax.jit(step, out_shardings=places, **options)
      return made.lower(*arguments).compile()

  def _inner_step(self, params, state, batch, lr, draw):
    """Runs `numerics.inner.TrainStep` on flat parameters."""

    def loss(flat, batch, key):
      return self._run_spec.model.loss(api.unflatten(flat), batch, key)

    key = jax.random.key(self._run_spec.config.seed)
    key = jax.random.fold_in(jax.random.fold_in(key, draw[0]), draw[1])
    step = inner.TrainStep(
      loss,
      self._inner,
      self._run_spec.specs,
      self._run_spec.config.inner.accumulate,
    )
    params, state, metrics = step(params, state, batch, lr, key)
    loss_said = api.reported_loss(metrics['loss'], metrics)
    return params, state, metrics | {'loss': loss_said}

  def _abstract(self, shardings):
    return {
      path: jax.ShapeDtypeStruct(
        spec.shape, jnp.float32, sharding=shardings[path]
      )
      for path, spec in self._run_spec.specs.items()
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
