# SPDX-License-Identifier: Apache-2.0
"""A launch for Slurm: a job for the syncer, a job array of alike learners.

The workdir is a folder that all nodes share. The syncer's job writes there at
which host:port it listens; an element of the array is one learner, which reads
that at each of its starts. A job that ends with anything but success or a fatal
exit code requeues itself. The nodes of a learner are the tasks of one job step:
srun ends all of them when one has failed.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from diloco.config.sections import ConfigError
from launch.backends.base import Addresses, Backend, script, shell_command
from launch.job import GPU, LEAVE_S, SIZED, JobSpec, only, option
from launch.program import LEARNER, SYNCER, Task
from launch.supervisor import EXIT_STOPPED, EXITS_FATAL

# Slurm looks at time limits once a minute: a signal may come that much early,
# and a process that has left early loses nothing but that minute.
SIGNAL_EARLY_S = 30
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
    for alike in arrays(whole.first_learners):
      self.act(*self.learners(whole, alike, f'--dependency=after:{job}'))
    return 0

  def add(self, whole: JobSpec, learner: int) -> int:
    joining = (only(whole, learner),)
    self._refuse_queued(whole, joining)
    self.act(*self.learners(whole, joining))
    return 0

  def remove(self, whole: JobSpec, learner: int) -> int:
    only(whole, learner)
    commands = cancel_commands(self.act(queue_command(whole)), learner)
    if not commands and not self.dry_run:
      raise ConfigError([f'--learner={learner}: is not in the queue'])
    for argv in commands:
      self.act(argv)
    return 0

  def _refuse_queued(self, whole: JobSpec, learners: Sequence[Task]) -> None:
    listed = self.act(queue_command(whole))
    for task in learners:
      if cancel_commands(listed, task.learner):
        raise ConfigError(
          [f'{whole.role_name(task)}: is in the queue already; see squeue']
        )

  # Calls of sbatch, which reads a script: arguments and script of each.

  def syncer(self, whole: JobSpec) -> tuple[tuple[str, ...], str]:
    """The job of the syncer; two of one run never run at once."""
    return self.call(whole, whole.syncer, '--dependency=singleton')

  def learners(self, whole: JobSpec, learners: Sequence[Task], *options: str):
    """A job array with one element for each learner, indexed by its id.

    Args:
      learners: one of `arrays`.
    """
    assert len(arrays(learners)) == 1, 'learners of one array are alike'
    indices = ','.join(str(x.learner) for x in learners)
    fixed = _but_its_id(learners[0])
    any_learner = dataclasses.replace(learners[0], arguments=fixed)
    return self.call(whole, any_learner, f'--array={indices}', *options)

  def call(
    self, whole: JobSpec, role: Task, *options: str
  ) -> tuple[tuple[str, ...], str]:
    """Returns one call of sbatch: its arguments and its script."""
    is_array = role.kind == LEARNER
    name = f'{whole.name}-{LEARNER}' if is_array else whole.role_name(role)
    # Not as #SBATCH lines: an argument of a program needs no quoting.
    log = f'{whole.workdir}/logs/'.replace('%', '%%')
    element = f'{LEARNER}-%a' if is_array else role.name
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
  """Groups learners by what differs but for the id, their array's index."""
  alike = {}
  for task in learners:
    alike.setdefault((task.resources, _but_its_id(task)), []).append(task)
  return [*alike.values()]


def _but_its_id(task: Task) -> tuple[str, ...]:
  own = f'--learner={task.learner}'
  assert own in task.arguments, f'{own} not in {task.arguments}'
  return tuple(x for x in task.arguments if x != own)


def queue_command(whole: JobSpec) -> tuple[str, ...]:
  """Lists 'JOB INDEX STATE' of every element of the run's arrays."""
  return (
    *('squeue', '--me', '--noheader', '--array'),
    *(f'--name={whole.name}-{LEARNER}', '--format=%i %K %T'),
  )


def cancel_commands(listed: str, learner: int) -> list[tuple[str, ...]]:
  """Returns commands that dequeue a learner, from `queue_command`'s output."""
  rows = (line.split() for line in listed.splitlines())
  commands = []
  for job, index, state in rows:
    if index != str(learner):
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


def _script(whole: JobSpec, name: str, role: Task) -> str:
  is_learner, logs = role.kind == LEARNER, f'{whole.workdir}/logs'
  known = Addresses(
    '$host',
    '$syncer',
    '$SLURM_PROCID',
    '$coordinator',
    '$SLURM_ARRAY_TASK_ID' if is_learner else '',
  )
  command = f'"$@" {shell_command([whole.python], whole, role, known)}'
  if is_learner:
    command += ' "--learner=$SLURM_ARRAY_TASK_ID"'
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
