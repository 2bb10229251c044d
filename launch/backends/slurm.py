# SPDX-License-Identifier: Apache-2.0
"""A launch for Slurm: a job for the syncer, a job array of alike learners.

The workdir is a folder that all nodes share. The syncer's job writes there at
which host:port it listens; an element of the array is one learner, which reads
that at each of its starts. A learner of several slices is an array of its own,
of them, and a job for its rendezvous. A job that ends with anything but success
or a fatal exit code requeues itself. The nodes of a learner, or of its slice,
are the tasks of one job step: srun ends all of them when one has failed.
"""

import dataclasses
import pathlib
import shlex
from collections.abc import Sequence

from diloco.config.sections import ConfigError
from diloco.metrics.workdir import learner_name
from launch.backends.base import Addresses, Backend, script, shell_command
from launch.job import GPU, LEAVE_S, SIZED, JobSpec, only, option
from launch.program import LEARNER, RENDEZVOUS, SYNCER, Task
from launch.supervisor import EXIT_STOPPED, EXITS_FATAL

# Slurm looks at time limits once a minute: a signal may come that much early,
# and a process that has left early loses nothing but that minute.
SIGNAL_EARLY_S = 30
INDEX = '$SLURM_ARRAY_TASK_ID'
SYNCER_JOB = 'SYNCER_JOB'  # Its number is known once it is submitted.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm(Backend):
  """Launches by sbatch, from a machine that shares the workdir."""

  TRAITS = frozenset({SIZED})
  TPUS = False

  sbatch: tuple[str, ...] = option(
    (), 'passes an option on to sbatch, such as --partition=a100.'
  )

  @property
  def shares_workdir(self) -> bool:
    return True

  def start(self, whole: JobSpec) -> int:
    self._refuse_queued(whole, whole.first_learners)
    if not self.dry_run:  # Slurm opens the logs before any script runs.
      logs = pathlib.Path(whole.workdir) / 'logs'
      logs.mkdir(parents=True, exist_ok=True)
    # 'JOB' or 'JOB;CLUSTER'; nothing in a dry run.
    job = self.act(*self.syncer(whole)).strip().partition(';')[0] or SYNCER_JOB
    for shard in whole.shards:
      # It waits for the job of the syncer; two of one shard never run at once.
      after = f'--dependency=after:{job},singleton'
      self.act(*self.call(whole, shard, after))
    # No learner's machines stand idle before there is a syncer.
    self._submit(whole, whole.first_learners, f'--dependency=after:{job}')
    return 0

  def add(self, whole: JobSpec, learner: int) -> int:
    joining = (only(whole, learner),)
    self._refuse_queued(whole, joining)
    self._submit(whole, joining)
    return 0

  def remove(self, whole: JobSpec, learner: int) -> int:
    task = only(whole, learner)
    commands = cancel_commands(self.act(queue_command(whole, task)), task)
    if not commands and not self.dry_run:
      raise ConfigError([f'--learner={learner}: is not in the queue'])
    for argv in commands:
      self.act(argv)
    return 0

  def _refuse_queued(self, whole: JobSpec, learners: Sequence[Task]) -> None:
    listed = {}  # Learners of one slice are in one list.
    for task in learners:
      command = queue_command(whole, task)
      if command not in listed:
        listed[command] = self.act(command)
      if cancel_commands(listed[command], task):
        raise ConfigError(
          [f'{whole.role_name(task)}: is in the queue already; see squeue']
        )

  def _submit(
    self, whole: JobSpec, learners: Sequence[Task], *options: str
  ) -> None:
    for alike in arrays(learners):
      for met in whole.rendezvous_of(alike[0]):
        self.act(*self.call(whole, met, *options))
      self.act(*self.learners(whole, alike, *options))

  # Calls of sbatch, which reads a script: arguments and script of each.

  def syncer(self, whole: JobSpec) -> tuple[tuple[str, ...], str]:
    """The job of the syncer; two of one run never run at once."""
    return self.call(whole, whole.syncer, '--dependency=singleton')

  def learners(self, whole: JobSpec, learners: Sequence[Task], *options: str):
    """A job array with one element for each learner, indexed by its id, or for
    each slice of one of several.

    Args:
      learners: one of `arrays`.
    """
    assert len(arrays(learners)) == 1, 'learners of one array are alike'
    if learners[0].slices > 1:
      slices = whole.slices_of(learners[0])
      any_one = _but(slices[0], _slice_flag(slices[0]))
      indices = ','.join(str(x.slice) for x in slices)
    else:
      any_one = _but(learners[0], _learner_flag(learners[0]))
      indices = ','.join(str(x.learner) for x in learners)
    return self.call(whole, any_one, f'--array={indices}', *options)

  def call(
    self, whole: JobSpec, role: Task, *options: str
  ) -> tuple[tuple[str, ...], str]:
    """Returns one call of sbatch: its arguments and its script."""
    is_array = role.kind == LEARNER
    name = _job_name(whole, role)
    # Not as #SBATCH lines: an argument of a program needs no quoting.
    log = f'{whole.workdir}/logs/'.replace('%', '%%')
    element = role.name
    if is_array:
      element = f'{LEARNER}-%a'
      if role.slice is not None:
        element = f'{learner_name(role.learner)}-slice-%a'
    argv = (
      *('sbatch', '--parsable', f'--job-name={name}'),
      *(f'--output={log}{element}.log', '--open-mode=append', '--requeue'),
      f'--signal=B:TERM@{whole.grace_s + SIGNAL_EARLY_S}',
      *_resources(role),
      *options,
      *(*self.sbatch, *role.resources.sbatch),  # What is given last wins.
    )
    return argv, _script(whole, name, role)


