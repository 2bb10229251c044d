# SPDX-License-Identifier: Apache-2.0
"""TPU VMs: gcloud commands, and slices that are asked for as long as a run is.

The syncer is a CPU machine of Compute Engine, every learner a queued resource
of its own, or each slice of one of several, whose rendezvous is a CPU machine
too. A queued resource for several would be gone as a whole.

The service does not announce that it has suspended a slice, so the launcher
stays and checks once a minute. It only recreates slices that it has seen
before: a slice that a user added is watched from then on, one that a user
deleted is not recreated.
"""

import dataclasses
import json
import pathlib
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from diloco.config.hardware import V5E, V5P, V6E
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import learner_name
from launch.backends.base import (
  Addresses,
  Backend,
  CommandFailed,
  script,
  shell_command,
)
from launch.job import (
  CONFIG_FOLDER,
  CONTAINERS,
  COORDINATOR_PORT,
  RESERVATION,
  SECRET_FOLDER,
  SPOT,
  JobSpec,
  only,
  option,
)
from launch.program import LEARNER, RENDEZVOUS, SHARD, SYNCER, Task
from launch.supervisor import EXITS_FATAL

# What a process resumes from or locks; all else of a workdir is copied.
KEPT_BEHIND = ('checkpoints', 'compiled', 'lock', 'requests', 'syncer')
COPIED_EVERY_S = 60
LOOK_EVERY_S = 60.0
BACKOFF_MIN_S = 60.0
BACKOFF_MAX_S = 1800.0
SCOPES = '--scopes=https://www.googleapis.com/auth/cloud-platform'
QUEUED = ('compute', 'tpus', 'queued-resources')
# Machines of Compute Engine with more memory for a CPU are another kind.
GIB_PER_CPU_MAX = 6.5
EXTENDED = ('--custom-extensions',)
# The system of a TPU VM.
RUNTIMES = {
  V5E: 'v2-alpha-tpuv5-lite',
  V5P: 'v2-alpha-tpuv5',
  V6E: 'v2-alpha-tpuv6e',
}
EXIT_ATTRIBUTE = 'diloco/exit'
REGISTRIES = ('docker.pkg.dev', 'gcr.io')  # They require authentication.
AGAIN_S = 10
DEAD_WITHIN_S = 20  # The learner's own bound, by heartbeats.
TOGETHER_AGAIN_S = DEAD_WITHIN_S + 10  # With what docker needs to end.
IP = 'SYNCER_IP', 'RENDEZVOUS_IP'  # Known once their machines are there.
GONE = ('SUSPENDED', 'FAILED')  # Deleted, and asked for again.
ABSENT = ('NOT_FOUND', 'not found', 'notFound')
EXISTS = 'ALREADY_EXISTS'  # Another launcher was faster.
# Of gRPC and HTTP, and of a network that is away: they pass.
PASSING = re.compile(
  r'\b(RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL|ABORTED'
  r'|429|50[0234]|[Cc]onnection|timed out)\b'
)


