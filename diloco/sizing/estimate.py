# SPDX-License-Identifier: Apache-2.0
"""One learner on one slice: compiled as it will run, and what it takes.

libtpu compiles for a slice by its description, on a machine without a chip.
Where it is not installed, the CPU's compiler compiles for as many forced
devices: arrays and their shards are the same, temporaries and code are not.
Memory of a chip is of the largest shard, so of the chip that holds most.
"""

import dataclasses
import importlib.metadata
import math
import os
import textwrap
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.experimental import topologies

from diloco.config import hardware, run_config
from diloco.config.hardware import Topology
from diloco.config.sections import ConfigError
from diloco.config.unlike import Setup
from diloco.learner.programs import LearnerPrograms
from diloco.models.flops import StepFlops, step_flops
from diloco.models.kinds import sizes_of
from diloco.numerics.mesh_partition import Partition
from diloco.numerics.payload import cut_bytes
from diloco.run.spec import RunSpec, make_run_spec
from diloco.sizing import memory, planner
from diloco.sizing.memory import Memory, SyncerMachine, count, in_bytes, rounds
from diloco.sizing.planner import MFU

FIRST = 0  # What devices hold alike, the first host sends for all.
OUT_OF_MEMORY = 'RESOURCE_EXHAUSTED'
EXCHANGING = ('snapshot', 'blend', 'replace')  # Names of programs.
WIDTH = 80  # Columns of the text.
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
GPU = 'gpu'
CPU = 'cpu'


class NoCompiler(Exception):
  """There is no compiler for the slice here; the text says why."""


class DoesNotFit(Exception):
  """The compiler says that a program needs more memory than a chip has."""


# Devices of a slice that is not here: described to a compiler, never opened.


@dataclasses.dataclass(frozen=True)
class Described:
  """Devices to compile for."""

  devices: tuple[jax.Device, ...]  # One for each chip.
  compiler: str  # Name of the compiler, in words.
  is_target: bool  # True if that is the slice's own compiler.


def described(
  topology: Topology, compiler: str = '', chips_max: int = 0
) -> Described:
  """The chips of a slice; to be called before jax has opened a device.

  Args:
    compiler: 'tpu', 'cpu', or '' for the first that is here.
    chips_max: of the largest slice for which this process compiles; 0: this.

  Raises:
    NoCompiler: the one that was asked for is not here.
  """
  jax.config.update('jax_platforms', CPU)  # None of this machine's chips.
  # A program of libtpu can't be read back without a chip.
  jax.config.update('jax_enable_compilation_cache', False)
  # Also beside libtpu: the next kind of learner may be on GPUs.
  jax.config.update('jax_num_cpu_devices', max(chips_max, topology.chips))
  why = 'as was asked'
  if compiler != CPU:
    try:
      return _by_libtpu(topology)
    except NoCompiler as error:
      if compiler == TPU:
        raise
      why = str(error)
  return Described(
    tuple(jax.devices()[: topology.chips]),
    f"the CPU's compiler, for {topology.chips} forced devices ({why}); arrays "
    "and shards are those of the chips, temporaries and XLA's counts are not",
    is_target=False,
  )


def _by_libtpu(topology: Topology) -> Described:
  try:
    version = importlib.metadata.version('libtpu')
  except importlib.metadata.PackageNotFoundError:
    raise NoCompiler(
      "libtpu is not installed; the package's extra 'tpu' has it"
    ) from None
  if topology.is_gpus:
    raise NoCompiler(f'libtpu compiles for no {topology.chip.name}')
  for name, value in LIBTPU.items():
    os.environ.setdefault(name, value)
  bounds = {}
  if topology.hosts == 1:
    sizes = [int(size) for size in topology.shape.split('x')]
    bounds = {'chips_per_host_bounds': (*sizes, 1)[:3]}
  try:
    name = f'{topology.chip.name}:{topology.shape}'
    slice_ = topologies.get_topology_desc(name, TPU, **bounds)
  except (RuntimeError, ValueError) as error:
    raise NoCompiler(f'libtpu {version}: {error}') from error
  return Described(
    tuple(slice_.devices),
    f"libtpu {version}, the chips' own compiler",
    is_target=True,
  )


