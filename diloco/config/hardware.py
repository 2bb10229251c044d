# SPDX-License-Identifier: Apache-2.0
"""TPU slices and chips, and the environment that a learner needs.

The number in a name is the TPU API's: chips for v5litepod and v6e, TensorCores
(two a chip) for v5p. A slice of up to 8 chips of v5e and v6e is one host; all
larger ones have hosts of 4 chips. A slice of v5e goes by 'v5e-N' too.

Imports no jax: launchers and plans read it on machines without devices.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence

from diloco.config.sections import ConfigError

PLATFORMS = 'JAX_PLATFORMS'
# By which a launcher lets the hosts of one learner know each other; made anew
# at each start, beside the token of the run.
GROUP_SECRET = 'DILOCO_GROUP_SECRET'
CPU = 'cpu'
WORLD_OF_SLICES = 'MEGASCALE_'  # libtpu joins slices that have these.
# Shares of a GPU's memory that jax may take; the older name, and the newer.
FRACTIONS = ('XLA_PYTHON_CLIENT_MEM_FRACTION', 'XLA_CLIENT_MEM_FRACTION')
PREALLOCATE = 'XLA_PYTHON_CLIENT_PREALLOCATE'
TRUTHS = ('true', 'false', '1', '0')


@dataclasses.dataclass(frozen=True)
class Chip:
  """One kind of accelerator, from its data sheet."""

  name: str  # Such as 'v5e'.
  device_kinds: tuple[str, ...]  # jax's names for it.
  hbm_bytes: int
  bf16_flops: float  # Its peak per second, dense, in bf16.


V5E = Chip('v5e', ('TPU v5 lite', 'TPU v5e'), 16 * 10**9, 197e12)
V5P = Chip('v5p', ('TPU v5', 'TPU v5p'), 95 * 10**9, 459e12)
V6E = Chip('v6e', ('TPU v6 lite', 'TPU v6e'), 32 * 10**9, 918e12)
H100 = Chip('H100', ('NVIDIA H100 80GB HBM3',), 80 * 10**9, 989e12)
H200 = Chip('H200', ('NVIDIA H200',), 141 * 10**9, 989e12)
GPUS = (H100, H200)
CHIPS = (V5E, V5P, V6E, *GPUS)


@dataclasses.dataclass(frozen=True)
class Topology:
  """A slice."""

  name: str  # The TPU API's.
  chip: Chip
  shape: str  # How the chips are wired, such as '4x4x8'; GKE writes it so too.
  hosts: int
  chips_per_host: int

  def __post_init__(self):
    chips = math.prod(map(int, self.shape.split('x')))
    assert chips == self.chips, f'{self.name}: {self.shape} is {chips} chips'

  @property
  def chips(self) -> int:
    """The number of chips; jax sees one device each."""
    return self.hosts * self.chips_per_host

  @property
  def is_gpus(self) -> bool:
    """Returns True if it stands for GPUs."""
    return self.chip in GPUS


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


def gpus(chip: Chip, per_host: int, hosts: int = 1) -> Topology:
  """The GPUs of one learner, as if they were a slice."""
  number = per_host * hosts
  return Topology(f'{chip.name}-{number}', chip, f'{number}', hosts, per_host)


# What a plan knows: hosts have 8 GPUs, where there are several.
PLANNED = TOPOLOGIES | {
  f'{chip.name}-{n}': gpus(chip, min(n, 8), max(n // 8, 1))
  for chip in GPUS
  for n in (1, 2, 4, 8, 16, 32, 64, 128)
}


def canonical(name: str) -> str:
  """Returns the TPU API's name of a slice; 'v5e-N' is 'v5litepod-N'."""
  family, dash, number = name.partition('-')
  return f'v5litepod{dash}{number}' if family == V5E.name else name


def topology(
  name: str,
  flag: str = '--topology',
  others: Sequence[str] = (),
  known: Mapping[str, Topology] = TOPOLOGIES,
) -> Topology:
  """The slice of that name; 'v5e-N' is 'v5litepod-N'.

  Args:
    flag: names it in an error.
    others: accelerators that the flag takes, too.
    known: slices that there are.

  Raises:
    ConfigError: there is none.
  """
  found = canonical(name)
  if found not in known:
    names = (*others, *known)
    near = difflib.get_close_matches(found, names, 1)
    hint = f'did you mean {near[0]}? ' if near else ''
    raise ConfigError(
      f'{flag}={name}: unknown; {hint}known are {", ".join(names)}'
    )
  return known[found]


