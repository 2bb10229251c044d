# SPDX-License-Identifier: Apache-2.0
"""A launch elsewhere as a value: roles, machines, and the flags that ask for
it.

A field that `option` makes is a flag of `launch.main` by its own name.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from diloco.config import hardware, unlike
from diloco.config.hardware import TOPOLOGIES, Topology
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.config.unlike import Setup
from diloco.metrics.workdir import Workdir, learner_name
from diloco.sizing import memory
from diloco.transport import planes
from launch import program, variables
from launch.program import (
  AGENT,
  EVALUATOR,
  LEARNER,
  RENDEZVOUS,
  SHARD,
  SYNCER,
  Task,
)

CPU = 'cpu'
GPU = 'gpu'
SPOT = 'spot'
ON_DEMAND = 'on_demand'
RESERVATION = 'reservation'
CAPACITIES = (SPOT, ON_DEMAND, RESERVATION)
# Where containers find the configuration and the files of --secret.
CONFIG_FOLDER = '/etc/diloco/config'
SECRET_FOLDER = '/etc/diloco/secret'

# From the end of a learner's notice to the end of its process.
LEAVE_S = 5

# RFC 1123 allows 63 characters; '-learner-NNN-slice-0' is added, and a pod's
# own suffix behind that.
NAME_CHARACTERS_MAX = 32
_NAME = re.compile(r'[a-z]([-a-z0-9]*[a-z0-9])?')
# With several slices '-learner-NNN-rendezvous-slice-0' is.
SLICED_NAME_CHARACTERS_MAX = 24
COORDINATOR_PORT = 8476  # Of a learner's first host; also JAX's own choice.
RENDEZVOUS_PORT = 8500  # Of learner 0; the others have the next ones.
# The syncer's CPUs, GiB of memory and of disk, for a model whose size only jax
# could tell.
UNPLANNED = 4, 16, 50
# The same of a rendezvous, whose JAX service is a process of its own.
RENDEZVOUS_PLACE = 1, 2, 20


@dataclasses.dataclass(frozen=True)
class Accelerator:
  """The machines of one learner."""

  name: str
  hosts: int
  chips_per_host: int
  slice: Topology | None = None  # None: no TPU.

  @property
  def is_tpu(self) -> bool:
    return self.slice is not None

  @property
  def platform(self) -> str:
    """Returns a key of `variables.OVERLAP`; '' with one chip, or none."""
    if self.hosts * self.chips_per_host < 2:
      return ''
    return variables.TPU if self.is_tpu else variables.GPU


TPUS = {
  name: Accelerator(name, each.hosts, each.chips_per_host, each)
  for name, each in TOPOLOGIES.items()
}
NAMES = (CPU, GPU, *TPUS)


def accelerator(
  name: str, gpus_per_host: int = 0, hosts: int = 0, slices: int = 1
) -> Accelerator:
  """Returns the machines of one learner, or of each of its slices.

  Args:
    hosts: hosts of CPU or GPU, in all slices; a slice of TPUs has a fixed
      number. 0: not given.

  Raises:
    ConfigError: no such accelerator, GPUs without their number, a slice with
      another number of hosts, or hosts that slices do not share evenly.
  """
  asked, hosts = hosts, hosts // slices
  if asked % slices:
    raise ConfigError(
      [
        f'--hosts={asked}: the {slices} slices of a learner '
        '(config.mesh.slices) do not share them evenly'
      ]
    )
  if name == CPU:
    return Accelerator(CPU, hosts or 1, chips_per_host=0)
  if name == GPU:
    if gpus_per_host < 1:
      raise ConfigError(
        [f'--gpus_per_host={gpus_per_host}: a learner on GPUs needs one']
      )
    return Accelerator(GPU, hosts or 1, gpus_per_host)
  chosen = TPUS[hardware.topology(name, '--accelerator', (CPU, GPU)).name]
  if hosts not in (0, chosen.hosts):
    raise ConfigError([f'--hosts={asked}: a slice {name} has {chosen.hosts}'])
  return chosen


@dataclasses.dataclass(frozen=True)
class Resources:
  """The machines of one role."""

  accelerator: Accelerator
  cpus: int  # Per host; 0: what the machine has.
  memory_gib: int  # Per host; 0: what the machine has.
  capacity: str = ON_DEMAND  # One of CAPACITIES.
  reservation: str = ''  # Its name, for RESERVATION.
  disk_gib: int = 0  # Of the volume or disk that holds the workdir; 0: none.
  sbatch: tuple[str, ...] = ()  # For sbatch, besides those of the launch.


# What a back end is like: options are for those of a trait alone.
CONTAINERS = 'containers'  # Processes run in an image.
SIZED = 'sized'  # Machines are asked for by their CPUs and memory.


def option(
  default: Any, text: str, trait: str = '', choices: Sequence[str] = ()
):
  """Returns a field of a dataclass that is a flag.

  Args:
    default: None: no number; (): any number of texts.
    trait: of the back ends that take it; empty: all do.
  """
  about = {'help': text, 'trait': trait, 'choices': choices}
  return dataclasses.field(default=default, metadata=about)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions:
  """The options of the command line besides the configuration."""

  run_name: str = option(
    '', "Name of the run on the back end; default: the config's."
  )
  learners_at_first: int | None = option(
    None, "Learners that start with the syncer; default: the config's."
  )
  accelerator: str = option(
    CPU, f'Accelerator of each learner: {", ".join(NAMES)}.'
  )
  gpus_per_host: int = option(
    0, 'GPUs of each host, with --accelerator=gpu.', SIZED
  )
  capacity: str = option(
    ON_DEMAND,
    'Kind of capacity that the learners run on.',
    CONTAINERS,
    CAPACITIES,
  )
  reservation: str = option(
    '', 'Name of the reservation, with --capacity=reservation.', CONTAINERS
  )
  learner_cpus: int = option(
    0, "CPUs of each learner's host; 0: no request.", SIZED
  )
  learner_memory_gib: int = option(
    0, "Memory of a learner's host; 0: no request.", SIZED
  )
  syncer_cpus: int = option(
    0, "CPUs of the syncer's host; 0: as diloco.plan says."
  )
  syncer_memory_gib: int = option(
    0, "Memory of the syncer's host; 0: likewise."
  )
  storage_gib: int = option(
    0, "Size of the syncer's volume or disk; 0: likewise.", CONTAINERS
  )
  port: int = option(7777, 'Port that the syncer listens on.')
  restarts_max: int = option(
    1000, 'Restarts of each role before it is given up.'
  )
  notice_s: int = option(25, 'Seconds from SIGTERM in which a learner leaves.')
  image: str = option(
    '', 'Container image with this repository as working directory.', CONTAINERS
  )
  secret: str = option(
    '',
    f'Secret whose files are mounted at {SECRET_FOLDER}; {{role}} in it '
    "becomes 'syncer', 'learner-0', …",
    CONTAINERS,
  )
  workdir: str = option('', 'Folder of the run, on the machines that run it.')
  hosts: int = option(
    0, "Hosts of each learner, in all slices; 0: the accelerator's."
  )
  metrics_port: int = option(
    0,
    'First of the ports at which roles serve /metrics and /status to all that '
    'reach them; 0: nowhere.',
  )
  env: tuple[str, ...] = option(
    (), 'NAME=VALUE for all processes, or ROLE:NAME=VALUE, as learner:X=1.'
  )
  python: str = 'python'  # There.
  secret_files: tuple[str, ...] = ()  # Names of the files of `secret`.
  knows_peers: bool = False  # TLS or a token.
  has_token: bool = False
  insecure: bool = False
  transfer_fenced: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec(JobOptions):
  """One run: a syncer, its learners, and the options that all share."""

  name: str  # Of the run, as RFC 1123 has it; part of every name.
  syncer: Task
  shards: tuple[Task, ...]  # Of the syncer, besides the one that leads.
  learners: tuple[Task, ...]  # All that may ever join, by id.
  # Beside the syncer, on its machine; None: config.run.eval_every_rounds is 0.
  evaluator: Task | None
  environment: tuple[tuple[str, str], ...]
  config_name: str  # File name of the configuration.
  config_text: str  # What is in that file.

  @property
  def grace_s(self) -> int:
    """Seconds from SIGTERM to SIGKILL."""
    return self.notice_s + LEAVE_S

  @property
  def first_learners(self) -> tuple[Task, ...]:
    """The processes that are started with the syncer."""
    return self.learners[: self.learners_at_first]

  def role_name(self, role: Task) -> str:
    """Returns a name like 'run-learner-0', unique in a namespace or project."""
    return f'{self.name}-{role.name}'

  def metrics_port_of(self, role: Task) -> int:
    """Returns the port at which a role serves /metrics; 0: at none."""
    first, shards = self.metrics_port, 1 + len(self.shards)
    if role.kind == RENDEZVOUS:
      return 0
    return first and program.metrics_port(first, role, shards)

  def variables(self, role: Task) -> variables.Variables:
    """Returns the environment of a role's processes."""
    return variables.joined((*self.environment, *role.environment))

  def secret_of(self, role: Task) -> str:
    name = role.name if role.learner is None else learner_name(role.learner)
    return self.secret.replace('{role}', name)

  def slices_of(self, learner: Task) -> tuple[Task, ...]:
    """Returns what is started of a learner on accelerators: itself, or each of
    its slices.
    """
    if learner.slices == 1:
      return (learner,)
    hosts = learner.resources.accelerator.hosts
    joined = ('--megascale',) * learner.resources.accelerator.is_tpu
    return tuple(
      dataclasses.replace(
        learner,
        name=f'{learner.name}-slice-{i}',
        arguments=(
          AGENT,
          *learner.arguments,
          f'--slice={i}',
          f'--slice_hosts={hosts}',
          *joined,
        ),
        slice=i,
      )
      for i in range(learner.slices)
    )

  def rendezvous_of(self, role: Task) -> tuple[Task, ...]:
    """Returns the rendezvous of a learner of several slices, or of a slice of
    one; else nothing.
    """
    if role.slices == 1:
      return ()
    learner = self.learners[role.learner]
    notice = f'--notice_s={self.notice_s}'
    fixed = [word for word in learner.arguments if word != notice]
    hosts = learner.resources.accelerator.hosts
    cpus, memory_gib, disk = RENDEZVOUS_PLACE
    return (
      dataclasses.replace(
        learner,
        name=f'{learner.name}-{RENDEZVOUS}',
        kind=RENDEZVOUS,
        arguments=(RENDEZVOUS, *fixed, f'--slice_hosts={hosts}'),
        resources=Resources(accelerator(CPU), cpus, memory_gib, disk_gib=disk),
        environment=variables.of_kind(self.env, RENDEZVOUS),
        slices=1,
      ),
    )

  def rendezvous_port(self, role: Task) -> int:
    """Returns the port at which the rendezvous of a learner listens."""
    return RENDEZVOUS_PORT + role.learner


