# SPDX-License-Identifier: Apache-2.0
"""The back ends of a launch, which start it and add and remove learners."""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from diloco.config.sections import ConfigError
from launch.backends import commands, gke, provisioner, queued_resources, slurm
from launch.backends.gke import DATA_FOLDER, GkeOptions
from launch.backends.manifest_text import as_yaml
from launch.backends.provisioner import Provisioner
from launch.backends.queued_resources import Cloud
from launch.exit_codes import EXITS_FATAL
from launch.job import JobSpec, Task, only

SYNCER_JOB = 'SYNCER_JOB'  # Known once it is submitted.

Act = Callable[[Sequence[str], str], str]  # argv, standard input -> output.
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Gke:
  """Launches by kubectl, in its current cluster."""

  act: Act
  namespace: str = 'default'
  options: GkeOptions = dataclasses.field(default_factory=GkeOptions)

  def start(self, whole: JobSpec) -> int:
    self._apply(gke.manifests(whole, self.options))
    return 0

  def add(self, whole: JobSpec, learner: int) -> int:
    self._apply([gke.job_set(whole, only(whole, learner), self.options)])
    return 0

  def remove(self, whole: JobSpec, learner: int) -> int:
    name = whole.role_name(only(whole, learner))
    self.act(self._kubectl('delete', 'jobset', name), '')
    return 0

  def _apply(self, manifests: Sequence[dict]) -> None:
    self.act(self._kubectl('apply', '--filename=-'), as_yaml(manifests))

  def _kubectl(self, *words: str) -> tuple[str, ...]:
    return ('kubectl', f'--namespace={self.namespace}', *words)


@dataclasses.dataclass(frozen=True)
class Slurm:
  """Launches by sbatch, from a machine that shares the workdir."""

  act: Act
  given: tuple[str, ...] = ()  # Options for sbatch.
  makes_folders: bool = True  # False: it only says what it would do.

  def start(self, whole: JobSpec) -> int:
    self._refuse_queued(whole, whole.first_learners)
    if self.makes_folders:  # Slurm opens the logs before any script runs.
      logs = pathlib.Path(whole.workdir) / 'logs'
      logs.mkdir(parents=True, exist_ok=True)
    syncer = slurm.syncer_submission(whole, self.given)
    # 'JOB' or 'JOB;CLUSTER'; nothing in a dry run.
    job = self.act(syncer.argv, syncer.script).strip().partition(';')[0]
    for shard in whole.shards:
      started = f'--dependency=after:{job or SYNCER_JOB},singleton'
      each = slurm.shard_submission(whole, shard, (started, *self.given))
      self.act(each.argv, each.script)
    # No learner's machines stand idle before there is a syncer.
    given = (f'--dependency=after:{job or SYNCER_JOB}', *self.given)
    learners = slurm.learners_submission(whole, whole.first_learners, given)
    self.act(learners.argv, learners.script)
    return 0

  def add(self, whole: JobSpec, learner: int) -> int:
    joining = (only(whole, learner),)
    self._refuse_queued(whole, joining)
    each = slurm.learners_submission(whole, joining, self.given)
    self.act(each.argv, each.script)
    return 0

  def remove(self, whole: JobSpec, learner: int) -> int:
    only(whole, learner)
    listed = self.act(slurm.queue_command(whole), '')
    commands = slurm.cancel_commands(listed, learner)
    if not commands and self.makes_folders:
      raise ConfigError([f'--learner={learner}: is not in the queue'])
    for argv in commands:
      self.act(argv, '')
    return 0

  def _refuse_queued(self, whole: JobSpec, learners: Sequence[Task]) -> None:
    listed = self.act(slurm.queue_command(whole), '')
    for each in learners:
      if slurm.cancel_commands(listed, each.learner):
        raise ConfigError(
          [f'{whole.role_name(each)}: is in the queue already; see squeue']
        )


@dataclasses.dataclass(frozen=True)
class QueuedResources:
  """Launches by gcloud; stays, and recreates slices that were taken away."""

  act: Act
  cloud: Cloud
  say: Say
  sleep: Callable[[float], None] = time.sleep
  now_s: Callable[[], float] = time.monotonic

  def start(self, whole: JobSpec) -> int:
    if self._syncer(whole) is None:
      provisioner.create_machine(whole, whole.syncer, self.cloud, self._run)
    lead = self._known_syncer(whole)
    for shard in whole.shards:
      if self._address(whole, shard) is None:
        provisioner.create_machine(whole, shard, self.cloud, self._run, lead)
    watched = self._provisioner(whole)
    watched.want([each.learner for each in whole.first_learners], self.now_s())
    return self._stay(watched)

  def watch(self, whole: JobSpec) -> int:
    """Watches a run that another launcher has started."""
    return self._stay(self._provisioner(whole))

  def add(self, whole: JobSpec, learner: int) -> int:
    syncer = self._known_syncer(whole)
    provisioner.create(whole, learner, self.cloud, syncer, 1, self._run)
    return 0

  def remove(self, whole: JobSpec, learner: int) -> int:
    only(whole, learner)
    self._run(queued_resources.delete_learner(whole, learner, self.cloud))
    return 0

  def _stay(self, watched: Provisioner) -> int:
    """Waits until the syncer has ended for good; returns 0 on success."""
    while True:
      watched.step(self.now_s())
      code = watched.syncer_exit()
      if code is not None:
        break
      self.sleep(provisioner.LOOK_EVERY_S)
    watched.remove_all()
    self.say(f'the syncer has ended with exit code {code}; slices given back')
    return code if code in (0, *EXITS_FATAL) else 1

  def _provisioner(self, whole: JobSpec) -> Provisioner:
    return Provisioner(
      whole, self.cloud, self._known_syncer(whole), self._run, self.say
    )

  def _known_syncer(self, whole: JobSpec) -> str:
    address = self._syncer(whole)
    if address is None:
      raise ConfigError(
        [f'{whole.role_name(whole.syncer)}: there is no such machine']
      )
    return f'{address}:{whole.port}'

  def _syncer(self, whole: JobSpec) -> str | None:
    return self._address(whole, whole.syncer)

  def _address(self, whole: JobSpec, role: Task) -> str | None:
    return queued_resources.address(whole, role, self.cloud, self._run)

  def _run(self, argv: Sequence[str]) -> str:
    return self.act(argv, '')