@dataclasses.dataclass(frozen=True)
class QueuedSlice:
  """A queued resource of the run, as the service tells of it."""

  task: Task  # The learner, or its slice.
  state: str  # 'ACTIVE', 'SUSPENDED', …
  attempt: int  # How often it was asked for.


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueuedResources(Backend):
  """Launches by gcloud; stays, and recreates slices that were taken away."""

  TRAITS = frozenset({CONTAINERS})
  TPUS = True
  NEEDS = ('project', 'zone')

  project: str = option('', 'Project of all machines.')
  zone: str = option('', 'Zone of all machines.')
  service_account: str = option('', 'Account of all machines.')
  subnetwork: str = option('', 'Subnetwork of all machines.')
  internal_ips: bool = option(False, 'gives machines no external addresses.')
  results_bucket: str = option(
    '', 'Bucket of Cloud Storage to which all copy metrics and results.'
  )
  sleep: Callable[[float], None] = time.sleep
  now_s: Callable[[], float] = time.monotonic

  def notes(self) -> Iterator[str]:
    return iter(()) if self.results_bucket else super().notes()

  def start(self, whole: JobSpec) -> int:
    for role in (whole.syncer, *whole.shards):
      if self.dry_run or self._address(whole, role) is None:
        syncer = self._syncer(whole) if role in whole.shards else ''
        self.create(whole, role, syncer)
    learners = whole.first_learners
    if self.dry_run:
      for task in learners:
        self.add(whole, task.learner)
      self.say('# Each minute; what is SUSPENDED or FAILED is made again:')
      self.say(shlex.join(self.list_command()))
      return 0
    watched = _Watch(self, whole, self._syncer(whole))
    for task in learners:
      self._meet(whole, task)
    slices = [each for task in learners for each in whole.slices_of(task)]
    watched.want(slices, self.now_s())
    return self._stay(whole, watched)

  def add(self, whole: JobSpec, learner: int) -> int:
    task = only(whole, learner)
    self._meet(whole, task)
    for each in whole.slices_of(task):
      self.create(whole, each, self._syncer(whole))
    return 0

  def remove(self, whole: JobSpec, learner: int) -> int:
    task = only(whole, learner)
    for each in (*whole.slices_of(task), *whole.rendezvous_of(task)):
      self.act(self.delete_command(whole, each))
    return 0

  def _meet(self, whole: JobSpec, learner: Task) -> None:
    """Makes the machine of a learner's rendezvous, unless there is one."""
    for role in whole.rendezvous_of(learner):
      if self.dry_run or self._address(whole, role) is None:
        self.create(whole, role, '')

  def create(
    self, whole: JobSpec, role: Task, syncer: str, attempt: int = 1
  ) -> None:
    """Makes the machine of the syncer or a shard, or asks for a slice.

    Args:
      syncer: 'host:port' of the syncer, for all others.

    Raises:
      CommandFailed: it was refused.
    """
    met = ''
    for other in whole.rendezvous_of(role):
      met = self._endpoint(whole, other)
    text = startup_script(
      whole, role, self.project, syncer, attempt, self.results_bucket, met
    )
    if self.dry_run:
      name = f'{whole.role_name(role)}.sh'
      self.say(f"cat >{name} <<'END_OF_SCRIPT'\n{text}END_OF_SCRIPT")
      self.say(shlex.join(self.create_command(whole, role, name, attempt)))
      return
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'startup.sh'
      path.write_text(text)
      self.run(self.create_command(whole, role, str(path), attempt))

  def _stay(self, whole: JobSpec, watched: '_Watch') -> int:
    """Waits until the syncer has ended for good; returns 0 on success."""
    while True:
      watched.step(self.now_s())
      code = watched.syncer_exit()
      if code is not None:
        break
      self.sleep(LOOK_EVERY_S)
    watched.remove_all()
    for task in watched.learners():
      for role in whole.rendezvous_of(task):
        self.unless_absent(*self.delete_command(whole, role))
    self.say(f'the syncer has ended with exit code {code}; slices given back')
    return code if code in (0, *EXITS_FATAL) else 1

  def _syncer(self, whole: JobSpec) -> str:
    return self._endpoint(whole, whole.syncer)

  def _endpoint(self, whole: JobSpec, role: Task) -> str:
    """Returns 'host:port' of the syncer, or of a rendezvous.

    Raises:
      ConfigError: it has no machine.
    """
    is_syncer = role is whole.syncer
    port = whole.port if is_syncer else whole.rendezvous_port(role)
    if self.dry_run:
      return f'{IP[not is_syncer]}:{port}'
    address = self._address(whole, role)
    if address is None:
      raise ConfigError([f'{whole.role_name(role)}: there is no such machine'])
    return f'{address}:{port}'

  def _address(self, whole: JobSpec, role: Task) -> str | None:
    """Returns the IP address of a CPU machine; None where there is none."""
    value = '--format=value(networkInterfaces[0].networkIP)'
    return self.unless_absent(*self._instances('describe', whole, role), value)

  def syncer_exit(self, whole: JobSpec) -> int | None:
    """Exit code with which the syncer has ended for good; None: it has not."""
    text = self.unless_absent(
      *self._instances('get-guest-attributes', whole, whole.syncer),
      f'--query-path={EXIT_ATTRIBUTE}',
      '--format=value(value)',
    )
    return int(text) if text else None

  def unless_absent(self, *argv: str) -> str | None:
    """Runs a command; returns None for something that is not there."""
    try:
      return self.run(argv).strip()
    except CommandFailed as error:
      if any(word in error.stderr for word in ABSENT):
        return None
      raise

  # Its commands.

  def create_command(
    self, whole: JobSpec, role: Task, script_file: str, attempt: int
  ) -> tuple[str, ...]:
    """Makes a CPU machine, whose disk is the workdir, or asks for a slice."""
    place, name = role.resources, whole.role_name(role)
    script = f'--metadata-from-file=startup-script={script_file}'
    if role.kind != LEARNER:
      is_extended = place.memory_gib > GIB_PER_CPU_MAX * place.cpus
      return (
        *self._instances('create', whole, role),
        f'--custom-cpu={place.cpus}',
        f'--custom-memory={place.memory_gib}GB',
        *(EXTENDED if is_extended else ()),
        '--image-family=cos-stable',
        '--image-project=cos-cloud',
        f'--boot-disk-size={place.disk_gib}GB',
        '--metadata=enable-guest-attributes=TRUE',
        script,
        SCOPES,
        f'--labels=run={whole.name},role={role.kind}',
        *self._network('--subnet', '--no-address'),
        '--quiet',
      )
    # A reservation is asked for by its name, which only `gcloud alpha` takes.
    is_reserved = place.capacity == RESERVATION
    capacity = ['--spot'] if place.capacity == SPOT else []
    return (
      *(('gcloud', 'alpha') if is_reserved else ('gcloud',)),
      *QUEUED,
      'create',
      name,
      f'--node-id={name}',
      *self._place,
      f'--accelerator-type={place.accelerator.name}',
      f'--runtime-version={RUNTIMES[place.accelerator.slice.chip]}',
      *([f'--reservation={place.reservation}'] if is_reserved else capacity),
      SCOPES,
      script,
      f'--labels=run={whole.name},role=learner,attempt={attempt}',
      *self._network('--subnetwork', '--internal-ips'),
      '--async',
      '--quiet',
    )

  def delete_command(self, whole: JobSpec, role: Task) -> tuple[str, ...]:
    """Gives a slice back, or takes its request out of the queue; deletes the
    machine of a rendezvous.
    """
    if role.kind != LEARNER:
      return (*self._instances('delete', whole, role), '--quiet')
    return (
      *('gcloud', *QUEUED, 'delete', whole.role_name(role), *self._place),
      '--force',  # Also where it has machines.
      *('--async', '--quiet'),
    )

  def list_command(self) -> tuple[str, ...]:
    """All queued resources of the zone, as JSON."""
    return ('gcloud', *QUEUED, 'list', *self._place, '--format=json')

  def _instances(
    self, verb: str, whole: JobSpec, role: Task
  ) -> tuple[str, ...]:
    name = whole.role_name(role)
    return ('gcloud', 'compute', 'instances', verb, name, *self._place)

  @property
  def _place(self) -> tuple[str, str]:
    return f'--project={self.project}', f'--zone={self.zone}'

  def _network(self, subnetwork: str, internal: str) -> list[str]:
    """Flags that a CPU machine and a TPU have under two names."""
    account = f'--service-account={self.service_account}'
    return [
      *([f'{subnetwork}={self.subnetwork}'] if self.subnetwork else []),
      *([internal] if self.internal_ips else []),
      *([account] if self.service_account else []),
    ]


