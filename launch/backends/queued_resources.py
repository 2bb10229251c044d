# SPDX-License-Identifier: Apache-2.0
"""A launch on TPU VMs: the gcloud commands of its machines.

The syncer is a CPU machine of Compute Backend, every learner a queued resource
of its own. One for several would be a single JAX world.
"""

import dataclasses
import json
import re
from collections.abc import Sequence

from launch.backends.commands import CommandFailed, Run
from launch.backends.startup import EXIT_ATTRIBUTE
from launch.job import ON_DEMAND, RESERVATION, SPOT, JobSpec, Task

SCOPES = '--scopes=https://www.googleapis.com/auth/cloud-platform'
QUEUED = ('compute', 'tpus', 'queued-resources')
CAPACITY = {
  SPOT: ('--spot',),
  ON_DEMAND: (),
  RESERVATION: (),  # By its name, which only `gcloud alpha` takes.
}
# Machines of Compute Engine with more memory for a CPU are another kind.
GIB_PER_CPU_MAX = 6.5
EXTENDED = ('--custom-extensions',)
ABSENT = ('NOT_FOUND', 'not found', 'notFound')


@dataclasses.dataclass(frozen=True)
class Cloud:
  """The project and zone in which machines are created."""

  project: str
  zone: str
  service_account: str = ''  # Default: the project's.
  subnetwork: str = ''  # Default: the project's.
  internal_ips: bool = False  # No addresses from outside.

  @property
  def place(self) -> tuple[str, str]:
    return f'--project={self.project}', f'--zone={self.zone}'


@dataclasses.dataclass(frozen=True)
class QueuedSlice:
  """A queued resource of the run, as the service tells of it."""

  learner: int
  state: str  # 'ACTIVE', 'SUSPENDED', …
  attempt: int  # How often this learner's was asked for.


def create_machine(
  whole: JobSpec, role: Task, cloud: Cloud, script_file: str
) -> tuple[str, ...]:
  """Makes the machine of the syncer or of a shard; its disk is the workdir."""
  place = role.resources
  return (
    *_instances('create', whole, role, cloud),
    f'--custom-cpu={place.cpus}',
    f'--custom-memory={place.memory_gib}GB',
    *(EXTENDED if place.memory_gib > GIB_PER_CPU_MAX * place.cpus else ()),
    '--image-family=cos-stable',
    '--image-project=cos-cloud',
    f'--boot-disk-size={place.disk_gib}GB',
    '--metadata=enable-guest-attributes=TRUE',
    f'--metadata-from-file=startup-script={script_file}',
    SCOPES,
    f'--labels=run={whole.name},role={role.kind}',
    *_network(cloud, '--subnet', '--no-address'),
    '--quiet',
  )


def address(whole: JobSpec, role: Task, cloud: Cloud, run: Run) -> str | None:
  """Returns the IP address of such a machine; None where there is none."""
  argv = (
    *_instances('describe', whole, role, cloud),
    '--format=value(networkInterfaces[0].networkIP)',
  )
  return _unless_absent(run, argv)


def syncer_exit(whole: JobSpec, cloud: Cloud, run: Run) -> int | None:
  """Exit code with which the syncer has ended for good; None: it has not."""
  argv = (
    *_instances('get-guest-attributes', whole, whole.syncer, cloud),
    f'--query-path={EXIT_ATTRIBUTE}',
    '--format=value(value)',
  )
  text = _unless_absent(run, argv)
  return int(text) if text else None


def create_learner(
  whole: JobSpec, role: Task, cloud: Cloud, script_file: str, attempt: int
) -> tuple[str, ...]:
  """Asks for one learner's slice."""
  place = role.resources
  name = whole.role_name(role)
  track, capacity = ('gcloud',), CAPACITY[place.capacity]
  if place.capacity == RESERVATION:
    track = ('gcloud', 'alpha')
    capacity = (f'--reservation={place.reservation}',)
  return (
    *track,
    *QUEUED,
    'create',
    name,
    f'--node-id={name}',
    *cloud.place,
    f'--accelerator-type={place.accelerator.name}',
    f'--runtime-version={place.accelerator.runtime_version}',
    *capacity,
    SCOPES,
    f'--metadata-from-file=startup-script={script_file}',
    f'--labels=run={whole.name},role=learner,attempt={attempt}',
    *_network(cloud, '--subnetwork', '--internal-ips'),
    '--async',
    '--quiet',
  )


def delete_learner(
  whole: JobSpec, learner: int, cloud: Cloud
) -> tuple[str, ...]:
  """Gives a slice back, or takes its request out of the queue."""
  name = whole.role_name(whole.learners[learner])
  return (
    'gcloud',
    *QUEUED,
    'delete',
    name,
    *cloud.place,
    '--force',  # Also where it has machines.
    '--async',
    '--quiet',
  )


def list_learners(cloud: Cloud) -> tuple[str, ...]:
  """All queued resources of the zone, as JSON."""
  return ('gcloud', *QUEUED, 'list', *cloud.place, '--format=json')


def slices(whole: JobSpec, listed: str) -> list[QueuedSlice]:
  """Returns the slices of the run's learners from the output of
  `list_learners`.
  """
  found = []
  for each in json.loads(listed or '[]'):
    name = each['name'].rpartition('/')[2]
    match = re.fullmatch(rf'{re.escape(whole.name)}-learner-(\d+)', name)
    if match and int(match[1]) < len(whole.learners):
      state = each.get('state', {}).get('state', 'STATE_UNSPECIFIED')
      found.append(QueuedSlice(int(match[1]), state, _attempt(each)))
  return sorted(found, key=lambda each: each.learner)


def _attempt(listed: dict) -> int:
  specs: Sequence[dict] = listed.get('tpu', {}).get('nodeSpec', [])
  labels = specs[0].get('node', {}).get('labels', {}) if specs else {}
  return int(labels.get('attempt', 1))


def _instances(
  verb: str, whole: JobSpec, role: Task, cloud: Cloud
) -> tuple[str, ...]:
  name = whole.role_name(role)
  return ('gcloud', 'compute', 'instances', verb, name, *cloud.place)


def _network(cloud: Cloud, subnetwork: str, internal: str) -> list[str]:
  """Flags that a CPU machine and a TPU have under two names."""
  flags = []
  if cloud.subnetwork:
    flags.append(f'{subnetwork}={cloud.subnetwork}')
  if cloud.internal_ips:
    flags.append(internal)
  if cloud.service_account:
    flags.append(f'--service-account={cloud.service_account}')
  return flags


def _unless_absent(run: Run, argv: Sequence[str]) -> str | None:
  try:
    return run(argv).strip()
  except CommandFailed as error:
    if any(word in error.stderr for word in ABSENT):
      return None
    raise
