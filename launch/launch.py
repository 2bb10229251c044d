# SPDX-License-Identifier: Apache-2.0
"""A launch as a value: what runs where, before any back end renders it."""

import dataclasses
import pathlib
import re
from collections.abc import Sequence

from diloco.config import RunConfig
from diloco.config_values import ConfigError
from diloco.metrics.workdir import Workdir, learner_name
from launch.accelerators import CPU, Accelerator, accelerator
from launch.program import SYNCER, environment

LEARNER = 'learner'
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


@dataclasses.dataclass(frozen=True)
class Resources:
  """What one role runs on."""

  accelerator: Accelerator
  cpus: int  # Per host; 0: what the machine has.
  memory_gib: int  # Per host; 0: what the machine has.
  capacity: str = ON_DEMAND  # One of CAPACITIES.
  reservation: str = ''  # Its name, for RESERVATION.


@dataclasses.dataclass(frozen=True)
class Placed:
  """One role of the run, its command without addresses, and its place."""

  name: str  # 'syncer' or 'learner-0'.
  kind: str  # SYNCER or LEARNER.
  module: str
  arguments: tuple[str, ...]
  resources: Resources
  learner: int | None = None  # Its id.


@dataclasses.dataclass(frozen=True)
class Launch:
  """One run: a syncer, its learners, and what all of them share."""

  name: str  # Of the run, as RFC 1123 has it; part of every name.
  syncer: Placed
  learners: tuple[Placed, ...]  # All that may ever join, by id.
  at_first: int  # So many of them are started with the syncer.
  workdir: str  # On the machines that run it.
  port: int  # Of the syncer.
  restarts_max: int  # Of each role.
  notice_s: int  # From SIGTERM, within which a learner leaves.
  environment: tuple[tuple[str, str], ...]
  config_name: str  # File name of the configuration.
  config_text: str  # What is in that file.
  python: str = 'python'  # There.
  image: str = ''  # Container; empty where the back end needs none.
  secret: str = ''  # Of TLS files and token; '{role}' is the role's name.
  secret_files: tuple[str, ...] = ()  # Their names.

  @property
  def grace_s(self) -> int:
    """From SIGTERM to SIGKILL."""
    return self.notice_s + LEAVE_S

  @property
  def first_learners(self) -> tuple[Placed, ...]:
    return self.learners[: self.at_first]

  def role_name(self, role: Placed) -> str:
    """'run-learner-0': unique in a namespace, a project, a queue."""
    return f'{self.name}-{role.name}'

  def secret_of(self, role: Placed) -> str:
    return self.secret.replace('{role}', role.name)


