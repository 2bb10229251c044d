# SPDX-License-Identifier: Apache-2.0
"""The roles of a run with their command lines, and its processes here."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco.config import run_config, unlike
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import EVALUATOR, Workdir, learner_name, shard_name
from diloco.monitoring import monitor_flags
from diloco.transport import sockets
from launch import variables
from launch.variables import XLA_FLAGS

COMPILED = 'JAX_COMPILATION_CACHE_DIR'
FORCED = '--xla_force_host_platform_device_count'

SYNCER = 'syncer'
SHARD = 'shard'  # Of the syncer, beside the one that leads.
LEARNER = 'learner'
RENDEZVOUS = 'rendezvous'  # Of a learner of several slices.
AGENT = 'agent'  # The command that each host of such a learner runs.
# Becomes the command that its first argument names, installed or not.
COMMANDS = 'diloco'
EVALUATE = 'evaluate'
# From SIGTERM to SIGKILL: what each promises, and some seconds to end in.
SYNCER_LEAVE_S = 65.0  # It may wait for one checkpoint, and write another.
LEARNER_LEAVE_S = 30.0  # Its notice is 25.


@dataclasses.dataclass(frozen=True)
class Kind:
  """The properties that all roles of a kind have in common."""

  module: str
  peer: str = ''  # The flag that says where the syncer is; empty: none.
  leave_s: float = 10.0  # From SIGTERM to SIGKILL.
  ends_run: bool = False  # Once it exits with 0, the others leave.
  optional: bool = False  # The run goes on, and ends, without it.


KINDS = {
  SYNCER: Kind('diloco.syncer', 'bind', SYNCER_LEAVE_S, ends_run=True),
  SHARD: Kind('diloco.syncer_shard', 'leader', SYNCER_LEAVE_S),
  LEARNER: Kind('diloco.learner', 'syncer', LEARNER_LEAVE_S),
  RENDEZVOUS: Kind(COMMANDS, 'bind'),
  # It reads a folder, and connects to no process.
  EVALUATOR: Kind('diloco.evaluator', optional=True),
}


# The roles of a run, wherever they run.


@dataclasses.dataclass(frozen=True)
class Task:
  """One role of a run: its command without addresses, and its machines."""

  name: str  # 'syncer', 'shard-1', 'learner-0' or 'learner-0-slice-1'.
  kind: str  # A key of KINDS.
  arguments: tuple[str, ...]
  learner: int | None = None  # Its id.
  resources: Any = None  # `job.Resources`; None on this machine.
  environment: variables.Variables = ()  # Added to that of all processes.
  slices: int = 1  # Of a learner; the machines are those of one of them.
  slice: int | None = None  # Of several, which one this is.

  @property
  def module(self) -> str:
    return KINDS[self.kind].module if self.slice is None else COMMANDS


def tasks(
  config: RunConfig,
  shared: Sequence[str],
  access: Sequence[str],
  log: Sequence[str],
  learners: int,
) -> list[Task]:
  """Returns the syncer, its other shards, the learners, the evaluator if any.

  Args:
    shared: arguments of every process, such as --config and --workdir.
    access: those for authentication.
    log: those on how it logs.
    learners: so many, by their ids.
  """
  peer = (*shared, *access, *log)
  result = [Task(SYNCER, SYNCER, peer)]
  for i in range(1, config.syncer.shards):
    result.append(Task(shard_name(i), SHARD, (*peer, f'--shard={i}')))
  for i in range(learners):
    own = (*peer, f'--learner={i}')
    result.append(Task(learner_name(i), LEARNER, own, i))
  if config.run.eval_every_rounds:
    result.append(Task(EVALUATOR, EVALUATOR, (*shared, *log)))
  return result


def metrics_port(first: int, role: Task, shards: int, hosts: int = 1) -> int:
  """Returns the port at which a role serves /metrics.

  Each has its own, as several may share a machine: first the syncer, then the
  evaluator, the shards, the learners.

  Args:
    first: the syncer's.
    shards: of the syncer.
    hosts: ports of each learner.
  """
  known = (SYNCER, EVALUATOR, *map(shard_name, range(1, shards)))
  if role.kind == LEARNER:
    return first + len(known) + role.learner * hosts
  return first + known.index(role.name)


# Learners of several hosts: their number, devices and numbering.
#
# The hosts of a learner are one computation of JAX. They meet at a coordinator,
# which the first of them is; only it speaks with the syncer.


def host_flags(hosts: int, host: int | str, coordinator: str) -> list[str]:
  """Returns the flags of one host of a learner; empty if there is only one.

  Args:
    host: its number, from 0, or the shell text that becomes it.
    coordinator: 'host:port' where they meet, or such a text.
  """
  if hosts == 1:
    return []
  return [f'--hosts={hosts}', f'--host={host}', f'--coordinator={coordinator}']


@dataclasses.dataclass(frozen=True)
class Processes:
  """The processes of one learner on this machine."""

  hosts: int = 1
  environment: tuple[tuple[str, str], ...] = ()  # Added to each one's.
  arguments: tuple[str, ...] = ()  # Likewise, where it is unlike others.
  slices: int = 1  # That share the hosts.


def on_this_machine(
  config: RunConfig, asked: str, cpu_devices: bool, xla_flags: str
) -> tuple[Processes, ...]:
  """The processes of each learner of a local run.

  Args:
    config: the run; each learner has the devices of its mesh.
    asked: '2', for all learners, or '2,1', one number for each, unless
      config.unlike_learners says it.
    cpu_devices: whether these devices are to be made out of CPU cores.
    xla_flags: what XLA_FLAGS holds already; the last of equal flags counts.

  Raises:
    ConfigError: no such numbers, devices that they do not share evenly, or
      other machines.
  """
  learners = config.protocol.learners
  words = asked.split(',')
  if not all(word.isdecimal() and int(word) for word in words):
    raise ConfigError(
      [f'--hosts={asked}: must be a number from 1, or such as 2,1']
    )
  numbers = [*map(int, words)]
  if len(numbers) == 1:
    numbers *= learners
  if len(numbers) != learners:
    raise ConfigError(
      [
        f'--hosts={asked}: has {len(numbers)} numbers, and there are '
        f'{learners} learners'
      ]
    )
  result = []
  for learner, setup in enumerate(unlike.setups(config, learners)):
    own, devices = setup.machines, setup.config.mesh.devices
    slices = setup.config.mesh.slices
    hosts = own.pop('hosts', 0) or max(numbers[learner], slices)
    if own:
      raise ConfigError(
        [
          f'{run_config.UNLIKE}: learner {learner}: {next(iter(own))}: is for '
          '`diloco launch`; here all learners are on one machine'
        ]
      )
    if hosts % slices:
      raise ConfigError(
        [
          f'--hosts={asked}: the {slices} slices of learner {learner} do not '
          'share them evenly'
        ]
      )
    if devices % hosts:
      raise ConfigError(
        [
          f'--hosts={asked}: the {hosts} of learner {learner} do not share '
          f'the devices of config.mesh evenly, which has {devices}'
        ]
      )
    forced = f'{xla_flags} {FORCED}={devices // hosts}'.strip()
    environment = ((XLA_FLAGS, forced),) * cpu_devices
    result.append(Processes(hosts, environment, setup.arguments, slices))
  return tuple(result)


@dataclasses.dataclass(frozen=True)
class Role:
  """One part of a run: its name and its command."""

  name: str
  argv: tuple[str, ...]
  ends_run: bool = False  # Once it exits with 0, the others leave.
  optional: bool = False  # The run goes on, and ends, without it.
  leave_s: float = 10.0  # From SIGTERM to SIGKILL.
  hosts: int = 1  # So many processes, which live and die together.
  slices: int = 1  # Or of each slice a part of them; see `launch.slices`.
  environment: tuple[tuple[str, str], ...] = ()  # Added to its processes'.
  # Added to that of each process, by its number; empty: nothing is.
  own_environments: tuple[tuple[tuple[str, str], ...], ...] = ()
  # Where its processes serve /metrics, each at the next port; 0: nowhere.
  metrics_port: int = 0

  def process(self, host: int) -> str:
    """Name of one of its processes; the first has the role's own."""
    return f'{self.name}.{host}' if host else self.name

  def hosts_of(self, slices: Sequence[int]) -> list[int]:
    """Returns the numbers of the processes of some slices."""
    part = self.hosts // self.slices
    return [i * part + k for i in slices for k in range(part)]

  def command(
    self,
    host: int,
    coordinator: str,
    live: Sequence[int] = (0,),
    memory: str = '',
    coordination: str = '',
  ) -> list[str]:
    """Returns the command of one of its processes.

    Args:
      coordinator: 'host:port' where they meet; unused for a single host.
      live: slices that take part.
      memory: folder for boundaries, of several slices.
      coordination: 'host:port' of their JAX service.
    """
    metrics = []
    if self.metrics_port:
      port = self.metrics_port + host
      metrics = monitor_flags.arguments(sockets.LOOPBACK, port)
    hosts = self.hosts_of(live)
    sliced = []
    if self.slices > 1:
      words = ','.join(map(str, live))
      sliced = [
        f'--live_slices={words}',
        f'--memory={memory}',
        f'--coordination={coordination}',
      ]
    of_host = host_flags(len(hosts), hosts.index(host), coordinator)
    return [*self.argv, *metrics, *sliced, *of_host]

  def variables(self, host: int) -> dict[str, str]:
    """Returns what is added to the environment of one of its processes."""
    own = self.own_environments[host] if self.own_environments else ()
    return dict((*self.environment, *own))