# The memory of a chip, and the share of a host.


def chip_memory(programs: LearnerPrograms, ahead: int) -> tuple[Memory, ...]:
  """Returns the memory of a chip of a learner whose programs are compiled.

  That is of a step with the exchange in progress, without a donation.

  Args:
    programs: for chips, or for their description.
    ahead: rounds that may be in flight.
  """
  step = programs.compiled['step'].memory_analysis()
  parameters = shard_bytes(programs.params_like)
  inner_state = shard_bytes(programs.state_like)
  frozen = shard_bytes(programs.frozen_like)
  batch = step.argument_size_in_bytes - parameters - inner_state - frozen
  batch = max(0, batch)
  # Donated buffers are returned in place; anything else is new.
  fresh = step.output_size_in_bytes - step.alias_size_in_bytes
  exchange = exchange_memory(programs.compiled, ahead)
  parts = {
    'parameters, f32': parameters,
    **({'frozen parameters': frozen} if frozen else {}),
    'inner state': inner_state,
    'batch, and code of the step': batch + step.generated_code_size_in_bytes,
    'gradients, activations: XLA temporaries': (
      step.temp_size_in_bytes + fresh
    ),
    # On their way to the host or, with the blend 'rebase', until their update
    # has come.
    f'snapshots, {rounds(ahead)} in flight': exchange['snapshots'],
    # They wait for their boundary, at most as many.
    'fragments of Θ that have arrived': exchange['arrived'],
    # Of the largest snapshot or blend.
    'a blend, while it runs': exchange['exchange_temporaries'],
  }
  return tuple(Memory(what, '', nbytes) for what, nbytes in parts.items())


def exchange_memory(
  programs: Mapping[str, jax.stages.Compiled], ahead: int
) -> dict[str, int]:
  """Returns the bytes on a chip that belong to the exchange, by name."""
  analyses = {
    name: program.memory_analysis()
    for name, program in programs.items()
    if name.partition(' ')[0] in EXCHANGING
  }
  fragment = max(
    analysis.output_size_in_bytes
    for name, analysis in analyses.items()
    if name.startswith('snapshot')
  )
  return {
    'snapshots': ahead * fragment,
    'arrived': ahead * fragment,
    'exchange_temporaries': max(
      analysis.temp_size_in_bytes for analysis in analyses.values()
    ),
  }


def shard_bytes(like) -> int:
  """Returns the bytes of one device's shards of a pytree of abstract arrays."""
  return sum(map(_shard, jax.tree.leaves(like)))


def _shard(leaf) -> int:
  shape = leaf.sharding.shard_shape(leaf.shape)
  return math.prod(shape) * np.dtype(leaf.dtype).itemsize


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
    state_bytes=sum(
      _held(leaf, partition.hosts) for leaf in jax.tree.leaves(state_like)
    ),
    up_bytes=sum(up) / len(up),
    down_bytes=sum(down) / len(down),
    value_bytes=max(sum(up), sum(down)) / sum(needed),
  )


def _held(leaf, hosts: tuple[int, ...]) -> int:
  """Bytes of the different shards that the first host's devices hold.

  Args:
    hosts: of each device, in the mesh's row-major order.
  """
  sharding = leaf.sharding
  indices = sharding.devices_indices_map(leaf.shape)
  mine = {
    tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape))
    for host, device in zip(hosts, sharding.mesh.devices.flat)
    for index in (indices[device],)
    if host == FIRST
  }
  return len(mine) * _shard(leaf)


# The whole.


