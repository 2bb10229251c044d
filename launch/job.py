# SPDX-License-Identifier: Apache-2.0
"""A launch as a value: roles, accelerators, command lines with addresses."""

import dataclasses
import difflib
import pathlib
import re
from collections.abc import Sequence

from diloco.config import hardware
from diloco.config.hardware import TOPOLOGIES, V5E, V5P, V6E, Topology
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import (
  EVALUATOR,
  Workdir,
  learner_name,
  shard_name,
)
from diloco.transport import planes
from launch import syncer_sizes
from launch.program import SYNCER, environment

CPU = 'cpu'
GPU = 'gpu'
LEARNER = 'learner'
SHARD = 'shard'  # Of the syncer, beside the one that leads.
SPOT = 'spot'
ON_DEMAND = 'on_demand'
RESERVATION = 'reservation'
CAPACITIES = (SPOT, ON_DEMAND, RESERVATION)

# From the end of a learner's notice to the end of its process.
LEAVE_S = 5

# RFC 1123 allows 63 characters; '-learner-NNN-slice-0' is added, and a pod's
# own suffix behind that.
NAME_CHARACTERS_MAX = 32
_NAME = re.compile(r'[a-z]([-a-z0-9]*[a-z0-9])?')
LOG_JSON = '--log_json'  # The evaluator's only flag of those for peers.
COORDINATOR_PORT = 8476  # Of a learner's first host; also JAX's own choice.


# What a learner can run on, and what each is called by GKE and on a VM.
#
# Chips and hosts of TPU slices stand in `diloco/config/hardware.py`.


@dataclasses.dataclass(frozen=True)
class Accelerator:
  """The machines of one learner; the last three are empty for CPU and GPU."""

  name: str
  hosts: int
  chips_per_host: int
  topology: str = ''  # As GKE writes it.
  gke_label: str = ''  # Of the node pool.
  runtime_version: str = ''  # Of a TPU VM.

  @property
  def is_tpu(self) -> bool:
    return bool(self.topology)


# GKE label, runtime version.
_FAMILIES = {
  V5E: ('tpu-v5-lite-podslice', 'v2-alpha-tpuv5-lite'),
  V5P: ('tpu-v5p-slice', 'v2-alpha-tpuv5'),
  V6E: ('tpu-v6e-slice', 'v2-alpha-tpuv6e'),
}


def _tpu(of: Topology) -> Accelerator:
  sizes = of.hosts, of.chips_per_host, of.shape
  return Accelerator(of.name, *sizes, *_FAMILIES[of.chip])


TPUS = {name: _tpu(each) for name, each in TOPOLOGIES.items()}
NAMES = (CPU, GPU, *TPUS)


