# SPDX-License-Identifier: Apache-2.0
"""One learner on one slice: compiled as it will run, and what it takes."""

import dataclasses
import math

import jax
import numpy as np

from diloco.config import hardware, run_config
from diloco.config.hardware import Chip, Topology
from diloco.learner.device import Device
from diloco.models.flops import StepFlops, step_flops
from diloco.models.kinds import sizes_of
from diloco.numerics.mesh_partition import Partition
from diloco.numerics.payload import cut_bytes
from diloco.run.spec import RunSpec
from diloco.sizing import host_memory, syncer_machine
from diloco.sizing.chip_memory import ChipMemory, chip_memory
from diloco.sizing.slices import described
from diloco.sizing.syncer_machine import SyncerMachine

FIRST = 0  # What devices hold alike, the first host sends for all.
OUT_OF_MEMORY = 'RESOURCE_EXHAUSTED'


@dataclasses.dataclass(frozen=True)
class HostShare:
  """The share of the host that has most, the first."""

  hosts: int  # Hosts of the learner.
  values: int  # Values of Θ that it holds, N.
  fragment_values: int  # Those in the largest fragment, F.
  state_bytes: int  # Bytes of the inner state, S.
  up_bytes: float  # Bytes sent in a round, on average over fragments.
  down_bytes: float  # Bytes received in a round, on average over fragments.
  value_bytes: float  # Bytes of a value on the wire, b; the larger direction.


def host_share(
  run_spec: RunSpec, partition: Partition, state_like
) -> HostShare:
  """Returns the share of a learner whose mesh is cut by `partition`.

  Args:
    partition: gives the host of each device.
    state_like: shapes, dtypes and shardings of the inner state.
  """
  needed, up, down = [], [], []
  for pieces in run_spec.layout.fragments:
    boxes = partition.needed(pieces, FIRST)
    needed.append(sum(box.size for box in boxes))
    down.append(cut_bytes(boxes, run_spec.down))
    offered = partition.offered(pieces, FIRST)
    up.append(sum(run_spec.up.nbytes(box.size) for box in offered))
  return HostShare(
    hosts=partition.host_count,
    values=sum(needed),
    fragment_values=max(needed),
    state_bytes=held_bytes(state_like, partition.hosts),
    up_bytes=sum(up) / len(up),
    down_bytes=sum(down) / len(down),
    value_bytes=max(sum(up), sum(down)) / sum(needed),
  )


def held_bytes(like, hosts: tuple[int, ...]) -> int:
  """Bytes of the different shards that the first host's devices hold.

  Args:
    like: a pytree of abstract arrays on one mesh.
    hosts: of each device, in the mesh's row-major order.
  """
  return sum(_held(leaf, hosts) for leaf in jax.tree.leaves(like))


def _held(leaf, hosts: tuple[int, ...]) -> int:
  sharding = leaf.sharding
  indices = sharding.devices_indices_map(leaf.shape)
  mine = {
    tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape))
    for host, device in zip(hosts, sharding.mesh.devices.flat)
    for index in (indices[device],)
    if host == FIRST
  }
  shard = math.prod(sharding.shard_shape(leaf.shape))
  return len(mine) * shard * np.dtype(leaf.dtype).itemsize


class DoesNotFit(Exception):
  """The compiler says that a program needs more memory than a chip has."""


@dataclasses.dataclass(frozen=True)
class Estimate:
  """The resources that a learner needs."""

  config: run_config.RunConfig  # The run's configuration.
  where: str  # What it is compiled for, in words.
  compiler: str  # Name of the compiler, in words.
  chips: int  # Devices of the learner.
  chip: Chip | None  # Kind of chip; None if unknown.
  parameters: int  # Number of the model's parameters.
  chip_memory: ChipMemory  # Memory of one chip.
  share: HostShare  # Share of one host.
  # Memory of one host of a learner.
  learner_memory: tuple[host_memory.Memory, ...]
  syncer: SyncerMachine
  # FLOPs of a step, by convention; None if not defined.
  flops: StepFlops | None
  xla_flops: float  # FLOPs of a step on one chip, as the compiler counts.

  @property
  def fits(self) -> bool:
    """False where a chip is known to have less memory."""
    chip = self.chip
    return chip is None or self.chip_memory.total <= chip.hbm_bytes

  def tokens_per_s(self, mfu: float) -> float | None:
    """Returns a learner's tokens/s at this MFU; None if unknown."""
    if self.flops is None or self.chip is None:
      return None
    peak = self.chips * self.chip.bf16_flops
    return mfu * peak * self.flops.tokens / self.flops.total


def on_slice(run_spec: RunSpec, of: Topology, compiler: str = '') -> Estimate:
  """Estimates for a slice that need not exist here.

  Call it before jax has opened a device.

  Raises:
    ConfigError: the mesh does not use all of its chips.
    NoCompiler: the requested compiler is not available here.
    DoesNotFit: the learner does not fit on a chip.
  """
  mesh = run_spec.config.mesh
  sizes = f'{mesh.fsdp=} * {mesh.expert=} * {mesh.tensor=}'
  hardware.check_fits(of, mesh.devices, sizes)
  found = described(of, compiler)
  device = _compiled(run_spec, found.devices)
  partition = device.partition
  if not found.is_target:  # Forced devices are all of one process.
    hosts = tuple(i // of.chips_per_host for i in range(of.chips))
    partition = dataclasses.replace(partition, hosts=hosts)
  where = (
    f'{of.name}: {of.chips} chips of {of.chip.name} ({of.shape}), '
    f'{of.chips_per_host} a host'
  )
  return _estimate(run_spec, device, partition, where, found.compiler, of.chip)


def on_devices(run_spec: RunSpec) -> Estimate:
  """Estimates for the devices of this process.

  Raises:
    DoesNotFit: the learner does not fit on one of them.
  """
  devices = jax.devices()
  kind = devices[0].device_kind
  device = _compiled(run_spec, devices)
  chip = hardware.chip_of(kind)
  where = f'the {len(devices)} devices that are here, of kind {kind!r}'
  compiler = f'the compiler of {jax.default_backend()!r}'
  return _estimate(run_spec, device, device.partition, where, compiler, chip)


def _compiled(run_spec: RunSpec, devices) -> Device:
  try:
    return Device(run_spec, devices)
  except jax.errors.JaxRuntimeError as error:
    if OUT_OF_MEMORY not in str(error):
      raise
    raise DoesNotFit(str(error).partition('\n')[0]) from error


def _estimate(
  run_spec: RunSpec,
  device: Device,
  partition: Partition,
  where: str,
  compiler: str,
  chip: Chip | None,
) -> Estimate:
  config = run_spec.config
  protocol = config.protocol
  ahead = protocol.inflight_max
  share = host_share(run_spec, partition, device.state_like)
  flops = None
  if sizes := sizes_of(config.model):
    flops = step_flops(sizes, config.data.batch, config.data.seq_len)
  return Estimate(
    config=config,
    where=where,
    compiler=compiler,
    chips=config.mesh.devices,
    chip=chip,
    parameters=run_spec.parameters,
    chip_memory=chip_memory(device, ahead),
    share=share,
    learner_memory=host_memory.of_learner(
      share.values,
      share.fragment_values,
      share.state_bytes,
      share.value_bytes,
      ahead,
    ),
    syncer=syncer_machine.of_layout(config, run_spec.layout),
    flops=flops,
    xla_flops=device.programs['step'].cost_analysis().get('flops', 0.0),
  )