def arrays(learners: Sequence[Task]) -> list[list[Task]]:
  """Groups learners by what differs but for the id, their array's index.

  One of several slices is a group by itself.
  """
  alike = {}
  for task in learners:
    own = _but(task, _learner_flag(task)).arguments
    sliced = task.learner if task.slices > 1 else None
    alike.setdefault((task.resources, own, sliced), []).append(task)
  return [*alike.values()]


def _learner_flag(task: Task) -> str:
  return f'--learner={task.learner}'


def _slice_flag(task: Task) -> str:
  return f'--slice={task.slice}'


def _but(task: Task, own: str) -> Task:
  """Returns a task without a flag that the index of an array gives."""
  assert own in task.arguments, f'{own} not in {task.arguments}'
  fixed = tuple(x for x in task.arguments if x != own)
  return dataclasses.replace(task, arguments=fixed)


def _job_name(whole: JobSpec, role: Task) -> str:
  if role.kind != LEARNER:
    return whole.role_name(role)
  is_one = role.slices == 1
  return f'{whole.name}-{LEARNER if is_one else learner_name(role.learner)}'


def queue_command(whole: JobSpec, task: Task) -> tuple[str, ...]:
  """Lists 'JOB INDEX STATE' of every element of the array that has a learner.

  Of one of several slices all is its own, and its rendezvous is listed too.
  """
  met = (whole.role_name(each) for each in whole.rendezvous_of(task))
  names = ','.join((_job_name(whole, task), *met))
  return (
    *('squeue', '--me', '--noheader', '--array'),
    *(f'--name={names}', '--format=%i %K %T'),
  )


def cancel_commands(listed: str, task: Task) -> list[tuple[str, ...]]:
  """Returns commands that dequeue a learner, from `queue_command`'s output."""
  rows = (line.split() for line in listed.splitlines())
  commands = []
  for job, index, state in rows:
    if task.slices == 1 and index != str(task.learner):
      continue
    # A script that runs must know that it is not to come back.
    how = () if state == 'PENDING' else ('--batch', '--signal=USR1')
    commands.append(('scancel', *how, job))
  return commands


def _resources(role: Task) -> list[str]:
  place = role.resources
  options = [f'--nodes={place.accelerator.hosts}', '--ntasks-per-node=1']
  if place.accelerator.name == GPU:
    options.append(f'--gpus-per-node={place.accelerator.chips_per_host}')
  if place.cpus:
    options.append(f'--cpus-per-task={place.cpus}')
  if place.memory_gib:
    options.append(f'--mem={place.memory_gib}G')
  return options


def _meeting(whole: JobSpec, role: Task, logs: str) -> str:
  """Returns what stands before a command by which agents find the rendezvous.

  Its job writes down where it is, as the syncer's does.
  """
  if role.slice is None and role.kind != RENDEZVOUS:
    return ''
  name = f'{learner_name(role.learner)}-{RENDEZVOUS}'
  file = shlex.quote(f'{logs}/{name}.address')
  if role.kind == RENDEZVOUS:
    port = whole.rendezvous_port(role)
    return f'echo "$host:{port}" >{file}.part && mv {file}.part {file}\n  '
  return (
    f'until [[ -s {file} ]]; do sleep 5; done\n  rendezvous=$(cat {file})\n  '
  )


def _script(whole: JobSpec, name: str, role: Task) -> str:
  is_learner, logs = role.kind == LEARNER, f'{whole.workdir}/logs'
  is_slice = role.slice is not None
  known = Addresses(
    '$host',
    '$syncer',
    '$SLURM_PROCID',
    '$coordinator',
    INDEX if is_learner and not is_slice else '',
    '$rendezvous',
  )
  command = f'"$@" {shell_command([whole.python], whole, role, known)}'
  if is_learner:
    command += f' "--{"slice" if is_slice else LEARNER}={INDEX}"'
  command = _meeting(whole, role, logs) + command
  functions, log = {'run_role': command}, ''
  if role.kind == SYNCER and whole.evaluator:
    log = f'{logs}/{whole.evaluator.name}.log'
    own = ('env', *map('='.join, whole.evaluator.environment))
    functions['run_evaluator'] = shell_command(
      [*own, whole.python], whole, whole.evaluator, Addresses('$host')
    )
  values = {
    'name': name,
    'kind': role.kind,
    'hosts': role.resources.accelerator.hosts,
    'logs': logs,
    'evaluator_log': log,
    'port': whole.port,
    'fatal': ' '.join(map(str, EXITS_FATAL)),
    'stopped': EXIT_STOPPED,
    'leave_s': LEAVE_S,
    'restarts_max': whole.restarts_max,
  }
  exported = {f'export {key}': value for key, value in whole.variables(role)}
  title = f'{name}: written by launch.main; read by sbatch.'
  return script('slurm.sh', title, {**exported, **values}, functions)