def slices(whole: JobSpec, listed: str) -> list[QueuedSlice]:
  """Returns the slices of the run's learners from what gcloud lists."""
  queued = {}
  known = {whole.role_name(task): task for task in _slices(whole)}
  for x in json.loads(listed or '[]'):
    name = x['name'].rpartition('/')[2]
    if name in known:
      state = x.get('state', {}).get('state', 'STATE_UNSPECIFIED')
      specs: Sequence[dict] = x.get('tpu', {}).get('nodeSpec', [])
      labels = specs[0].get('node', {}).get('labels', {}) if specs else {}
      attempt = int(labels.get('attempt', 1))
      queued[name] = QueuedSlice(known[name], state, attempt)
  return [queued[name] for name in known if name in queued]


def _slices(whole: JobSpec) -> list[Task]:
  """Returns all slices that the run may ever have, in order."""
  return [each for task in whole.learners for each in whole.slices_of(task)]


class _Watch:
  """The learners' slices of one run. Time is an argument."""

  def __init__(self, backend: QueuedResources, whole: JobSpec, syncer: str):
    """Stores the arguments; starts nothing.

    Args:
      syncer: 'host:port' of the syncer.
    """
    self._backend = backend
    self._say = backend.say
    self._whole = whole
    self._syncer = syncer
    self._tasks = {task.name: task for task in _slices(whole)}
    # Those to get a slice: when, on the monotonic clock, and which attempt.
    self._wanted: dict[str, tuple[float, int]] = {}
    self._failures: dict[str, int] = {}  # In a row.
    self._states: dict[str, str] = {}

  def want(self, slices: Collection[Task], now_s: float) -> None:
    """These are to be there, unless they are."""
    held = {x.task.name for x in self._look()}
    for task in slices:
      if task.name not in held:
        self._wanted[task.name] = now_s, 1

  def learners(self) -> list[Task]:
    """Returns the learners of which something has been there."""
    seen = {self._tasks[name].learner for name in self._states}
    return [self._whole.learners[learner] for learner in sorted(seen)]

  def step(self, now_s: float) -> None:
    """Looks once; gives back what is gone, asks for what is due.

    Raises:
      CommandFailed: and it would again.
    """
    try:
      queued = self._look()
    except CommandFailed as error:
      self._unless_passing(error)
      return
    for each in queued:
      self._notice(each, now_s)
    held = {each.task.name for each in queued}
    for name in self._tasks:
      due_s, attempt = self._wanted.get(name, (float('inf'), 0))
      if name not in held and now_s >= due_s:
        self._ask(name, attempt, now_s)

  def syncer_exit(self) -> int | None:
    """Exit code with which the syncer has ended for good; None: it has not."""
    try:
      return self._backend.syncer_exit(self._whole)
    except CommandFailed as error:
      self._unless_passing(error)
      return None

  def remove_all(self) -> None:
    """Gives back all slices and wants none."""
    self._wanted.clear()
    for each in self._look():
      if each.state != 'DELETING':
        self._delete(each.task)

  def _look(self) -> list[QueuedSlice]:
    backend = self._backend
    return slices(self._whole, backend.run(backend.list_command()))

  def _notice(self, queued: QueuedSlice, now_s: float) -> None:
    name = queued.task.name
    if self._states.get(name) != queued.state:
      self._say(f'{name}: {queued.state}, attempt {queued.attempt}')
    self._states[name] = queued.state
    if queued.state == 'ACTIVE':
      self._failures.pop(name, None)
      self._wanted.pop(name, None)
    elif queued.state in GONE:
      self._delete(queued.task)  # Once more, where the last time did not do.
      if name not in self._wanted:
        # A preemption does not count as a failure; a slice that never came up
        # does.
        wait_s = self._failed(name) if queued.state == 'FAILED' else 0.0
        self._wanted[name] = now_s + wait_s, queued.attempt + 1

  def _ask(self, name: str, attempt: int, now_s: float) -> None:
    try:
      self._backend.create(
        self._whole, self._tasks[name], self._syncer, attempt
      )
    except CommandFailed as error:
      if EXISTS in error.stderr:
        del self._wanted[name]
        return
      self._unless_passing(error)
      wait_s = self._failed(name)
      self._wanted[name] = now_s + wait_s, attempt
      self._say(f'{name}: again in {wait_s:.0f} s')
    else:
      self._say(f'{name}: asked for, attempt {attempt}')
      del self._wanted[name]

  def _delete(self, role: Task) -> None:
    try:
      self._backend.unless_absent(
        *self._backend.delete_command(self._whole, role)
      )
    except CommandFailed as error:
      self._unless_passing(error)  # It is seen again, and deleted then.

  def _failed(self, name: str) -> float:
    """Counts a failure; how long to wait before the next attempt."""
    count = self._failures.get(name, 0) + 1
    self._failures[name] = count
    return min(BACKOFF_MIN_S * 2 ** (count - 1), BACKOFF_MAX_S)

  def _unless_passing(self, error: CommandFailed) -> None:
    if not PASSING.search(error.stderr):
      raise error
    self._say(str(error))


