# SPDX-License-Identifier: Apache-2.0
"""A launch for Slurm: a job for the syncer, a job array of learners.

The workdir is a folder that all nodes share. The syncer's job writes there at
which host:port it listens; an element of the array is one learner, which reads
that at each of its starts. A job that ends with anything but success or a fatal
exit code requeues itself. The nodes of a learner are the tasks of one job step:
srun ends all of them when one has failed.
"""

import dataclasses
import pathlib
import shlex
import signal
from collections.abc import Sequence

from diloco.config.sections import ConfigError
from launch.backends.base import Addresses, Backend, shell_command
from launch.exit_policy import EXIT_STOPPED, EXITS_FATAL
from launch.job import GPU, LEAVE_S, SIZED, JobSpec, only, option
from launch.program import LEARNER, Task

# Slurm looks at time limits once a minute: a signal may come that much early,
# and a process that has left early loses nothing but that minute.
SIGNAL_EARLY_S = 30
# The first address that is not of loopback, unless the user knows better.
HOST = 'host=${DILOCO_HOST:-$(hostname -I)}; host=${host%% *}'
ADDRESS = 'logs/syncer.address'  # In the workdir.
# Where the first node of a learner listens, as JAX itself does it under Slurm:
# two learners on one node are two jobs.
PORT_MIN = 61440
PORTS = 4096
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
      self.act(*self.shard(whole, shard, job))
    # No learner's machines stand idle before there is a syncer.
    self.act(
      *self.learners(whole, whole.first_learners, f'--dependency=after:{job}')
    )
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
    for each in learners:
      if cancel_commands(listed, each.learner):
        raise ConfigError(
          [f'{whole.role_name(each)}: is in the queue already; see squeue']
        )

  # Calls of sbatch, which reads a script: arguments and script of each.

  def syncer(self, whole: JobSpec) -> tuple[tuple[str, ...], str]:
    """The job of the syncer; two of one run never run at once."""
    address = shlex.quote(f'{whole.workdir}/{ADDRESS}')
    before = f"""\
{HOST}
address={address}
echo "$host:{whole.port}" >"$address.part"
mv "$address.part" "$address"\
{_evaluator(whole)}\
"""
    options = ('--dependency=singleton',)
    return self._call(whole, whole.syncer, before, options)

  def shard(self, whole: JobSpec, shard: Task, job: str):
    """The job of a shard, which waits for the job of the syncer that leads.

    Two of one shard never run at once.
    """
    options = (f'--dependency=after:{job},singleton',)
    return self._call(whole, shard, _syncer_is_known(whole), options)

  def learners(self, whole: JobSpec, learners: Sequence[Task], *options: str):
    """A job array with one element for each learner, indexed by its id.

    Args:
      learners: all of them, or those that join.
    """
    assert learners, 'a job array without learners'
    indices = ','.join(str(each.learner) for each in learners)
    # They differ in their id alone, which the array's index is.
    own = f'--learner={learners[0].learner}'
    assert own in learners[0].arguments, f'{own} not in {learners[0].arguments}'
    fixed = tuple(each for each in learners[0].arguments if each != own)
    any_learner = dataclasses.replace(learners[0], arguments=fixed)
    before = _syncer_is_known(whole) + _meeting(whole, any_learner)
    array = f'--array={indices}'
    return self._call(whole, any_learner, before, (array, *options))

  def _call(
    self, whole: JobSpec, role: Task, before: str, options: Sequence[str]
  ) -> tuple[tuple[str, ...], str]:
    """Returns one call of sbatch; its script starts with `before`."""
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
      *self.sbatch,  # What is given last wins.
    )
    return argv, _script(whole, name, role, before)


def _evaluator(whole: JobSpec) -> str:
  """Returns shell code that starts the evaluator, which ends with the job."""
  if whole.evaluator is None:
    return ''
  command = shell_command(
    [whole.python], whole, whole.evaluator, Addresses('$host')
  )
  log = shlex.quote(f'{whole.workdir}/logs/{whole.evaluator.name}.log')
  return f"""
until {command}; do sleep 10; done >>{log} 2>&1 &\
"""


