# SPDX-License-Identifier: Apache-2.0
"""Devices of a slice that is not here: described to a compiler, never opened.

libtpu compiles for a slice by its description, on a machine without a chip.
Where it is not installed, the CPU's compiler compiles for as many forced
devices: arrays and their shards are the same, temporaries and code are not.
"""

import dataclasses
import importlib.metadata
import os

import jax
from jax.experimental import topologies

from diloco.config.hardware import Topology

# libtpu asks the machine's metadata server where it runs, and writes logs,
# unless told; what it compiles for is said by name. It opens no chip here, so
# another process may have them.
LIBTPU = {
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_ACCELERATOR_TYPE': 'v5p-8',
  'TPU_LOG_DIR': 'disabled',
  'TPU_MIN_LOG_LEVEL': '3',
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_STDERR_LOG_LEVEL': '3',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_WORKER_ID': '0',
}
TPU = 'tpu'
CPU = 'cpu'


class NoCompiler(Exception):
  """There is no compiler for the slice here; the text says why."""


@dataclasses.dataclass(frozen=True)
class Described:
  """Devices to compile for."""

  devices: tuple[jax.Device, ...]  # One for each chip.
  compiler: str  # Name of the compiler, in words.
  is_target: bool  # True if that is the slice's own compiler.


def described(of: Topology, compiler: str = '') -> Described:
  """The chips of a slice; to be called before jax has opened a device.

  Args:
    compiler: 'tpu', 'cpu', or '' for the first that is here.

  Raises:
    NoCompiler: the one that was asked for is not here.
  """
  jax.config.update('jax_platforms', CPU)  # None of this machine's chips.
  # A program of libtpu can't be read back without a chip.
  jax.config.update('jax_enable_compilation_cache', False)
  if compiler == CPU:
    return _forced(of, 'as was asked')
  try:
    return _by_libtpu(of)
  except NoCompiler as error:
    if compiler == TPU:
      raise
    return _forced(of, str(error))


def _by_libtpu(of: Topology) -> Described:
  try:
    version = importlib.metadata.version('libtpu')
  except importlib.metadata.PackageNotFoundError:
    raise NoCompiler(
      "libtpu is not installed; the package's extra 'tpu' has it"
    ) from None
  for name, value in LIBTPU.items():
    os.environ.setdefault(name, value)
  bounds = {}
  if of.hosts == 1:
    sizes = [int(size) for size in of.shape.split('x')]
    bounds = {'chips_per_host_bounds': (*sizes, 1)[:3]}
  try:
    found = topologies.get_topology_desc(
      platform=TPU, topology_name=f'{of.chip.name}:{of.shape}', **bounds
    )
  except (RuntimeError, ValueError) as error:
    raise NoCompiler(f'libtpu {version}: {error}') from error
  return Described(
    tuple(found.devices),
    f"libtpu {version}, the chips' own compiler",
    is_target=True,
  )


def _forced(of: Topology, why: str) -> Described:
  jax.config.update('jax_num_cpu_devices', of.chips)
  return Described(
    tuple(jax.devices()),
    f"the CPU's compiler, for {of.chips} forced devices ({why}); arrays and "
    "shards are those of the chips, temporaries and XLA's counts are not",
    is_target=False,
  )