@dataclasses.dataclass(frozen=True)
class BackendKind:
  """A back end that `--to` names.

  Attributes:
    make: takes the parsed flags, what runs a command, and what prints a line.
    in_containers: True if processes run in an image and find their files in a
      secret; False: on machines that share this one's folders.
    tpus: True if it takes TPUs only, False if it takes none, None for any.
    stays: True if the launcher stays, to recreate what was taken away.
    shares_workdir: takes the parsed flags; True if all processes see one
      workdir.
    flags: its own, name to default and help; the default's type is the flag's.
    needs: those that must be given.
    notes: takes the parsed flags; yields what the user may not expect.
  """

  make: Callable[[Any, Act, Say], Any]
  in_containers: bool = False
  tpus: bool | None = None
  stays: bool = False
  shares_workdir: Callable[[Any], bool] = lambda given: False
  flags: Mapping[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)
  needs: tuple[str, ...] = ()
  notes: Callable[[Any], Iterable[str]] = lambda given: ()


def check_evaluator(whole: JobSpec, is_shared: bool) -> None:
  """Refuses an evaluator that would not see the checkpoints of all shards.

  Raises:
    ConfigError: says what would do.
  """
  if whole.shards and whole.evaluator and not is_shared:
    raise ConfigError(
      [
        f'config.syncer.shards={1 + len(whole.shards)} with '
        'config.run.eval_every_rounds: the evaluator reads the checkpoints of '
        'all shards; give one workdir to all (--shared_claim, or Slurm), or 0 '
        'rounds'
      ]
    )


def cloud_of(given) -> Cloud:
  """Returns where queued resources are created, by the parsed flags."""
  return Cloud(
    given.project,
    given.zone,
    given.service_account,
    given.subnetwork,
    given.internal_ips,
  )


def _passing_pods(given) -> Iterator[str]:
  if not (given.shared_claim or given.results_bucket):
    yield (
      "learners' metrics and tapes go with their pods; --results_bucket or "
      '--shared_claim keeps them'
    )


def _passing_slices(given) -> Iterator[str]:
  if not given.results_bucket:
    yield (
      "learners' metrics and tapes go with their slices; --results_bucket "
      'keeps them'
    )


def _gke(given, act: Act, say: Say) -> Gke:
  del say
  names = (each.name for each in dataclasses.fields(GkeOptions))
  options = GkeOptions(**{name: getattr(given, name) for name in names})
  return Gke(act, given.namespace, options)


def _slurm(given, act: Act, say: Say) -> Slurm:
  del say
  return Slurm(act, tuple(given.sbatch), not given.dry_run)


def _queued_resources(given, act: Act, say: Say) -> QueuedResources:
  del act  # It reads what its commands print, and says more itself.
  return QueuedResources(commands.run, cloud_of(given), say)


BACKENDS = {
  'gke': BackendKind(
    _gke,
    in_containers=True,
    shares_workdir=lambda given: bool(given.shared_claim),
    notes=_passing_pods,
    flags={
      'namespace': ('default', 'Namespace of all objects.'),
      'storage_class': (
        '',
        "Storage class of the syncer's volume; default: the cluster's.",
      ),
      'shared_claim': (
        '',
        'Claim that many can write to, as the workdir of all roles.',
      ),
      'data_claim': ('', f'Claim that all roles read at {DATA_FOLDER}.'),
      'data_bucket': (
        '',
        f'Bucket of Cloud Storage that all roles read at {DATA_FOLDER}.',
      ),
      'queue': ('', 'Local queue of Kueue that admits the roles.'),
      'ttl_s': (
        0,
        'Seconds after which a role that has ended is deleted; 0: never.',
      ),
    },
  ),
  'queued_resources': BackendKind(
    _queued_resources,
    in_containers=True,
    notes=_passing_slices,
    tpus=True,
    stays=True,
    flags={
      'project': ('', 'Project of all machines.'),
      'zone': ('', 'Zone of all machines.'),
      'service_account': ('', 'Account of all machines.'),
      'subnetwork': ('', 'Subnetwork of all machines.'),
      'internal_ips': (False, 'gives machines no external addresses.'),
    },
    needs=('project', 'zone'),
  ),
  'slurm': BackendKind(
    _slurm,
    tpus=False,
    shares_workdir=lambda given: True,
    flags={
      'sbatch': (
        [],
        'passes an option on to sbatch, such as --partition=a100.',
      )
    },
  ),
}
