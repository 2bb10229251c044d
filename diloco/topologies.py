# SPDX-License-Identifier: Apache-2.0
"""The TPU slices that a learner can run on: chips, hosts, and what a chip has.

The number in a name is the TPU API's: chips for v5litepod and v6e, TensorCores
(two a chip) for v5p. A slice of up to 8 chips of v5e and v6e is one host; all
larger ones have hosts of 4 chips. A slice of v5e goes by 'v5e-N' too.

Imports no jax: launchers and plans read it on machines without devices.
"""

import dataclasses
import difflib
import math

from diloco.config_values import ConfigError


@dataclasses.dataclass(frozen=True)
class Chip:
  """One kind of accelerator, from its data sheet.

  Attributes:
    name: such as 'v5e'.
    device_kinds: jax's names for it.
    hbm_bytes: its memory.
    bf16_flops: its peak per second, dense, in bf16.
  """

  name: str
  device_kinds: tuple[str, ...]
  hbm_bytes: int
  bf16_flops: float


V5E = Chip('v5e', ('TPU v5 lite', 'TPU v5e'), 16 * 10**9, 197e12)
V5P = Chip('v5p', ('TPU v5', 'TPU v5p'), 95 * 10**9, 459e12)
V6E = Chip('v6e', ('TPU v6 lite', 'TPU v6e'), 32 * 10**9, 918e12)
H100 = Chip('H100', ('NVIDIA H100 80GB HBM3',), 80 * 10**9, 989e12)
H200 = Chip('H200', ('NVIDIA H200',), 141 * 10**9, 989e12)
CHIPS = (V5E, V5P, V6E, H100, H200)


@dataclasses.dataclass(frozen=True)
class Topology:
  """A slice.

  Attributes:
    name: the TPU API's.
    chip: of which kind.
    shape: how the chips are wired, such as '4x4x8'; GKE writes it so too.
    hosts: machines.
    chips_per_host: of each.
  """

  name: str
  chip: Chip
  shape: str
  hosts: int
  chips_per_host: int

  def __post_init__(self):
    chips = math.prod(map(int, self.shape.split('x')))
    assert chips == self.chips, f'{self.name}: {self.shape} is {chips} chips'

  @property
  def chips(self) -> int:
    """The number of chips; jax sees one device each."""
    return self.hosts * self.chips_per_host


_SLICES = (
  Topology('v5litepod-1', V5E, '1x1', 1, 1),
  Topology('v5litepod-4', V5E, '2x2', 1, 4),
  Topology('v5litepod-8', V5E, '2x4', 1, 8),
  Topology('v5litepod-16', V5E, '4x4', 4, 4),
  Topology('v5litepod-32', V5E, '4x8', 8, 4),
  Topology('v5litepod-64', V5E, '8x8', 16, 4),
  Topology('v5litepod-128', V5E, '8x16', 32, 4),
  Topology('v5litepod-256', V5E, '16x16', 64, 4),
  Topology('v5p-8', V5P, '2x2x1', 1, 4),
  Topology('v5p-16', V5P, '2x2x2', 2, 4),
  Topology('v5p-32', V5P, '2x2x4', 4, 4),
  Topology('v5p-64', V5P, '2x4x4', 8, 4),
  Topology('v5p-128', V5P, '4x4x4', 16, 4),
  Topology('v5p-256', V5P, '4x4x8', 32, 4),
  Topology('v6e-1', V6E, '1x1', 1, 1),
  Topology('v6e-4', V6E, '2x2', 1, 4),
  Topology('v6e-8', V6E, '2x4', 1, 8),
  Topology('v6e-16', V6E, '4x4', 4, 4),
)
TOPOLOGIES = {each.name: each for each in _SLICES}


def topology(name: str) -> Topology:
  """The slice of that name; 'v5e-N' is 'v5litepod-N'.

  Raises:
    ConfigError: there is none.
  """
  family, dash, number = name.partition('-')
  found = f'v5litepod{dash}{number}' if family == V5E.name else name
  if found not in TOPOLOGIES:
    near = difflib.get_close_matches(found, TOPOLOGIES, 1)
    hint = f'did you mean {near[0]}? ' if near else ''
    known = ', '.join(TOPOLOGIES)
    raise ConfigError([f'--topology={name}: unknown; {hint}known are {known}'])
  return TOPOLOGIES[found]


def chip_of(device_kind: str) -> Chip | None:
  """The chip that jax calls so; None where its peak is not known here."""
  return next((c for c in CHIPS if device_kind in c.device_kinds), None)


def check_fits(chosen: Topology, devices: int, mesh: str) -> None:
  """Refuses a mesh that does not take every chip of a slice.

  Args:
    chosen: the slice.
    devices: of the mesh.
    mesh: its keys and sizes, as they are to be named.

  Raises:
    ConfigError: names the slices that it would fit.
  """
  if devices == chosen.chips:
    return
  fitting = [each.name for each in _SLICES if each.chips == devices]
  would = f'it fits {", ".join(fitting)}' if fitting else 'it fits no slice'
  raise ConfigError(
    [
      f'--topology={chosen.name}: has {chosen.chips} chips, the mesh {mesh} '
      f'takes {devices}: {would}; or make the product of the mesh '
      f'{chosen.chips}'
    ]
  )
