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


def accelerator(name: str, gpus_per_host: int = 0) -> Accelerator:
  """Of `NAMES`; `gpus_per_host` is for GPU only.

  Raises:
    ConfigError: no such accelerator, or GPUs without their number.
  """
  if name == CPU:
    return Accelerator(CPU, hosts=1, chips_per_host=0)
  if name == GPU:
    if gpus_per_host < 1:
      raise ConfigError(
        [f'--gpus_per_host={gpus_per_host}: a learner on GPUs needs one']
      )
    return Accelerator(GPU, hosts=1, chips_per_host=gpus_per_host)
  if name not in TPUS:
    near = difflib.get_close_matches(name, NAMES, 1)
    hint = f'did you mean {near[0]}? ' if near else ''
    raise ConfigError(
      [f'--accelerator={name}: unknown; {hint}known are {", ".join(NAMES)}']
    )
  return TPUS[name]


def check_one_host(chosen: Accelerator) -> None:
  """The one place that refuses a learner of several hosts.

  Raises:
    ConfigError: it has several.
  """
  if chosen.hosts > 1:
    raise ConfigError(
      [
        'a learner of several hosts is not supported yet: '
        f'{chosen.name} has {chosen.hosts} hosts; choose one of one host, '
        f'such as {_sibling(chosen)}'
      ]
    )


def _sibling(chosen: Accelerator) -> str:
  """The largest of the same family that is one host."""
  family = chosen.name.partition('-')[0]
  fitting = [
    each
    for each in TPUS.values()
    if each.hosts == 1 and each.name.startswith(f'{family}-')
  ]
  return max(fitting, key=lambda each: each.chips_per_host).name
