# SPDX-License-Identifier: Apache-2.0
"""What a learner can run on, and what each is called by GKE and on a VM.

Chips and hosts of TPU slices stand in `diloco/topologies.py`.
"""

import dataclasses
import difflib

from diloco.config_values import ConfigError
from diloco.topologies import TOPOLOGIES, V5E, V5P, V6E, Topology

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
_FAMILIES = {
  V5E: ('tpu-v5-lite-podslice', 'ct5lp-hightpu', 'v2-alpha-tpuv5-lite'),
  V5P: ('tpu-v5p-slice', 'ct5p-hightpu', 'v2-alpha-tpuv5'),
  V6E: ('tpu-v6e-slice', 'ct6e-standard', 'v2-alpha-tpuv6e'),
}


def _tpu(of: Topology) -> Accelerator:
  label, machine, runtime = _FAMILIES[of.chip]
  machine_type = f'{machine}-{of.chips_per_host}t'
  sizes = of.hosts, of.chips_per_host, of.shape
  return Accelerator(of.name, *sizes, label, machine_type, runtime)


TPUS = {name: _tpu(each) for name, each in TOPOLOGIES.items()}
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