@dataclasses.dataclass(frozen=True)
class Estimate:
  """The resources that a learner needs."""

  config: run_config.RunConfig  # The run's configuration.
  topology: Topology  # The slice that it is compiled for.
  compiler: str  # Name of the compiler, in words.
  parameters: int  # Number of the model's parameters.
  chip_memory: tuple[Memory, ...]  # Of one chip.
  share: HostShare  # Share of one host.
  syncer: SyncerMachine
  # FLOPs of a step, by convention; None if not defined.
  flops: StepFlops | None
  xla_flops: float  # FLOPs of a step on one chip, as the compiler counts.

  @property
  def chip_bytes(self) -> float:
    return sum(each.nbytes for each in self.chip_memory)

  @property
  def fits(self) -> bool:
    return self.chip_bytes <= self.topology.chip.hbm_bytes


def slice_of(setup: Setup, topology: str | None) -> Topology:
  """Returns the slice, or the GPUs, of one slice of a kind of learner.

  Args:
    topology: name of that of learners which have none of their own; it says
      which GPU `accelerator=gpu` is, too, else that is an H100.

  Raises:
    ConfigError: there is no such slice, or the mesh does not use all of it.
  """
  own, mesh = setup.machines, run_config.with_slices(setup.config, 1).mesh
  flag = '--topology'
  slice_ = topology and hardware.topology(
    topology, flag, known=hardware.PLANNED
  )
  if name := own.get('accelerator'):
    flag = '--accelerator'
    if name == CPU:
      raise ConfigError(
        f'{flag}={name}: the memory and speed of CPUs are not known'
      )
    if name == GPU:
      chip = slice_.chip if slice_ and slice_.is_gpus else hardware.H100
      slice_ = hardware.gpus(chip, 0)
    else:
      slice_ = hardware.topology(name, flag, (GPU,))
  if not slice_:
    raise ConfigError(f'{flag}: is missing, such as {flag}=v5p-256')
  if slice_.is_gpus:
    slice_ = hardware.gpus(
      slice_.chip,
      own.get('gpus_per_host', slice_.chips_per_host),
      own.get('hosts') or slice_.hosts,
    )
  elif own.get('hosts', 0) not in (0, slice_.hosts) or 'gpus_per_host' in own:
    raise ConfigError(
      f'hosts, gpus_per_host: a slice {slice_.name} has {slice_.hosts} hosts '
      'and no GPUs'
    )
  hardware.check_fits(slice_, mesh.devices, mesh.product, flag)
  return slice_