@dataclasses.dataclass(frozen=True)
class Asked:
  """What the command line says besides the configuration."""

  workdir: str
  run_name: str = ''  # Default: the configuration's.
  at_first: int | None = None  # Default: config.protocol.learners.
  accelerator: str = CPU
  gpus_per_host: int = 0
  hosts: int = 0  # Of each learner; 0: as many as the accelerator has.
  capacity: str = ON_DEMAND
  reservation: str = ''
  learner_cpus: int = 0
  learner_memory_gib: int = 0
  syncer_cpus: int = 4
  syncer_memory_gib: int = 16
  port: int = 7777
  restarts_max: int = 1000
  notice_s: int = 25
  python: str = 'python'
  image: str = ''
  secret: str = ''
  secret_files: tuple[str, ...] = ()
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
  asked: Asked,
) -> Launch:
  """One syncer and its learners.

  Args:
    config: the run.
    config_arguments: the flags that give a process this configuration.
    config_name: of its file, without the folder.
    config_text: of that file.
    peer_arguments: the flags by which the processes know each other, and
      those of how they log.
    asked: the rest of the command line.

  Raises:
    ConfigError: it could not run like that; all problems at once.
  """
  name = asked.run_name or config.name
  learners_max = config.data.shards  # Each has a shard of its own.
  chosen = accelerator(asked.accelerator, asked.gpus_per_host, asked.hosts)
  if problems := [
    *_wrong_name(name),
    *_wrong_numbers(asked, learners_max),
    *_wrong_capacity(asked),
    *_wrong_mesh(config, chosen),
    *_wrong_syncer(config),
    *_wrong_access(config, asked),
    *_wrong_hosts(chosen, asked),
  ]:
    raise ConfigError(problems)
  shared = (*config_arguments, f'--workdir={asked.workdir}', *peer_arguments)
  syncer = Placed(
    SYNCER,
    SYNCER,
    'diloco.syncer',
    shared,
    Resources(accelerator(CPU), asked.syncer_cpus, asked.syncer_memory_gib),
  )
  parts = Launch(
    name=name,
    syncer=syncer,
    learners=(),
    at_first=(
      config.protocol.learners if asked.at_first is None else asked.at_first
    ),
    workdir=asked.workdir,
    port=asked.port,
    restarts_max=asked.restarts_max,
    notice_s=asked.notice_s,
    environment=environment(
      config, Workdir(pathlib.Path(asked.workdir)).compiled
    ),
    config_name=config_name,
    config_text=config_text,
    python=asked.python,
    image=asked.image,
    secret=asked.secret,
    secret_files=asked.secret_files,
  )
  place = Resources(
    chosen,
    asked.learner_cpus,
    asked.learner_memory_gib,
    asked.capacity,
    asked.reservation,
  )
  learners = tuple(
    Placed(
      learner_name(i),
      LEARNER,
      'diloco.learner',
      (*shared, f'--learner={i}', f'--notice_s={asked.notice_s}'),
      place,
      i,
    )
    for i in range(learners_max)
  )
  return dataclasses.replace(parts, learners=learners)


def only(whole: Launch, learner: int) -> Placed:
  """One learner of a launch.

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


def _wrong_numbers(asked: Asked, learners_max: int):
  if not asked.workdir.startswith('/'):
    yield f'--workdir={asked.workdir}: must be absolute, on other machines'
  if not 0 < asked.port < 65536:
    yield f'--port={asked.port}: must be in 1 … 65535'
  for name in ('restarts_max', 'syncer_cpus', 'syncer_memory_gib'):
    if getattr(asked, name) < 0:
      yield f'--{name}={getattr(asked, name)}: must not be negative'
  if asked.at_first is not None and not 0 < asked.at_first <= learners_max:
    yield (
      f'--learners_at_first={asked.at_first}: must be in 1 … {learners_max} '
      '(config.data.shards)'
    )
  if asked.notice_s < 1:
    yield f'--notice_s={asked.notice_s}: must be a second at least'


def _wrong_capacity(asked: Asked):
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


def _wrong_syncer(config: RunConfig):
  shards = config.syncer.shards
  if shards > 1:
    yield (
      f'config.syncer.shards={shards}: on other machines the syncer is one '
      'process; give 1, or --to=local'
    )


def _wrong_access(config: RunConfig, asked: Asked):
  """What the processes would refuse on their own machines, told here."""
  if not (asked.knows_peers or asked.insecure):
    yield (
      'other machines could connect, and nobody asks who they are; give '
      '--tls_ca, --tls_cert and --tls_key, or --token_file, or on a private '
      'network --insecure'
    )
  plane = config.transport.data_plane
  if plane != 'grpc' and not (asked.transfer_fenced or asked.insecure):
    yield (
      f'config.transport.data_plane={plane}: lets everybody in who reaches its '
      'ports; give --transfer_fenced behind a firewall, or '
      '--config.transport.data_plane=grpc'
    )


def _wrong_hosts(chosen: Accelerator, asked: Asked):
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
      'are joined by jax.distributed, which lets everybody in who reaches its '
      'ports; give --transfer_fenced behind a firewall'
    )
