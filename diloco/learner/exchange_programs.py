# SPDX-License-Identifier: Apache-2.0
"""A learner's programs of the exchange: snapshots, blends, copies.

Everything is compiled before the learner says hello, so that no other process
waits for it. Pieces of fragments are sharded like their parameter: no piece is
ever whole on one device, a copy of a fragment leaves each device as that
device's own shards, and comes back as them. Each host likewise has its own
slices.
"""

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
from diloco.learner import host_parts
from diloco.learner.hosts.boundary_memory import StoredBoundary
from diloco.learner.kept_programs import KeptPrograms
from diloco.models.sharding import SLICE
from diloco.numerics import boxes
from diloco.numerics.blend import make_blend
from diloco.numerics.fragments import Piece, change, take
from diloco.numerics.mesh_partition import Partition, Slice, Splits
from diloco.run import choices
from diloco.run.payload_parts import HostSlices, held_boxes
from diloco.run.spec import RunSpec

# Share of a device's memory that may be in use while θ is copied to be saved.
ROOM = 0.9
REPLACE = 'replace'  # Blend of a learner that has made no step since.
HOST_MEMORY = 'pinned_host'  # JAX's name for memory that its devices can read.
Params = dict[str, jax.Array]  # Path -> parameter.
Arrays = Mapping[str, jax.Array]  # Piece name -> array.