def of_config(
  config: run_config.RunConfig,
  topology: Topology,
  compiler: str = '',
  chips_max: int = 0,
) -> Estimate:
  """Estimates a learner for a slice that need not be here.

  Call it before jax has opened a device. The text of the run is not read.

  Args:
    chips_max: as of `described`.

  Raises:
    NoCompiler: the requested compiler is not available here.
    DoesNotFit: the learner does not fit on a chip.
  """
  flops, run_spec = None, make_run_spec(config, reads_text=False)
  target = described(topology, compiler, chips_max)
  try:
    programs = LearnerPrograms(run_spec, target.devices)
  except jax.errors.JaxRuntimeError as error:
    if OUT_OF_MEMORY not in str(error):
      raise
    raise DoesNotFit(str(error).partition('\n')[0]) from error
  partition = programs.partition
  if not target.is_target:  # Forced devices are all of one process.
    hosts = tuple(i // topology.chips_per_host for i in range(topology.chips))
    partition = dataclasses.replace(partition, hosts=hosts)
  if model := sizes_of(config.model):
    flops = step_flops(model, config.data.batch, config.data.seq_len)
  return Estimate(
    config=config,
    topology=topology,
    compiler=target.compiler,
    parameters=run_spec.parameters,
    chip_memory=chip_memory(programs, config.protocol.inflight_max),
    share=host_share(run_spec, partition, programs.state_like),
    syncer=memory.of_layout(config, run_spec.layout),
    flops=flops,
    xla_flops=programs.compiled['step'].cost_analysis().get('flops', 0.0),
  )


# The same as text.


def lines(needs: Estimate, with_syncer: bool = True) -> Iterator[str]:
  """All that is to be said, in lines of 80 columns."""
  model, data, mesh = needs.config.model, needs.config.data, needs.config.mesh
  yield (
    f'{needs.config.name}: {count(needs.parameters)} parameters, '
    f'{model.kind}, {model.dtype}, remat {model.remat}'
  )
  parts = needs.config.inner.accumulate
  yield (
    f'a step of {data.batch} · {data.seq_len} tokens in {parts} '
    f'part{"s" if parts > 1 else ""}; mesh fsdp {mesh.fsdp} · expert '
    f'{mesh.expert} · context {mesh.context} · tensor {mesh.tensor}'
  )
  topology = needs.topology
  yield (
    f'for {topology.name}: {topology.chips} chips of {topology.chip.name} '
    f'({topology.shape}), {topology.chips_per_host} a host'
  )
  yield from _wrapped(f'by {needs.compiler}')
  yield ''
  yield from _chip(needs)
  yield ''
  yield from _hosts(needs)
  if with_syncer:
    learners = needs.config.protocol.learners
    yield f'the syncer, M = {learners}, N = {count(needs.parameters)}'
    yield from memory.machine_lines(needs.syncer)
  yield ''
  yield from _arithmetic(needs)


def _chip(needs: Estimate) -> Iterator[str]:
  held, all_ = needs.chip_memory, needs.chip_bytes
  yield 'memory of a chip'
  yield from memory.lines((*held, Memory('all', '', all_)))
  chip = needs.topology.chip
  fits = 'it fits' if needs.fits else 'IT DOES NOT FIT'
  yield (
    f'  {fits}: {100 * all_ / chip.hbm_bytes:.0f} % of the '
    f'{in_bytes(chip.hbm_bytes)} of a {chip.name}'
  )
  parameters, inner_state = (each.nbytes for each in held[:2])
  yield from memory.lines(
    (
      Memory('more, to give a newcomer the state', '', inner_state),
      Memory('more, if there is room, to save', '', parameters + inner_state),
    )
  )


def _hosts(needs: Estimate) -> Iterator[str]:
  share, protocol = needs.share, needs.config.protocol
  yield (
    f'a host of a learner, of {share.hosts}: N = {count(share.values)}, F = '
    f'{count(share.fragment_values)}, S = {in_bytes(share.state_bytes)}, '
    f'b = {share.value_bytes:.3f}'
  )
  yield from memory.lines(
    memory.of_learner(
      share.values,
      share.fragment_values,
      share.state_bytes,
      share.value_bytes,
      protocol.inflight_max,
    )
  )
  yield (
    f'  a round of it: {in_bytes(share.up_bytes)} up, '
    f'{in_bytes(share.down_bytes)} down; of a learner '
    f'{in_bytes(share.hosts * share.up_bytes)} and '
    f'{in_bytes(share.hosts * share.down_bytes)}'
  )


def _arithmetic(needs: Estimate) -> Iterator[str]:
  flops, chips = needs.flops, needs.config.mesh.devices
  if flops is None:
    yield "FLOPs of a model of one's own are not known by convention"
  else:
    yield (
      f'FLOPs of a step   6ND {flops.products:.3g} (N = '
      f'{count(flops.active)} that a token is multiplied'
    )
    yield (
      f'                  with), attention {flops.attention:.3g}: '
      f'{flops.total:.3g}, of a chip {flops.total / chips:.3g}'
    )
  yield (
    f'                  XLA counts {needs.xla_flops:.3g} of a chip: the '
    'body of a loop once,'
  )
  yield '                  and what remat computes again'
  if flops is not None:
    chip = needs.topology.chip
    step_s = planner.step_seconds(needs.topology, flops.total)
    yield from _wrapped(
      f'MFU               model FLOPs (no remat, no optimizer) over '
      f'{chip.bf16_flops / 1e12:.0f} TFLOP/s in bf16 of a {chip.name}',
      18,
    )
    yield (
      f'                  at {100 * MFU:.0f} %: {count(flops.tokens / step_s)} '
      f'tokens/s of a learner, {step_s:.3g} s a step'
    )


def _wrapped(text: str, indent: int = 3) -> Iterator[str]:
  yield from textwrap.wrap(text, WIDTH, subsequent_indent=' ' * indent)
