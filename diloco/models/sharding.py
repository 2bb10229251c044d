# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of a model lie: logical axes, one table, a mesh of two axes.

'fsdp' splits the batch and, at rest, the parameters; 'tensor' splits heads,
MLP and vocabulary. The axes are of type Auto: the compiler places what is not
pinned here. Compile and run under `jax.set_mesh(mesh)`, else activations are
not pinned at all.
"""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

FSDP = 'fsdp'
TENSOR = 'tensor'

# Logical axis -> mesh axis. None: every device holds the whole axis.
RULES: Mapping[str, str | None] = {
  'batch': FSDP,
  'embed': FSDP,
  'heads': TENSOR,
  'kv_heads': TENSOR,
  'layers': None,  # Each step of the scan needs one slice on every device.
  'mlp': TENSOR,
  'norm': None,  # Small, and used whole by everyone.
  'vocab': TENSOR,
}


def make_mesh(
  fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """A mesh of fsdp × tensor devices; 'tensor' runs over neighbours.

  Args:
    fsdp: Devices along 'fsdp', at least 1.
    tensor: Devices along 'tensor', at least 1.
    devices: All that are to be used; None means all of this learner.

  Raises:
    ValueError: The mesh has not exactly as many places as there are devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  if fsdp < 1 or tensor < 1:
    raise ValueError(f'mesh: {fsdp=}, {tensor=}, both must be at least 1')
  if fsdp * tensor != len(devices):
    raise ValueError(
      f'mesh: fsdp={fsdp} by tensor={tensor} needs {fsdp * tensor} devices, '
      f'there are {len(devices)}'
    )
  return jax.make_mesh(
    (fsdp, tensor),
    (FSDP, TENSOR),
    (AxisType.Auto, AxisType.Auto),
    devices=devices,
  )


def param_shardings(
  axes: Mapping[str, tuple[str | None, ...]],
  shapes: Mapping[str, tuple[int, ...]],
  mesh: Mesh,
  rules: Mapping[str, str | None] = RULES,
) -> dict[str, NamedSharding]:
  """Path -> the sharding of each parameter.

  Args:
    axes: `Model.axes`.
    shapes: Path -> the shape of the parameter; the same paths as `axes`.
    mesh: Of any axes that `rules` names.
    rules: Logical axis -> mesh axis or None.

  Raises:
    ValueError: A logical axis is not in `rules`, its mesh axis is not in the
      mesh, is used twice by one parameter, or does not divide its size.
  """
  if axes.keys() != shapes.keys():
    raise ValueError(
      'axes and shapes differ in ' + ', '.join(sorted(axes ^ shapes.keys()))
    )
  return {
    path: NamedSharding(mesh, _spec(path, axes[path], shape, mesh, rules))
    for path, shape in shapes.items()
  }


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """For 'tokens' [B, L+1]: rows over 'fsdp', copies over 'tensor'."""
  return NamedSharding(mesh, PartitionSpec(RULES['batch'], None))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """Pins an activation, inside jit, to the mesh of `jax.set_mesh`, if any.

  Args:
    x: The activation.
    names: The logical name of each of its axes; None leaves one unsharded.

  An axis that the mesh does not have, or does not divide, stays unsharded: a
  mesh of somebody else's, or an odd vocabulary, changes speed and no result.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  assert len(names) == x.ndim, f'{names=} {x.shape=}'
  targets = [name and RULES[name] for name in names]
  spec = [
    target if target in mesh.shape and size % mesh.shape[target] == 0 else None
    for target, size in zip(targets, x.shape)
  ]
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def _spec(path, names, shape, mesh, rules) -> PartitionSpec:
  if len(names) != len(shape):
    raise ValueError(f'{path}: axes {names} do not fit the shape {shape}')
  targets = [_target(path, name, mesh, rules) for name in names]
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
  assert math.prod(shape) > 0, f'{path}: empty shape {shape}'
  return PartitionSpec(*targets)


def _target(path, name, mesh, rules) -> str | None:
  if name is None:
    return None
  if name not in rules:
    raise ValueError(
      f'{path}: no rule for the axis {name!r}; there are {sorted(rules)}'
    )
  target = rules[name]
  if target is not None and target not in mesh.shape:
    raise ValueError(
      f'{path}: rule {name!r} -> {target!r}, but the mesh has the axes '
      f'{mesh.axis_names}'
    )
  return target