def accelerator(
  name: str, gpus_per_host: int = 0, hosts: int = 0
) -> Accelerator:
  """Returns the machines of one learner.

  Args:
    hosts: hosts of CPU or GPU; a slice has a fixed number. 0: not given.

  Raises:
    ConfigError: no such accelerator, GPUs without their number, or a slice with
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
  found = hardware.canonical(name)
  if found not in TPUS:
    near = difflib.get_close_matches(found, NAMES, 1)
    hint = f'did you mean {near[0]}? ' if near else ''
    raise ConfigError(
      [f'--accelerator={name}: unknown; {hint}known are {", ".join(NAMES)}']
    )
  if hosts not in (0, TPUS[found].hosts):
    raise ConfigError(
      [f'--hosts={hosts}: a slice {name} has {TPUS[found].hosts}']
    )
  return TPUS[found]


@dataclasses.dataclass(frozen=True)
class Resources:
  """The machines of one role."""

  accelerator: Accelerator
  cpus: int  # Per host; 0: what the machine has.
  memory_gib: int  # Per host; 0: what the machine has.
  capacity: str = ON_DEMAND  # One of CAPACITIES.
  reservation: str = ''  # Its name, for RESERVATION.
  disk_gib: int = 0  # Of the volume or disk that holds the workdir; 0: none.


@dataclasses.dataclass(frozen=True)
class Task:
  """One role of the run: its command without addresses, and its machines."""

  name: str  # 'syncer', 'shard-1' or 'learner-0'.
  kind: str  # SYNCER, SHARD, LEARNER or EVALUATOR.
  module: str
  arguments: tuple[str, ...]
  resources: Resources
  learner: int | None = None  # Its id.


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSettings:
  """The options of the command line that all roles of a run share."""

  workdir: str  # On the machines that run it.
  port: int = 7777  # Of the syncer.
  restarts_max: int = 1000  # Of each role.
  notice_s: int = 25  # From SIGTERM, within which a learner leaves.
  python: str = 'python'  # There.
  image: str = ''  # Container; empty where the back end needs none.
  secret: str = ''  # Of TLS files and token; '{role}' is the role's name.
  secret_files: tuple[str, ...] = ()  # Their names.
  # A bucket to which all roles copy what they leave; empty: none.
  results_bucket: str = ''
  # First of the ports at which processes serve /metrics; 0: nowhere.
  metrics_port: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec(JobSettings):
  """One run: a syncer, its learners, and their common settings."""

  name: str  # Of the run, as RFC 1123 has it; part of every name.
  syncer: Task
  learners: tuple[Task, ...]  # All that may ever join, by id.
  at_first: int  # So many of them are started with the syncer.
  environment: tuple[tuple[str, str], ...]
  config_name: str  # File name of the configuration.
  config_text: str  # What is in that file.
  shards: tuple[Task, ...] = ()  # Of the syncer, besides the one that leads.
  # Beside the syncer, on its machine; None: config.run.eval_every_rounds is 0.
  evaluator: Task | None = None

  @property
  def grace_s(self) -> int:
    """Seconds from SIGTERM to SIGKILL."""
    return self.notice_s + LEAVE_S

  @property
  def first_learners(self) -> tuple[Task, ...]:
    return self.learners[: self.at_first]

  def role_name(self, role: Task) -> str:
    """Returns a name such as 'run-learner-0', unique in a namespace or
    project.
    """
    return f'{self.name}-{role.name}'

  def metrics_port_of(self, role: Task) -> int:
    """Returns the port at which a role serves /metrics.

    Each role has its own, as several may share a machine: first the syncer,
    then the evaluator, the shards, the learners.
    """
    known = (SYNCER, EVALUATOR, *(each.name for each in self.shards))
    if role.kind == LEARNER:
      return self.metrics_port + len(known) + role.learner
    return self.metrics_port + known.index(role.name)

  def secret_of(self, role: Task) -> str:
    return self.secret.replace('{role}', role.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions(JobSettings):
  """The options of the command line besides the configuration."""

  run_name: str = ''  # Default: the configuration's.
  at_first: int | None = None  # Default: config.protocol.learners.
  accelerator: str = CPU
  gpus_per_host: int = 0
  hosts: int = 0  # Of each learner; 0: as many as the accelerator has.
  capacity: str = ON_DEMAND
  reservation: str = ''
  learner_cpus: int = 0
  learner_memory_gib: int = 0
  syncer_cpus: int = 0  # 0, also of the next two: as the planner says.
  syncer_memory_gib: int = 0
  storage_gib: int = 0
  knows_peers: bool = False  # TLS or a token.
  has_token: bool = False
  insecure: bool = False
  transfer_fenced: bool = False


def launch(
  config: RunConfig,
  config_arguments: Sequence[str],
  config_name: str,
  config_text: str,
  peer_arguments: Sequence[str],
  asked: JobOptions,
) -> JobSpec:
  """Describes the launch of one syncer and its learners.

  Args:
    config_arguments: the flags that give a process this configuration.
    peer_arguments: the flags for authentication, and for logging.

  Raises:
    ConfigError: the run is impossible like that; lists all problems.
  """
  name = asked.run_name or config.name
  learners_max = config.data.shards  # Each has a shard of its own.
  chosen = accelerator(asked.accelerator, asked.gpus_per_host, asked.hosts)
  if problems := [
    *_wrong_name(name),
    *_wrong_numbers(asked, learners_max),
    *_wrong_metrics_port(config, asked),
    *_wrong_capacity(asked),
    *_wrong_mesh(config, chosen),
    *_wrong_access(config, asked),
    *_wrong_hosts(chosen, asked),
  ]:
    raise ConfigError(problems)
  shared = (*config_arguments, f'--workdir={asked.workdir}', *peer_arguments)
  learner_place = Resources(
    chosen,
    asked.learner_cpus,
    asked.learner_memory_gib,
    asked.capacity,
    asked.reservation,
  )
  syncer = Task(
    SYNCER,
    SYNCER,
    'diloco.syncer',
    shared,
    _syncer_place(config, asked),
  )
  return JobSpec(
    name=name,
    syncer=syncer,
    shards=_shards(syncer, config.syncer.shards),
    evaluator=_evaluator(config, peer_arguments, syncer),
    learners=_learners(shared, learner_place, learners_max, asked.notice_s),
    at_first=(
      config.protocol.learners if asked.at_first is None else asked.at_first
    ),
    environment=environment(
      config, Workdir(pathlib.Path(asked.workdir)).compiled
    ),
    config_name=config_name,
    config_text=config_text,
    **{f.name: getattr(asked, f.name) for f in dataclasses.fields(JobSettings)},
  )


def _shards(syncer: Task, count: int) -> tuple[Task, ...]:
  return tuple(
    dataclasses.replace(
      syncer,
      name=shard_name(i),
      kind=SHARD,
      module='diloco.syncer_shard',
      arguments=(*syncer.arguments, f'--shard={i}'),
    )
    for i in range(1, count)
  )


def _syncer_place(config: RunConfig, asked: JobOptions) -> Resources:
  cpus, memory_gib, disk_gib = syncer_sizes.planned(config)
  return Resources(
    accelerator(CPU),
    asked.syncer_cpus or cpus,
    asked.syncer_memory_gib or memory_gib,
    disk_gib=asked.storage_gib or disk_gib,
  )


def _evaluator(
  config: RunConfig, peer_arguments: Sequence[str], syncer: Task
) -> Task | None:
  """The evaluator reads the syncer's folder, and connects to no process."""
  if not config.run.eval_every_rounds:
    return None
  access = {each for each in peer_arguments if each != LOG_JSON}
  mine = [each for each in syncer.arguments if each not in access]
  return dataclasses.replace(
    syncer,
    name=EVALUATOR,
    kind=EVALUATOR,
    module='diloco.evaluator',
    arguments=tuple(mine),
  )


