# SPDX-License-Identifier: Apache-2.0
"""The sharding of a model's arrays: logical axes, one table, a mesh of three
axes.

'fsdp' splits the batch and, at rest, the parameters; 'expert' splits the
experts, each device having whole ones; 'tensor' splits heads, MLP and
vocabulary. The axes are of type Auto: the compiler places what is not pinned
here. Compile and run under `jax.set_mesh(mesh)`; otherwise activations are not
pinned at all.
"""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

FSDP = 'fsdp'
EXPERT = 'expert'
TENSOR = 'tensor'

# Logical axis -> mesh axis. None: every device holds the whole axis.
RULES: Mapping[str, str | None] = {
  'batch': FSDP,
  'embed': FSDP,
  'experts': EXPERT,
  'heads': TENSOR,
  'kv_heads': TENSOR,
  'layers': None,  # Each step of the scan needs one slice on every device.
  'mlp': TENSOR,
  'norm': None,  # Small, and needed whole on every device.
  'vocab': TENSOR,
}


def make_mesh(
  fsdp: int,
  tensor: int,
  devices: Sequence[jax.Device] | None = None,
  *,
  expert: int = 1,
) -> Mesh:
  """Makes a mesh of fsdp × expert × tensor devices; 'tensor' is innermost.

  Args:
    fsdp: Devices along 'fsdp', at least 1.
    tensor: Devices along 'tensor', at least 1.
    devices: Devices to use; None: all of this learner.
    expert: Devices along 'expert', at least 1.

  Raises:
    ValueError: The mesh does not have exactly as many places as devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = (fsdp, expert, tensor)
  if min(sizes) < 1:
    raise ValueError(
      f'mesh: {fsdp=}, {expert=}, {tensor=}, all must be at least 1'
    )
  if math.prod(sizes) != len(devices):
    raise ValueError(
      f'mesh: {fsdp=} by {expert=} by {tensor=} needs {math.prod(sizes)} '
      f'devices, there are {len(devices)}'
    )
  return jax.make_mesh(
    sizes, (FSDP, EXPERT, TENSOR), (AxisType.Auto,) * 3, devices=devices
  )


def param_shardings(
  axes: Mapping[str, tuple[str | None, ...]],
  shapes: Mapping[str, tuple[int, ...]],
  mesh: Mesh,
) -> dict[str, NamedSharding]:
  """Returns path -> the sharding of each parameter.

  Args:
    axes: `Model.axes`.
    shapes: Path -> the shape of the parameter; the same paths as `axes`.
    mesh: A mesh with the axes that `RULES` names.

  Raises:
    ValueError: A logical axis is not in `RULES`, or its mesh axis is used twice
      by one parameter, or does not divide its size.
  """
  if axes.keys() != shapes.keys():
    raise ValueError(
      'axes and shapes differ in ' + ', '.join(sorted(axes ^ shapes.keys()))
    )
  return {
    path: NamedSharding(mesh, _spec(path, axes[path], shape, mesh))
    for path, shape in shapes.items()
  }


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of 'tokens' [B, L+1]: rows over 'fsdp', or copied."""
  return NamedSharding(mesh, PartitionSpec(RULES['batch'], None))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """Pins an activation, inside jit, to the mesh of `jax.set_mesh`, if any.

  An axis that the mesh does not have, or does not divide, stays unsharded: a
  user's own mesh, or an odd vocabulary, changes speed but no result.

  Args:
    names: The logical name of each of its axes; None leaves one unsharded.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  if len(names) != x.ndim:
    raise ValueError(f'axes {names} do not fit the shape {x.shape}')
  spec = [
    name and mesh_axis(mesh, name, size) for name, size in zip(names, x.shape)
  ]
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def mesh_axis(mesh, name: str, size: int) -> str | None:
  """Returns the mesh axis of a logical one; None if the mesh does not have it,
  or it does not divide `size`.
  """
  target = RULES[name]
  divides = target in mesh.shape and size % mesh.shape[target] == 0
  return target if divides else None


def _spec(path, names, shape, mesh) -> PartitionSpec:
  if len(names) != len(shape):
    raise ValueError(f'{path}: axes {names} do not fit the shape {shape}')
  for name in names:
    if name is not None and name not in RULES:
      raise ValueError(
        f'{path}: no rule for the axis {name!r}; there are {sorted(RULES)}'
      )
  targets = [name and RULES[name] for name in names]
  for name, target, size in zip(names, targets, shape):
    if target and size % mesh.shape[target]:
      raise ValueError(
        f'{path}: axis {name!r} of size {size} is not divisible by the '
        f'{mesh.shape[target]} devices of mesh axis {target!r}'
      )
    if target and targets.count(target) > 1:
      raise ValueError(
        f'{path}: axes {names} use mesh axis {target!r} more than once'
      )
  if not math.prod(shape):
    raise ValueError(f'{path}: its shape {shape} holds no element')
  return PartitionSpec(*targets)
