# SPDX-License-Identifier: Apache-2.0
"""The parts of a run on one machine: roles, hosts, command lines."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import EVALUATOR, Workdir, learner_name, shard_name
from diloco.monitoring import monitor_flags
from diloco.transport import sockets

COMPILED = 'JAX_COMPILATION_CACHE_DIR'
XLA_FLAGS = 'XLA_FLAGS'
FORCED = '--xla_force_host_platform_device_count'
# glibc gives large blocks back to the kernel at once, and XLA's next step
# faults them in again: on 2 cores the quickstart's first 150 steps took 22 s
# without these and 17 s with them. Other allocators don't look.
MALLOC = (
  ('MALLOC_MMAP_THRESHOLD_', str(1 << 30)),
  ('MALLOC_TRIM_THRESHOLD_', str(1 << 30)),
  ('MALLOC_TOP_PAD_', str(1 << 26)),
)

SYNCER = 'syncer'
# From SIGTERM to SIGKILL: what each promises, and some seconds to end in.
SYNCER_LEAVE_S = 65.0  # It may wait for one checkpoint, and write another.
LEARNER_LEAVE_S = 30.0  # Its notice is 25.
EVALUATE = 'evaluate'


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
  return [
    f'--hosts={hosts}',
    f'--host={host}',
    f'--coordinator={coordinator}',
  ]


@dataclasses.dataclass(frozen=True)
class Processes:
  """The processes of one learner on this machine."""

  hosts: int = 1
  environment: tuple[tuple[str, str], ...] = ()  # Added to each one's.


def on_this_machine(
  config: RunConfig, asked: str, cpu_devices: bool, xla_flags: str
) -> tuple[Processes, ...]:
  """The processes of each learner of a local run.

  Args:
    config: the run; each learner has the devices of its mesh.
    asked: '2', for all learners, or '2,1', one number for each.
    cpu_devices: whether these devices are to be made out of CPU cores.
    xla_flags: what XLA_FLAGS holds already; the last of equal flags counts.

  Raises:
    ConfigError: no such numbers, or devices that they do not share evenly.
  """
  devices = config.mesh.devices
  found = []
  for learner, hosts in enumerate(_of_each(asked, config.protocol.learners)):
    if devices % hosts:
      raise ConfigError(
        [
          f'--hosts={asked}: the {hosts} of learner {learner} do not share '
          f'the devices of config.mesh evenly, which has {devices}'
        ]
      )
    forced = f'{xla_flags} {FORCED}={devices // hosts}'.strip()
    environment = ((XLA_FLAGS, forced),) if cpu_devices else ()
    found.append(Processes(hosts, environment))
  return tuple(found)


def hosts_of_all(asked: str) -> int:
  """Returns the hosts of every learner, if they must all be equal.

  Raises:
    ConfigError: it is not one number from 1.
  """
  numbers = _numbers(asked)
  if len(numbers) > 1:
    raise ConfigError(
      [f'--hosts={asked}: one number for all, but for --to=local']
    )
  return numbers[0]


def _of_each(asked: str, learners: int) -> tuple[int, ...]:
  numbers = _numbers(asked)
  if len(numbers) == 1:
    return numbers * learners
  if len(numbers) != learners:
    raise ConfigError(
      [
        f'--hosts={asked}: has {len(numbers)} numbers, and there are '
        f'{learners} learners'
      ]
    )
  return numbers


def _numbers(asked: str) -> tuple[int, ...]:
  words = asked.split(',')
  if not all(word.isdecimal() and int(word) for word in words):
    raise ConfigError(
      [f'--hosts={asked}: must be a number from 1, or such as 2,1']
    )
  return tuple(map(int, words))


@dataclasses.dataclass(frozen=True)
class Role:
  """One part of a run: its name and its command."""

  name: str
  argv: tuple[str, ...]
  ends_run: bool = False  # Once it exits with 0, the others leave.
  optional: bool = False  # The run goes on, and ends, without it.
  leave_s: float = 10.0  # From SIGTERM to SIGKILL.
  hosts: int = 1  # So many processes, which live and die together.
  environment: tuple[tuple[str, str], ...] = ()  # Added to its processes'.
  # Added to that of each process, by its number; empty: nothing is.
  own_environments: tuple[tuple[tuple[str, str], ...], ...] = ()
  # Where its processes serve /metrics, each at the next port; 0: nowhere.
  metrics_port: int = 0

  def process(self, host: int) -> str:
    """Name of one of its processes; the first has the role's own."""
    return f'{self.name}.{host}' if host else self.name

  def command(self, host: int, coordinator: str) -> list[str]:
    """Returns the command of one of its processes.

    Args:
      coordinator: 'host:port' where they meet; unused for a single host.
    """
    metrics = []
    if self.metrics_port:
      port = self.metrics_port + host
      metrics = monitor_flags.arguments(sockets.LOOPBACK, port)
    return [
      *self.argv,
      *metrics,
      *host_flags(self.hosts, host, coordinator),
    ]

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
  # Makes the role of a learner beyond M; None: there is no place for one.
  newcomer: Callable[[int], Role] | None = None