def _learners(
  shared: Sequence[str], place: Resources, count: int, notice_s: float
) -> tuple[Task, ...]:
  return tuple(
    Task(
      learner_name(i),
      LEARNER,
      'diloco.learner',
      (*shared, f'--learner={i}', f'--notice_s={notice_s}'),
      place,
      i,
    )
    for i in range(count)
  )


def only(whole: JobSpec, learner: int) -> Task:
  """Returns one learner of a launch.

  Raises:
    ConfigError: the run has no learner of this id.
  """
  if not 0 <= learner < len(whole.learners):
    raise ConfigError(
      [
        f'--learner={learner}: the run has learners 0 to '
        f'{len(whole.learners) - 1} (config.data.shards)'
      ]
    )
  return whole.learners[learner]


def _wrong_name(name: str):
  if not _NAME.fullmatch(name) or len(name) > NAME_CHARACTERS_MAX:
    yield (
      f'--run_name={name}: must be a name of RFC 1123: at most '
      f'{NAME_CHARACTERS_MAX} of a-z, 0-9 and -, a letter first, no - last'
    )


def _wrong_numbers(asked: JobOptions, learners_max: int):
  if not asked.workdir.startswith('/'):
    yield f'--workdir={asked.workdir}: must be absolute, on other machines'
  if not 0 < asked.port < 65536:
    yield f'--port={asked.port}: must be in 1 … 65535'
  sizes = 'syncer_cpus', 'syncer_memory_gib', 'storage_gib'
  for name in ('restarts_max', *sizes):
    if getattr(asked, name) < 0:
      yield f'--{name}={getattr(asked, name)}: must not be negative'
  if asked.at_first is not None and not 0 < asked.at_first <= learners_max:
    yield (
      f'--learners_at_first={asked.at_first}: must be in 1 … {learners_max} '
      '(config.data.shards)'
    )
  if asked.notice_s < 1:
    yield f'--notice_s={asked.notice_s}: must be a second at least'


def _wrong_metrics_port(config: RunConfig, asked: JobOptions):
  """Each role has a port: syncer, evaluator, other shards, learners."""
  largest = 65535 - config.syncer.shards - config.data.shards
  if asked.metrics_port > largest:
    yield (
      f'--metrics_port={asked.metrics_port}: each role has a port of its own '
      f'from there on; must be at most {largest}'
    )


def _wrong_capacity(asked: JobOptions):
  if (asked.capacity == RESERVATION) != bool(asked.reservation):
    yield (
      f'--capacity={asked.capacity}, --reservation={asked.reservation}: a '
      'reservation needs its name, and the others have none'
    )


def _wrong_mesh(config: RunConfig, chosen: Accelerator):
  """JAX has one device for a chip, and one for all CPU cores."""
  devices = chosen.hosts * max(chosen.chips_per_host, 1)
  if config.mesh.devices != devices:
    yield (
      f'--accelerator={chosen.name}: a learner has {devices} devices there, '
      f'and config.mesh asks for {config.mesh.devices}; such as '
      f'--config.mesh.fsdp={devices}'
    )


def _wrong_access(config: RunConfig, asked: JobOptions):
  """Yields what the processes would refuse later on their own machines."""
  if not (asked.knows_peers or asked.insecure):
    yield (
      'other machines could connect without proving who they are; give '
      '--tls_ca, --tls_cert and --tls_key, or --token_file, or on a private '
      'network --insecure'
    )
  plane = config.transport.data_plane
  if not planes.PLANES[plane].guarded and not (
    asked.transfer_fenced or asked.insecure
  ):
    yield (
      f'config.transport.data_plane={plane}: accepts every connection to its '
      'ports; give --transfer_fenced behind a firewall, or '
      f'--config.transport.data_plane={" or ".join(planes.GUARDED)}'
    )


def _wrong_hosts(chosen: Accelerator, asked: JobOptions):
  """The ports of a learner's own hosts: likewise."""
  if chosen.hosts == 1 or asked.insecure:
    return
  if not asked.has_token:
    yield (
      f'--accelerator={chosen.name}: the {chosen.hosts} hosts of a learner '
      'know each other by the token; give --token_file, or on a private '
      'network --insecure'
    )
  if not asked.transfer_fenced:
    yield (
      f'--accelerator={chosen.name}: the {chosen.hosts} hosts of a learner '
      'are joined by jax.distributed, which accepts every connection to its '
      'ports; give --transfer_fenced behind a firewall'
    )