def chip_of(device_kind: str) -> Chip | None:
  """The chip that jax calls so; None where its peak is not known here."""
  return next((c for c in CHIPS if device_kind in c.device_kinds), None)


def check_fits(
  chosen: Topology, devices: int, mesh: str, flag: str = '--topology'
) -> None:
  """Refuses a mesh that does not take every chip of a slice.

  Args:
    mesh: its keys and sizes, as they are to be named.

  Raises:
    ConfigError: names the slices that it would fit.
  """
  if devices == chosen.chips:
    return
  fitting = [each.name for each in _SLICES if each.chips == devices]
  would = f'it fits {", ".join(fitting)}' if fitting else 'it fits no slice'
  raise ConfigError(
    f'{flag}={chosen.name}: has {chosen.chips} chips, the mesh {mesh} '
    f'takes {devices}: {would}; or make the product of the mesh '
    f'{chosen.chips}'
  )


# Checks and sets a learner's environment variables, before jax reads them.
#
# A learner trains on an accelerator and exchanges through jax's CPU client, so
# it needs both. It is a JAX process group of its own, never part of a larger
# one.


def check(environment: Mapping[str, str], slices: int = 1) -> None:
  """Refuses what a learner could not train with, or not alone.

  Args:
    slices: of the learner that take part; several are joined by libtpu.

  Raises:
    ConfigError: names each variable, and what would be right.
  """
  problems = [
    *_platforms(environment.get(PLATFORMS, '')),
    *(_world(environment) if slices == 1 else ()),
    *_memory(environment),
  ]
  if problems:
    raise ConfigError(problems)


def check_backend(environment: Mapping[str, str], backend: str) -> None:
  """Refuses the CPU where an accelerator was asked for: jax says nothing.

  Args:
    backend: `jax.default_backend()`.

  Raises:
    ConfigError: what was asked for first is not installed.
  """
  value = environment.get(PLATFORMS, '')
  first = value.partition(',')[0]
  if backend == CPU and first not in ('', CPU):
    raise ConfigError(
      f'{PLATFORMS}={value}: jax has no {first!r} here and would train on '
      f"the CPU; install the package's extra for it (such as cuda12), or "
      f'make it {PLATFORMS}={CPU}'
    )


def _platforms(value: str) -> Iterator[str]:
  """Empty or not set: jax takes what there is, and the CPU's client too."""
  names = [name for name in value.split(',') if name]
  if not names or names == [CPU]:
    return
  others = [name for name in names if name != CPU]
  right = f'{PLATFORMS}={",".join([*others, CPU])}'
  if CPU not in names:
    yield (
      f'{PLATFORMS}={value}: a learner exchanges through the CPU client too; '
      f'make it {right}'
    )
  elif names[0] == CPU:
    yield (
      f'{PLATFORMS}={value}: a learner trains on the first, the CPU; make it '
      f'{right}, or {PLATFORMS}={CPU}'
    )


def _world(environment: Mapping[str, str]) -> Iterator[str]:
  for name in sorted(environment):
    if name.startswith(WORLD_OF_SLICES):
      yield (
        f'{name}: joins slices to one JAX world, and a learner is one by '
        'itself, of one slice: unset it, and start a learner for each slice'
      )


def _memory(environment: Mapping[str, str]) -> Iterator[str]:
  for name in FRACTIONS:
    value = environment.get(name)
    if value is not None and not 0 < _number(value) <= 1:
      yield f'{name}={value}: must be a share of a GPU, above 0 and at most 1'
  value = environment.get(PREALLOCATE)
  if value is not None and value.lower() not in TRUTHS:
    yield f'{PREALLOCATE}={value}: must be one of {", ".join(TRUTHS)}'


def _number(text: str) -> float:
  try:
    return float(text)
  except ValueError:
    return math.nan