class ExchangePrograms:
  """The programs of the exchange with the syncer, for arrays on one mesh.

  Args:
    mesh: of all arrays.
    params_like: path -> shape, dtype and sharding of the parameters.
    kept: programs of earlier processes, if there may be any.

  Attributes:
    partition: how devices and hosts share the parameters.
    params_like: shapes, dtypes and shardings of the parameters.
    state_like: shapes, dtypes and shardings of the inner state.
    holding: which slices of each fragment this process has.
    compiled: the programs, by name.
    double_buffers: True if inner steps are made by programs that leave their
      arguments as they are, see `train_state.DoubleBuffer`.
  """

  double_buffers = False

  def __init__(
    self,
    run_spec: RunSpec,
    mesh: Mesh,
    params_like: Mapping[str, jax.ShapeDtypeStruct],
    kept: KeptPrograms | None = None,
  ):
    self._run_spec = run_spec
    self._kept = kept
    self._blend = choices.blend(run_spec.config.protocol, choices.ON_DEVICE)
    self._mesh = mesh
    self.params_like = dict(params_like)
    self._shardings = {path: x.sharding for path, x in params_like.items()}
    self.partition = partition_of(
      mesh,
      self._shardings,
      {path: len(x.shape) for path, x in params_like.items()},
    )
    self.compiled: dict[str, jax.stages.Compiled] = {}

  def set_state_like(self, state_like):
    """Says what the inner state is: shapes, dtypes and shardings."""
    self.state_like = state_like
    self._state_shardings = jax.tree.map(lambda x: x.sharding, state_like)
    self._state_paths = self._paths_of_state()

  def compile_exchange(self):
    """Compiles the copies and blends of each fragment."""
    run_spec = self._run_spec
    spread = self.partition.host_count > 1
    host = jax.process_index() if spread else 0
    self.holding = HostSlices(run_spec.layout, self.partition, host)
    self._copy_state = self._compile(
      'copy of the inner state', _copied, self._state_shardings, self.state_like
    )
    fragments = run_spec.layout.fragments
    self._places = [
      {piece.name: self._place_of(piece) for piece in pieces}
      for pieces in fragments
    ]
    count = range(len(fragments))
    self._snapshots = [self._compile_snapshot(p) for p in count]
    self._blends = [self._compile_blend('blend', self._blend, p) for p in count]
    self._replaces = self._blends
    if run_spec.config.protocol.blend != REPLACE:
      rule = make_blend(REPLACE)
      self._replaces = [self._compile_blend(REPLACE, rule, p) for p in count]

  def _has_room(self) -> bool:
    """Returns whether devices have room for a copy of θ and the inner state
    beside an inner step.
    """
    raise NotImplementedError

  @property
  def on_cpu(self) -> bool:
    """True if the devices are the host's own cores."""
    return self._mesh.devices.flat[0].platform == 'cpu'

  def put_state(self, state: host_parts.Parts):
    """Puts an inner state from the host where its parameters lie.

    Args:
      state: as `host_parts.to_host` gives it, to each process its own
        part; emptied.
    """
    return host_parts.place(state, self.state_like)

  def zeros(self, like):
    """Returns buffers like `params_like` or `state_like`, written to once."""
    make = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)  # noqa: E731
    places = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(make, out_shardings=places)()

  def _compile(
    self, name: str, function, out, *like, **options
  ) -> jax.stages.Compiled:
    """Compiles a function for the mesh, as one of `compiled`.

    Args:
      out: shardings of its results.
      *like: shapes, dtypes and shardings of its arguments.
      **options: of `jax.jit`.
    """

    def compile_() -> jax.stages.Compiled:
      with jax.set_mesh(self._mesh):
        jitted = jax.jit(function, out_shardings=out, **options)
        return jitted.lower(*like).compile()

    found = compile_() if self._kept is None else self._kept.get(name, compile_)
    self.compiled[name] = found
    return found

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

    If a device has no room for the copy beside an inner step, it waits for a
    copy in the host's memory.
    """
    if not self._has_room():
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
      'held copy',
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

  def restored(self, stored: StoredBoundary | None, slice_id: int | None):
    """Returns parameters, inner state and bases of a boundary in memory.

    Args:
      stored: what this host has of it; another boundary, or None, if it has
        nothing of it.
      slice_id: the slice of this world that has all of it, and gives it to the
        others; None: all of them have.
    """
    likes = {
      'params': self.params_like,
      'optimizer': self.state_like,
      'bases': dict(enumerate(self._bases_places())),
    }
    held = {} if stored is None else dict(stored.arrays)
    for p, pieces in enumerate(self._run_spec.layout.fragments):
      mine = stored and held_boxes(self.holding.needed[p], stored.bases[p])
      for piece in pieces if mine else ():
        held[f'bases/{p}/{piece.name}'] = mine[piece.name]
    names = named(likes)
    slices = self._mesh.shape.get(SLICE, 1)
    gives = slice_id is not None and slices > 1

    def placed(name: str, x: jax.ShapeDtypeStruct) -> jax.Array:
      shape, where = x.shape, x.sharding
      if gives:
        shape = (slices, *shape)
        where = NamedSharding(self._mesh, PartitionSpec(SLICE, *where.spec))

      def shard(index):
        box = boxes.at(index[gives:], x.shape)
        if not gives or index[0].start == slice_id:
          found = boxes.read(held[name], box, x.dtype)
          assert found is not None, f'{name}{box} is not in memory'
          return found[None] if gives else found
        return np.zeros((1, *boxes.shape(box)), x.dtype)

      return jax.make_array_from_callback(shape, where, shard)

    arrays = {name: placed(name, x) for name, x in names.items()}
    if gives:
      arrays = self._compile(
        'restored',
        lambda arrays: {name: _only(x) for name, x in arrays.items()},
        {name: x.sharding for name, x in names.items()},
        arrays,
      )(arrays)
    leaves = [arrays[name] for name in names]
    tree = jax.tree.unflatten(jax.tree.structure(likes), leaves)
    bases = [
      take_boxes(self.holding.needed[p], tree['bases'][p])
      for p in sorted(tree['bases'])
    ]
    return tree['params'], tree['optimizer'], bases

  def _bases_places(self) -> list[dict[str, jax.ShapeDtypeStruct]]:
    return [
      {piece.name: like(piece.shape, places[piece.name]) for piece in pieces}
      for pieces, places in zip(self._run_spec.layout.fragments, self._places)
    ]

  def bases_like(self) -> list[dict[str, Any]]:
    """Returns shape and dtype, by fragment, of what `bases_to_save` returns.

    For several hosts they have a sharding, too.
    """
    spread = self.partition.host_count > 1
    return [
      {
        piece.name: like(
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
      # The exchange is in f32, whatever θ is in.
      arrays = _copied(take(params, pieces))
      return {name: x.astype(jnp.float32) for name, x in arrays.items()}

    used = {piece.path for piece in pieces}
    compiled = self._compile(
      f'snapshot {fragment}',
      copy,
      self._places[fragment],
      {path: self.params_like[path] for path in used},
    )
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
    arrays = {x.name: like(x.shape, places[x.name]) for x in pieces}
    compiled = self._compile(
      f'{name} {fragment}',
      blend,
      {path: self._shardings[path] for path in used},
      {path: self.params_like[path] for path in used},
      arrays,
      arrays,
      donate_argnums=0,
    )

    def apply(params, global_, snapshot):
      changed = compiled(
        {path: params[path] for path in used}, global_, snapshot
      )
      return {**params, **changed}

    return apply

  def state_splits(self, name: str) -> Callable[[Partition], Splits]:
    """Returns how any partition splits a leaf of the inner state."""
    path, axes = self._state_paths[name]
    nowhere = (None,) * axes
    return lambda partition: partition.splits[path] if path else nowhere

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
    """Returns the parameter whose path a leaf's ends with, of equal shape."""
    keys = jax.tree_util.keystr(path, simple=True, separator='/').split('/')
    for first in range(len(keys)):
      key = '/'.join(keys[first:])
      like = self.params_like.get(key)
      if like is not None and like.shape == shape:
        return key
    return None


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


def like(shape, where, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def _copied_to_host(array: jax.Array) -> jax.Array:
  """Returns a copy in the memory of the hosts, each of which has its shards."""
  place = lambda device: SingleDeviceSharding(device, memory_kind=HOST_MEMORY)  # noqa: E731
  return jax.make_array_from_single_device_arrays(
    array.shape,
    array.sharding.with_memory_kind(HOST_MEMORY),
    [jax.device_put(x.data, place(x.device)) for x in array.addressable_shards],
  )


def _only(x: jax.Array) -> jax.Array:
  """Returns the one slice of axis 0 that is not 0, to the bit."""
  as_int = jax.lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}')
  return jax.lax.bitcast_convert_type(jnp.sum(as_int, 0, as_int.dtype), x.dtype)


def _copied(tree):
  return jax.tree.map(jnp.copy, tree)