@dataclasses.dataclass(frozen=True)
class Program:
  """The processes of one run and what is run after them."""

  roles: tuple[Role, ...]
  evaluate: Role
  environment: tuple[tuple[str, str], ...]  # Added to every process's.
  # Makes the role of a learner beyond M.
  newcomer: Callable[[int], Role] | None = None


def program(
  config: RunConfig,
  config_arguments: Sequence[str],
  workdir: Workdir,
  address: str,
  access_arguments: Sequence[str] = (),
  log_arguments: Sequence[str] = (),
  learners: Sequence[Processes] = (),
  first_port: int = 0,
  asked: Sequence[str] = (),
) -> Program:
  """The syncer's S processes, M learners, perhaps an evaluator; evaluation.

  Args:
    address: 'host:port' at which the syncer listens.
    first_port: first of the ports of /metrics; 0: none serves it.
    asked: environment variables, by role; see `variables`.

  Raises:
    ConfigError: there are not so many ports, or no such role to ask for.
  """
  if problems := [*variables.problems(asked, KINDS)]:
    raise ConfigError(problems)
  of_each = learners or [Processes()] * config.protocol.learners
  hosts = max(each.hosts for each in of_each)
  shared = (*config_arguments, f'--workdir={workdir.root}')
  started = tasks(
    config, shared, access_arguments, log_arguments, config.data.shards
  )

  def role(task: Task) -> Role:
    kind = KINDS[task.kind]
    process, is_newcomer = Processes(), False
    if task.kind == LEARNER:
      is_newcomer = task.learner >= len(of_each)
      process = of_each[-1 if is_newcomer else task.learner]
    address_of_peer = [f'--{kind.peer}={address}'] if kind.peer else []
    return Role(
      task.name,
      (
        *(sys.executable, '-m', kind.module),
        *(*task.arguments, *process.arguments, *address_of_peer),
      ),
      ends_run=kind.ends_run,
      optional=kind.optional or is_newcomer,
      leave_s=kind.leave_s,
      hosts=process.hosts,
      slices=process.slices,
      environment=variables.joined(
        (*process.environment, *variables.of_kind(asked, task.kind))
      ),
      metrics_port=first_port
      and metrics_port(first_port, task, config.syncer.shards, hosts),
    )

  possible = {task.learner: task for task in started if task.kind == LEARNER}
  last = first_port and metrics_port(
    first_port, possible[len(of_each) - 1], config.syncer.shards, hosts
  )
  if last + hosts > 65536:
    raise ConfigError(
      [
        f'--metrics_port={first_port}: the processes need ports up to '
        f'{last + hosts - 1}, and 65535 is the last'
      ]
    )
  evaluate = (*shared, *log_arguments)
  return Program(
    tuple(role(task) for task in started if (task.learner or 0) < len(of_each)),
    Role(
      EVALUATE,
      (sys.executable, '-m', 'diloco.evaluate', *evaluate),
      environment=variables.of_kind(asked, EVALUATE),
    ),
    environment(config, workdir.compiled),
    newcomer=lambda i: role(possible[i]),
  )


