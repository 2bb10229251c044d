# SPDX-License-Identifier: Apache-2.0
"""A run's model on the devices of one process that does not train it."""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from diloco.config.sections import MeshConfig
from diloco.models import api, sharding
from diloco.models.api import Model


class OnDevices:
  """Places parameters and batches, and compiles functions of both.

  The mesh has the devices of the process along the axes of the learners' mesh:
  what 'expert' and 'tensor' leave is 'fsdp'. Parameters lie as a learner's do,
  with 'context' 1: matrices are cut, norms and routers are everywhere.

  Args:
    shapes: path -> that of the parameter.
    devices: None: all of this process.
  """

  def __init__(
    self,
    model: Model,
    shapes: Mapping[str, tuple[int, ...]],
    mesh: MeshConfig,
    devices: Sequence[jax.Device] | None = None,
  ):
    devices = jax.local_devices() if devices is None else devices
    self.mesh, self.shardings = _laid_out(model, shapes, mesh, list(devices))

  def place(self, params: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Copies parameters, path -> array, to the devices."""
    return {
      path: jax.device_put(x, self.shardings[path])
      for path, x in params.items()
    }

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


def of_run(run_spec, devices: Sequence[jax.Device] | None = None) -> OnDevices:
  """Returns the `OnDevices` of a run's model and mesh."""
  shapes = {path: spec.shape for path, spec in run_spec.specs.items()}
  mesh = run_spec.config.mesh
  return OnDevices(run_spec.model, shapes, mesh, devices)