# The script that a machine runs at each of its starts.


def startup_script(
  whole: JobSpec,
  role: Task,
  project: str,
  syncer: str,
  attempt: int,
  bucket: str = '',
  rendezvous: str = '',
) -> str:
  """Returns the script of one machine; all hosts of a slice run the same.

  Args:
    syncer: 'host:port' of the syncer.
    attempt: from 1; how often this slice was requested.
    bucket: to which it copies what it leaves; a shard leaves nothing.
    rendezvous: 'host:port', for a slice of several.
  """
  name, hosts = whole.role_name(role), role.resources.accelerator.hosts
  registry = whole.image.partition('/')[0]
  values = {
    'name': name,
    # Several slices lead their learner in turn, and have disks of their own.
    'run': whole.name if role.slice is None else f'{whole.name}/{role.name}',
    'role': role.name if role.slice is None else learner_name(role.learner),
    'kind': role.kind,
    'hosts': hosts,
    'project': project,
    'config_name': whole.config_name,
    'config_text': whole.config_text,
    'registry': registry if registry.endswith(REGISTRIES) else '',
    'bucket': '' if role.kind in (SHARD, RENDEZVOUS) else bucket,
    'copied_every_s': COPIED_EVERY_S,
    'coordinator_port': COORDINATOR_PORT,
    'exit_attribute': EXIT_ATTRIBUTE,
    'fatal': ' '.join(map(str, EXITS_FATAL)),
    'restarts_max': whole.restarts_max,
    'retry_s': AGAIN_S,
    # Agents wait for each other at the rendezvous.
    'again_s': (
      TOGETHER_AGAIN_S if hosts > 1 and role.slice is None else AGAIN_S
    ),
    'secrets': [
      f'{secret_name(whole.secret_of(role), each)} {each}'
      for each in (whole.secret_files if whole.secret else ())
    ],
    'left_out': [
      word for each in KEPT_BEHIND for word in ('!', '-path', f'./{each}*')
    ],
  }
  own = ['--rm', '--name=diloco', f'--stop-timeout={whole.grace_s}']
  if role.kind == LEARNER:
    own.append('--privileged')  # The chips are devices of the machine.
  if role.slice is not None:
    own.append('--ipc=host')  # The machine's /dev/shm is large.
  known = Addresses(
    '$host', syncer, '$index', '$coordinator', rendezvous=rendezvous
  )
  evaluator = ':'
  if role.kind == SYNCER and whole.evaluator:
    beside = ['--detach', '--name=evaluator', '--restart=on-failure']
    evaluator = _docker(whole, whole.evaluator, beside, Addresses('$host'))
  functions = {
    'run_role': _docker(whole, role, own, known),
    'run_evaluator': evaluator,
  }
  title = f'{name}, attempt {attempt}: written by launch.main.'
  return script('startup.sh', title, values, functions)


def secret_name(prefix: str, file_name: str) -> str:
  """Returns a file's name in the Secret Manager, where names have no dots."""
  return f'{prefix}-{re.sub("[^-_A-Za-z0-9]", "-", file_name)}'


def _docker(
  whole: JobSpec, role: Task, options: Sequence[str], known: Addresses
) -> str:
  environment = [f'--env={key}={value}' for key, value in whole.variables(role)]
  fixed = shlex.join(
    ['docker', 'run', '--network=host', *options, *environment]
  )
  folders = ' '.join(
    f'"--volume=$folder/{name}":{shlex.quote(place)}'
    for name, place in (
      ('config', f'{CONFIG_FOLDER}:ro'),
      ('secret', f'{SECRET_FOLDER}:ro'),
      ('workdir', whole.workdir),
    )
  )
  program = [f'--entrypoint={whole.python}', whole.image]
  command = shell_command(program, whole, role, known)
  return f'{fixed} {folders} {command}'