def program(
  config: RunConfig,
  config_arguments: Sequence[str],
  workdir: Workdir,
  address: str,
  access_arguments: Sequence[str] = (),
  log_arguments: Sequence[str] = (),
  learners: Sequence[Processes] = (),
) -> Program:
  """The syncer's S processes, M learners, perhaps an evaluator; evaluation.

  Args:
    address: 'host:port' at which the syncer listens.
  """

  def argv(module: str, *flags: str) -> tuple[str, ...]:
    command = (sys.executable, '-m', module, *config_arguments)
    return (*command, f'--workdir={workdir.root}', *log_arguments, *flags)

  syncer = Role(
    SYNCER,
    argv('diloco.syncer', f'--bind={address}', *access_arguments),
    ends_run=True,
    leave_s=SYNCER_LEAVE_S,
  )
  shards = [
    Role(
      shard_name(s),
      argv(
        'diloco.syncer_shard',
        f'--shard={s}',
        f'--lead={address}',
        *access_arguments,
      ),
      leave_s=SYNCER_LEAVE_S,
    )
    for s in range(1, config.syncer.shards)
  ]

  def learner(i: int, each: Processes, optional: bool = False) -> Role:
    return Role(
      learner_name(i),
      argv(
        'diloco.learner',
        f'--learner={i}',
        f'--syncer={address}',
        *access_arguments,
      ),
      optional=optional,
      leave_s=LEARNER_LEAVE_S,
      hosts=each.hosts,
      environment=each.environment,
    )

  of_each = learners or [Processes()] * config.protocol.learners
  parts = [learner(i, each) for i, each in enumerate(of_each)]
  beside = []
  if config.run.eval_every_rounds:
    beside = [Role(EVALUATOR, argv('diloco.evaluator'), optional=True)]
  evaluate = Role(EVALUATE, argv('diloco.evaluate'))
  return Program(
    (syncer, *shards, *parts, *beside),
    evaluate,
    environment(config, workdir.compiled),
    newcomer=lambda i: learner(i, of_each[-1], optional=True),
  )


def with_metrics(whole: Program, port: int, learners: int) -> Program:
  """Has each process serve /metrics on loopback, at a port of its own.

  The syncer's is `port`, the evaluator's the next, then those of the shards and
  of the learners' processes; one that joins later comes behind them.

  Args:
    learners: M.

  Raises:
    ConfigError: there are not so many ports.
  """
  first = (SYNCER, EVALUATOR)
  later = [role for role in whole.roles if role.name not in first]
  ports, following = {SYNCER: port, EVALUATOR: port + 1}, port + 2
  for role in later:
    ports[role.name] = following
    following += role.hosts
  if following > 65536:
    raise ConfigError(
      [
        f'--metrics_port={port}: the processes need {following - port} ports, '
        'and 65535 is the last'
      ]
    )

  def newcomer(learner: int) -> Role:
    made = whole.newcomer(learner)
    place = following + (learner - learners) * made.hosts
    return dataclasses.replace(made, metrics_port=place)

  return dataclasses.replace(
    whole,
    roles=tuple(
      dataclasses.replace(role, metrics_port=ports[role.name])
      for role in whole.roles
    ),
    newcomer=newcomer,
  )


def metrics_line(whole: Program) -> str:
  """Returns where the processes serve their metrics."""
  roles = sorted(whole.roles, key=lambda each: each.metrics_port)
  ports = ', '.join(f'{each.name} {each.metrics_port}' for each in roles)
  return f'http://{sockets.LOOPBACK}:PORT/metrics of {ports}'


def environment(
  config: RunConfig, compiled: pathlib.Path
) -> tuple[tuple[str, str], ...]:
  """Returns the environment of every process; `compiled` is XLA's cache."""
  variables = [('PYTHONUNBUFFERED', '1'), *MALLOC]
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