def metrics_line(whole: Program) -> str:
  """Returns where the processes serve their metrics."""
  roles = sorted(whole.roles, key=lambda role: role.metrics_port)
  ports = ', '.join(f'{role.name} {role.metrics_port}' for role in roles)
  return f'http://{sockets.LOOPBACK}:PORT/metrics of {ports}'


def environment(
  config: RunConfig, compiled: pathlib.Path
) -> tuple[tuple[str, str], ...]:
  """Returns the environment of every process; `compiled` is XLA's cache."""
  variables = [('PYTHONUNBUFFERED', '1')]
  if config.run.cpu_threads:  # XLA's CPU client sizes its pools by NPROC.
    variables.append(('NPROC', str(config.run.cpu_threads)))
  if config.run.compilation_cache:
    variables += [
      (COMPILED, str(compiled.absolute())),
      ('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0'),
    ]
  return tuple(variables)


def local_environment(
  program: Program, inherited: Mapping[str, str]
) -> dict[str, str]:
  """Returns the environment of processes on this machine.

  A compilation cache that the user's own environment names takes the place of
  the one in the folder of the run: what is in it need not be compiled again.
  """
  kept = {k: v for k, v in inherited.items() if k == COMPILED}
  return {**inherited, **dict(program.environment), **kept}
