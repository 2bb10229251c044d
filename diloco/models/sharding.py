# SPDX-License-Identifier: Apache-2.0
"""The sharding of a model's arrays: logical axes, one table, a mesh of four
axes, or five.

'fsdp' splits the batch and, at rest, the parameters; 'expert' splits the batch,
too, and the experts, each device having whole ones; 'context' splits each
sequence, of which all keys and values come together for the attention; 'tensor'
splits heads, MLP and vocabulary. Of a learner with several slices, 'slice',
the outermost, splits the batch alone. The axes are of type Auto: the compiler
places what is not pinned here. Compile and run under `jax.set_mesh(mesh)`;
otherwise activations are not pinned at all.
"""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

SLICE = 'slice'
FSDP = 'fsdp'
EXPERT = 'expert'
CONTEXT = 'context'
TENSOR = 'tensor'

# Logical axis -> mesh axis, or axes. None: every device holds the whole axis.
RULES: Mapping[str, str | tuple[str, ...] | None] = {
  'batch': (SLICE, FSDP, EXPERT),
  'embed': FSDP,
  'experts': EXPERT,
  'heads': TENSOR,
  'kv_heads': TENSOR,
  'length': CONTEXT,
  'layers': None,  # Each step of the scan needs one slice on every device.
  'mlp': TENSOR,
  'norm': None,  # Small, and needed whole on every device.
  'router': None,  # Scores of experts; likewise.
  'vocab': TENSOR,
}


def make_mesh(
  fsdp: int,
  tensor: int,
  devices: Sequence[jax.Device] | None = None,
  *,
  expert: int = 1,
  context: int = 1,
  slices: int = 1,
) -> Mesh:
  """Makes a mesh of fsdp × expert × context × tensor devices; 'tensor' is
  innermost. Several slices have so many each.

  Args:
    fsdp: Devices along 'fsdp', at least 1.
    tensor: Devices along 'tensor', at least 1.
    devices: Devices to use; None: all of this learner.
    expert: Devices along 'expert', at least 1.
    context: Devices along 'context', at least 1.
    slices: Devices along 'slice'; 1: the mesh has no such axis.

  Raises:
    ValueError: The mesh does not have exactly as many places as devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = {FSDP: fsdp, EXPERT: expert, CONTEXT: context, TENSOR: tensor}
  if slices > 1:
    sizes = {SLICE: slices, **sizes}
  if min(sizes.values()) < 1:
    raise ValueError(f'mesh: {sizes}, all must be at least 1')
  if (needed := math.prod(sizes.values())) != len(devices):
    raise ValueError(
      f'mesh: {sizes} needs {needed} devices, there are {len(devices)}'
    )
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    (AxisType.Auto,) * len(sizes),
    devices=devices,
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
  """Returns the sharding of 'tokens' [B, L+1]: its rows are spread."""
  axes = tuple(axis for axis in RULES['batch'] if axis in mesh.shape)
  return NamedSharding(mesh, PartitionSpec(axes, None))


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


def mesh_axis(mesh, name: str, size: int) -> str | tuple[str, ...] | None:
  """Returns the mesh axis of a logical one, or axes; None if the mesh does not
  have it, or it does not divide `size`.
  """
  target = RULES[name]
  axes = (target,) if isinstance(target, str) else target or ()
  there = tuple(axis for axis in axes if axis in mesh.shape)
  if not there or size % math.prod(mesh.shape[axis] for axis in there):
    return None
  return target if isinstance(target, str) else there


def platform() -> str:
  """Returns what a computation is traced for: 'cpu', 'tpu' or 'gpu'.

  A described device, for which a program is only compiled, counts.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device else jax.default_backend()


def device_kind() -> str:
  """Returns the kind of the devices that a computation is traced for, such as
  'TPU v5 lite'.
  """
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.device_kind if device else jax.devices()[0].device_kind


def is_cut(axis: str) -> bool:
  """Returns True if the mesh has several devices along an axis of its own."""
  return jax.sharding.get_abstract_mesh().shape.get(axis, 1) > 1


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
