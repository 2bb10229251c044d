# SPDX-License-Identifier: Apache-2.0
"""A run's model on the devices of one process that does not train it."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco.config.sections import MeshConfig
from diloco.models import api, sharding
from diloco.models.api import Model
from diloco.numerics import boxes
from diloco.run.initial_weights import InitialWeights
from diloco.run.spec import RunSpec

Frozen = Callable[[Mapping[str, NamedSharding], Mesh], dict[str, jax.Array]]


class OnDevices:
  """Places parameters and batches, and compiles functions of both.

  The mesh has the devices of the process along the axes of the learners' mesh:
  what 'expert' and 'tensor' leave is 'fsdp'. Parameters lie as a learner's do,
  with 'context' 1: matrices are cut, norms and routers are everywhere.

  Args:
    shapes: path -> that of the parameter.
    devices: None: all of this process.
    frozen: takes shardings and the mesh, and returns what no caller gives.
  """

  def __init__(
    self,
    model: Model,
    shapes: Mapping[str, tuple[int, ...]],
    mesh: MeshConfig,
    devices: Sequence[jax.Device] | None = None,
    frozen: Frozen = lambda shardings, mesh: {},
  ):
    devices = jax.local_devices() if devices is None else devices
    self.mesh, self.shardings = _laid_out(model, shapes, mesh, list(devices))
    self._make_frozen = frozen

  def place(self, params: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Copies trained parameters, path -> array, to the devices; returns these,
    and those that are frozen.
    """
    placed = {
      path: jax.device_put(x, self.shardings[path])
      for path, x in params.items()
    }
    return placed | self._frozen

  @functools.cached_property
  def _frozen(self) -> dict[str, jax.Array]:
    return self._make_frozen(self.shardings, self.mesh)

  def rows(self, tree):
    """Copies arrays to the devices; their rows are spread if they divide."""
    return jax.tree.map(lambda x: jax.device_put(x, self.spread(x.shape)), tree)

  def spread(self, shape: tuple[int, ...]) -> NamedSharding:
    """Returns the sharding of an array whose first axis counts rows."""
    axes = sharding.mesh_axis(self.mesh, 'batch', shape[0])
    return NamedSharding(self.mesh, PartitionSpec(axes))

  def jit(self, function: Callable, **options) -> Callable:
    """Returns `jax.jit` of a function of nested parameters and more, that takes
    them by path.
    """
    compiled = jax.jit(
      lambda params, *more: function(api.unflatten(params), *more), **options
    )

    def call(*arguments):
      with jax.set_mesh(self.mesh):
        return compiled(*arguments)

    return call


def of_run(
  run_spec: RunSpec, devices: Sequence[jax.Device] | None = None
) -> OnDevices:
  """Returns the `OnDevices` of a run's model and mesh."""
  return OnDevices(
    run_spec.model,
    run_spec.all_shapes,
    run_spec.config.mesh,
    devices,
    functools.partial(frozen_arrays, run_spec),
  )


def frozen_arrays(
  run_spec: RunSpec, shardings: Mapping[str, NamedSharding], mesh: Mesh
) -> dict[str, jax.Array]:
  """Reads what is not trained to the devices, or draws it there.

  Args:
    shardings: by path; of these, and maybe of more.
  """
  if not (frozen := run_spec.frozen):
    return {}
  places = {path: shardings[path] for path in frozen}
  if run_spec.weights is not None:
    return read_shards(
      run_spec.weights,
      {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[path])
        for path, x in frozen.items()
      },
    )
  with jax.set_mesh(mesh):
    draw = jax.jit(lambda key: run_spec.draw(key, frozen), out_shardings=places)
    return draw(jax.random.key(run_spec.config.seed))


def read_shards(
  weights: InitialWeights, likes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
  """Reads to each device of this process its own shards.

  Args:
    likes: shapes, dtypes and shardings, by path.
  """

  def placed(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
    def shard(index):
      return weights.read(path, boxes.at(index, like.shape)).astype(like.dtype)

    return jax.make_array_from_callback(like.shape, like.sharding, shard)

  return {path: placed(path, like) for path, like in likes.items()}


def _laid_out(model, shapes, mesh: MeshConfig, devices):
  """Returns the mesh of as many devices as divide the parameters."""
  tensor = math.gcd(mesh.tensor, len(devices))
  expert = math.gcd(mesh.expert, len(devices) // tensor)
  for fsdp in range(len(devices) // (tensor * expert), 0, -1):
    made = sharding.make_mesh(
      fsdp, tensor, devices[: fsdp * tensor * expert], expert=expert
    )
    try:
      return made, sharding.param_shardings(model.axes, shapes, made)
    except ValueError:
      if fsdp == 1:
        raise
  raise AssertionError('There is at least one device.')