def launch(
  config: RunConfig,
  config_arguments: Sequence[str],
  config_file: tuple[str, str],
  access: Sequence[str],
  log: Sequence[str],
  asked: JobOptions,
) -> JobSpec:
  """Describes the launch of one syncer and its learners.

  Args:
    config_arguments: the flags that give a process this configuration.
    config_file: its name, and what is in it.
    access: the flags for authentication.
    log: those on how a process logs.

  Raises:
    ConfigError: the run is impossible like that; lists all problems.
  """
  name = asked.run_name or config.name
  problems, learner_places = [*_problems(config, asked, name)], {}

  def placed(setup: Setup) -> tuple[Resources, tuple[str, ...], int]:
    own = (*setup.arguments, f'--notice_s={asked.notice_s}')
    return _learner_place(setup, asked), own, setup.config.mesh.slices

  try:
    for ids, _, each in unlike.for_each_kind(
      config, config.data.shards, placed
    ):
      learner_places |= dict.fromkeys(ids, each)
  except ConfigError as error:
    problems += error.problems
  if problems:
    raise ConfigError(problems)
  try:
    planned = memory.of_config(config)
  except ValueError as error:  # No such cut, or no codec of that name.
    raise ConfigError([str(error)]) from None
  cpus, memory_gib, disk_gib = UNPLANNED
  if planned:
    cpus, memory_gib = planned.cpus, planned.memory_gib
    disk_gib = planned.disk_gib
  syncer_place = Resources(
    accelerator(CPU),
    asked.syncer_cpus or cpus,
    asked.syncer_memory_gib or memory_gib,
    disk_gib=asked.storage_gib or disk_gib,
  )
  by_kind = {kind: [] for kind in program.KINDS}
  shared = (*config_arguments, f'--workdir={asked.workdir}')
  for role in program.tasks(config, shared, access, log, config.data.shards):
    place, own, slices = learner_places.get(role.learner, (syncer_place, (), 1))
    own_variables = variables.of_kind(asked.env, role.kind)
    if role.kind == LEARNER and (platform := place.accelerator.platform):
      own_variables = variables.on(platform, own_variables)
    by_kind[role.kind].append(
      dataclasses.replace(
        role,
        arguments=(*role.arguments, *own),
        resources=place,
        environment=own_variables,
        slices=slices,
      )
    )
  at_first = asked.learners_at_first
  options = {
    **vars(asked),
    'learners_at_first': at_first or config.protocol.learners,
  }
  return JobSpec(
    **options,
    name=name,
    syncer=by_kind[SYNCER][0],
    shards=tuple(by_kind[SHARD]),
    evaluator=next(iter(by_kind[EVALUATOR]), None),
    learners=tuple(by_kind[LEARNER]),
    environment=program.environment(
      config, Workdir(pathlib.Path(asked.workdir)).compiled
    ),
    config_name=config_file[0],
    config_text=config_file[1],
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


def _learner_place(setup: Setup, asked: JobOptions) -> Resources:
  """Returns the machines of one kind of learner.

  Raises:
    ConfigError: they are impossible, or do not suit its mesh.
  """
  own = setup.machines
  sbatch = own.pop('sbatch', '').split()
  # Other machines have their own number of hosts, and their own reservation.
  if 'accelerator' in own:
    own = {'hosts': 0, 'gpus_per_host': 0} | own
  if 'capacity' in own:
    own = {'reservation': ''} | own
  asked = dataclasses.replace(asked, **own)
  slices = setup.config.mesh.slices
  chosen = accelerator(
    asked.accelerator, asked.gpus_per_host, asked.hosts, slices
  )
  if problems := [*_place_problems(setup.config, asked, chosen)]:
    raise ConfigError(problems)
  return Resources(
    chosen,
    asked.learner_cpus,
    asked.learner_memory_gib,
    asked.capacity,
    asked.reservation,
    sbatch=tuple(sbatch),
  )


def _problems(config: RunConfig, asked: JobOptions, name: str) -> Iterator[str]:
  """Yields why a launch is impossible as it is asked for."""
  if not _NAME.fullmatch(name) or len(name) > NAME_CHARACTERS_MAX:
    yield (
      f'--run_name={name}: must be a name of RFC 1123: at most '
      f'{NAME_CHARACTERS_MAX} of a-z, 0-9 and -, a letter first, no - last'
    )
  if (
    config.mesh.slices > 1
    and SLICED_NAME_CHARACTERS_MAX < len(name) <= NAME_CHARACTERS_MAX
  ):
    yield (
      f'--run_name={name}: must have at most {SLICED_NAME_CHARACTERS_MAX} '
      f'characters, with config.mesh.slices={config.mesh.slices}'
    )
  if not asked.workdir.startswith('/'):
    yield f'--workdir={asked.workdir}: must be absolute, on other machines'
  if not 0 < asked.port < 65536:
    yield f'--port={asked.port}: must be in 1 … 65535'
  yield from variables.problems(asked.env, program.KINDS)
  sizes = 'syncer_cpus', 'syncer_memory_gib', 'storage_gib'
  for field in ('restarts_max', *sizes):
    if getattr(asked, field) < 0:
      yield f'--{field}={getattr(asked, field)}: must not be negative'
  at_first, ids = asked.learners_at_first, config.data.shards
  if at_first is not None and not 0 < at_first <= ids:
    yield (
      f'--learners_at_first={at_first}: must be in 1 … {ids} '
      '(config.data.shards)'
    )
  if asked.notice_s < 1:
    yield f'--notice_s={asked.notice_s}: must be a second at least'
  # Each role has one: syncer, evaluator, other shards, learners.
  largest = 65535 - config.syncer.shards - ids
  if not 0 <= asked.metrics_port <= largest:
    yield (
      f'--metrics_port={asked.metrics_port}: each role has a port of its own '
      f'from there on; must be in 0 … {largest}'
    )
  if not asked.insecure:
    yield from _open_doors(config, asked)


def _place_problems(
  config: RunConfig, asked: JobOptions, chosen: Accelerator
) -> Iterator[str]:
  """Yields why the machines of a learner can not be."""
  if asked.hosts < 0:
    yield f'--hosts={asked.hosts}: must not be negative'
  if asked.capacity not in CAPACITIES:
    yield f'--capacity={asked.capacity}: must be one of {", ".join(CAPACITIES)}'
  if (asked.capacity == RESERVATION) != bool(asked.reservation):
    yield (
      f'--capacity={asked.capacity}, --reservation={asked.reservation}: a '
      'reservation needs its name, and the others have none'
    )
  # JAX has one device for a chip, and one for all CPU cores.
  devices = chosen.hosts * max(chosen.chips_per_host, 1)
  slices, owner = config.mesh.slices, 'a learner'
  if slices > 1:
    owner = f'each of {slices} slices (config.mesh.slices)'
  if config.mesh.slice_devices != devices:
    yield (
      f'--accelerator={chosen.name}: {owner} has {devices} devices there, '
      f'and config.mesh asks for {config.mesh.slice_devices}; such as '
      f'--config.mesh.fsdp={devices}'
    )
  hosts = chosen.hosts * slices
  several = f'--accelerator={chosen.name}: the {hosts} hosts of a learner'
  if asked.insecure or hosts == 1:
    return
  if not asked.has_token:
    yield (
      f'{several} know each other by the token; give --token_file, or on a '
      'private network --insecure'
    )
  if not asked.transfer_fenced:
    yield (
      f'{several} are joined by jax.distributed, which accepts every '
      'connection to its ports; give --transfer_fenced behind a firewall'
    )


def _open_doors(config: RunConfig, asked: JobOptions) -> Iterator[str]:
  """Yields what the processes would refuse later on their own machines."""
  if not asked.knows_peers:
    yield (
      'other machines could connect without proving who they are; give '
      '--tls_ca, --tls_cert and --tls_key, or --token_file, or on a private '
      'network --insecure'
    )
  plane = config.transport.data_plane
  if not (planes.PLANES[plane].guarded or asked.transfer_fenced):
    yield (
      f'config.transport.data_plane={plane}: accepts every connection to its '
      'ports; give --transfer_fenced behind a firewall, or '
      f'--config.transport.data_plane={" or ".join(planes.GUARDED)}'
    )
