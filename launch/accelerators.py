# SPDX-License-Identifier: Apache-2.0
"""One table of what a learner can run on: hosts, chips, and what each is
called by the TPU API and by GKE.

The number in a name is the TPU API's: chips for v5litepod and v6e, TensorCores
(two a chip) for v5p. A slice of up to 8 chips of v5e and v6e is one host; all
larger ones have hosts of 4 chips.
"""

import dataclasses
import difflib

from diloco.config_values import ConfigError

CPU = 'cpu'
GPU = 'gpu'


@dataclasses.dataclass(frozen=True)
class Accelerator:
  """What one learner runs on; the last four are empty for CPU and GPU."""

  name: str
  hosts: int
  chips_per_host: int
  topology: str = ''  # As GKE writes it.
  gke_label: str = ''  # Of the node pool.
  machine_type: str = ''  # Of a host.
  runtime_version: str = ''  # Of a TPU VM.

  @property
  def is_tpu(self) -> bool:
    return bool(self.topology)


# GKE label, machine type before the chips per host, runtime version.
_V5E = ('tpu-v5-lite-podslice', 'ct5lp-hightpu', 'v2-alpha-tpuv5-lite')
_V5P = ('tpu-v5p-slice', 'ct5p-hightpu', 'v2-alpha-tpuv5')
_V6E = ('tpu-v6e-slice', 'ct6e-standard', 'v2-alpha-tpuv6e')

# Name: family, topology, hosts, chips per host.
_TPUS = {
  'v5litepod-1': (_V5E, '1x1', 1, 1),
  'v5litepod-4': (_V5E, '2x2', 1, 4),
  'v5litepod-8': (_V5E, '2x4', 1, 8),
  'v5litepod-16': (_V5E, '4x4', 4, 4),
  'v5litepod-32': (_V5E, '4x8', 8, 4),
  'v5litepod-64': (_V5E, '8x8', 16, 4),
  'v5litepod-128': (_V5E, '8x16', 32, 4),
  'v5litepod-256': (_V5E, '16x16', 64, 4),
  'v5p-8': (_V5P, '2x2x1', 1, 4),
  'v5p-16': (_V5P, '2x2x2', 2, 4),
  'v5p-32': (_V5P, '2x2x4', 4, 4),
  'v5p-64': (_V5P, '2x4x4', 8, 4),
  'v5p-128': (_V5P, '4x4x4', 16, 4),
  'v5p-256': (_V5P, '4x4x8', 32, 4),
  'v6e-1': (_V6E, '1x1', 1, 1),
  'v6e-4': (_V6E, '2x2', 1, 4),
  'v6e-8': (_V6E, '2x4', 1, 8),
  'v6e-16': (_V6E, '4x4', 4, 4),
}


def _tpu(name: str) -> Accelerator:
  (label, machine, runtime), topology, hosts, chips = _TPUS[name]
  return Accelerator(
    name, hosts, chips, topology, label, f'{machine}-{chips}t', runtime
  )


TPUS = {name: _tpu(name) for name in _TPUS}
NAMES = (CPU, GPU, *TPUS)


def accelerator(
  name: str, gpus_per_host: int = 0, hosts: int = 0
) -> Accelerator:
  """What a learner runs on.

  Args:
    name: of `NAMES`.
    gpus_per_host: for GPU only.
    hosts: of CPU or GPU; a slice has as many as it has. 0: not said.

  Raises:
    ConfigError: no such accelerator, GPUs without their number, or a slice of
      another number of hosts.
  """
  if name == CPU:
    return Accelerator(CPU, hosts or 1, chips_per_host=0)
  if name == GPU:
    if gpus_per_host < 1:
      raise ConfigError(
        [f'--gpus_per_host={gpus_per_host}: a learner on GPUs needs one']
      )
    return Accelerator(GPU, hosts or 1, gpus_per_host)
  if name not in TPUS:
    near = difflib.get_close_matches(name, NAMES, 1)
    hint = f'did you mean {near[0]}? ' if near else ''
    raise ConfigError(
      [f'--accelerator={name}: unknown; {hint}known are {", ".join(NAMES)}']
    )
  if hosts not in (0, TPUS[name].hosts):
    raise ConfigError(
      [f'--hosts={hosts}: a slice {name} has {TPUS[name].hosts}']
    )
  return TPUS[name]