def _syncer_is_known(whole: JobSpec) -> str:
  """Returns shell code that waits for the syncer's address."""
  address = shlex.quote(f'{whole.workdir}/{ADDRESS}')
  return f"""\
until [[ -s {address} ]]; do
  [[ -z $told ]] || leave {128 + signal.SIGTERM}
  sleep 5
done
syncer=$(cat {address})
export syncer\
"""


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


def _script(whole: JobSpec, name: str, role: Task, before: str) -> str:
  fatal = '|'.join(map(str, EXITS_FATAL))
  known = Addresses(
    '$host',
    '$syncer',
    '$SLURM_PROCID',
    '$coordinator',
    '$SLURM_ARRAY_TASK_ID' if role.kind == LEARNER else '',
  )
  command = shell_command([whole.python], whole, role, known)
  if role.kind == LEARNER:
    command += ' "--learner=$SLURM_ARRAY_TASK_ID"'
  # Each node of a learner has an address of its own, so this runs there.
  is_one_of_many = role.resources.accelerator.hosts > 1
  run = _one_of_many(command) if is_one_of_many else f'exec {command}\n'
  on_node = shlex.quote(f'{HOST}\n{run}')
  exports = '\n'.join(
    f'export {name}={shlex.quote(value)}' for name, value in whole.environment
  )
  return f"""\
#!/bin/bash
# {name}: written by launch.main; read by sbatch.
{exports}

# Ends the job, or puts it back into the queue; $1: the exit code.
leave() {{
  if [[ -n $removed ]]; then
    echo '{name}: removed, no restart'
    exit 0
  fi
  case $1 in
    0) exit 0 ;;
    {fatal})
      echo "{name}: exit code $1 would come again, no restart"
      exit "$1" ;;
  esac
  if (( ${{SLURM_RESTART_COUNT:-0}} >= {whole.restarts_max} )); then
    echo "{name}: exit code $1, restarts used up"
    exit "$1"
  fi
  echo "{name}: exit code $1, back into the queue"
  scontrol requeue "$SLURM_JOB_ID" || exit "$1"
  exit 0
}}

# The end of the job's time, a preemption, or a removal (USR1): the process is
# told, and leaves within {whole.notice_s} s.
told= removed= child=
tell() {{
  told=1
  [[ -z $child ]] || kill -TERM "$child"
}}
trap tell TERM
trap 'removed=1; tell' USR1

{before}
srun --kill-on-bad-exit=1 bash -c {on_node} &
child=$!
[[ -z $told ]] || kill -TERM "$child"
while :; do
  told=
  wait "$child"
  code=$?
  [[ -n $told ]] || break  # Else it was the signal that ended the wait.
done
{_read_refusal(role)}leave "$code"
"""


def _meeting(whole: JobSpec, role: Task) -> str:
  """Returns shell code by which a learner's nodes meet, and record a
  refusal.
  """
  if role.resources.accelerator.hosts == 1:
    return ''
  logs = shlex.quote(f'{whole.workdir}/logs')
  # The file's name is new: a node that has once missed a file on a shared
  # disk may go on missing it for a while.
  return f"""
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
coordinator=$first:$(({PORT_MIN} + SLURM_JOB_ID % {PORTS}))
refusal={logs}/refusal.$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}
export coordinator refusal\
"""


def _one_of_many(command: str) -> str:
  """Returns the command of each node; srun reports the highest exit code only.

  A refusal on one node would be lost among the deaths that it causes on the
  others. A node that has left in good order stays a while, lest srun end the
  others.
  """
  fatal = '|'.join(map(str, EXITS_FATAL))
  return f"""\
trap : TERM  # srun tells the program too, and this goes on behind it.
{command}
code=$?
case $code in
  {fatal}) echo "$code" >"$refusal" ;;
  {EXIT_STOPPED}) sleep {LEAVE_S} ;;
esac
exit "$code"
"""


def _read_refusal(role: Task) -> str:
  if role.resources.accelerator.hosts == 1:
    return ''
  return '[[ ! -s $refusal ]] || code=$(cat "$refusal")\n'
