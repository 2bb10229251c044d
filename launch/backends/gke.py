# SPDX-License-Identifier: Apache-2.0
"""GKE: one JobSet per role, and what the roles share.

Of a learner of several slices each slice is a JobSet, and so is its rendezvous:
it lives on when a slice, or the syncer, starts again.

Every role is a JobSet of one Job, so that one slice restarts alone, at once,
and ends for good with exit code 0 or a fatal one. The syncer is one as well: a
StatefulSet would start it again after its run has ended. A Service gives it a
name that stays, a volume claim what a restarted one goes on from.
"""

import dataclasses
import pathlib
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from diloco.config.hardware import V5E, V5P, V6E
from launch import supervisor
from launch.backends.base import Addresses, Backend, addressed
from launch.job import (
  CONFIG_FOLDER,
  CONTAINERS,
  COORDINATOR_PORT,
  RESERVATION,
  SECRET_FOLDER,
  SIZED,
  SPOT,
  JobSpec,
  only,
  option,
)
from launch.program import RENDEZVOUS, SHARD, SYNCER, Task
from launch.supervisor import EXITS_FATAL

DATA_FOLDER = '/data'
READABLE_BY_GROUP = 0o440  # Keys that all users can read are refused.
OWN_ADDRESS = '$(DILOCO_HOST)'  # Kubernetes fills these in.
OWN_INDEX = '$(DILOCO_HOST_INDEX)'
SLICE = 'slice'  # The one Job of a JobSet.
# What node pools call a chip.
SLICES = {
  V5E: 'tpu-v5-lite-podslice',
  V5P: 'tpu-v5p-slice',
  V6E: 'tpu-v6e-slice',
}
DISCOVERY_PORT = 8471  # Among the hosts of one slice.
SPOT_NODES = 'cloud.google.com/gke-spot'
PROBED_EVERY_S = 10
STARTS_S = 3600  # A checkpoint of a hundred GB is read within.
# The syncer replaces its status each second, but for when it writes its result.
SILENT_S = 1800

# In a container it is small, unless a volume is there.
SHARED_MEMORY = {'emptyDir': {'medium': 'Memory'}}

# GKE mounts buckets in pods that have an annotation.
FUSE_PODS = {'gke-gcsfuse/volumes': 'true'}
TEMPLATES = yaml.safe_load(
  pathlib.Path(__file__).with_name('gke.yaml').read_text()
)


def filled(template: str, **values: Any) -> dict:
  """Returns the object of a template, by its name, with these values."""

  def fill(part):
    if isinstance(part, dict):
      filled_ = {key: fill(value) for key, value in part.items()}
      return {key: value for key, value in filled_.items() if value is not None}
    if isinstance(part, list):
      return [fill(item) for item in part]
    if isinstance(part, str) and part.startswith('$'):
      return values[part[1:]]
    return part

  return fill(TEMPLATES[template])


class _Dumper(yaml.SafeDumper):
  """Writes YAML without anchors, and long texts as blocks."""

  def ignore_aliases(self, data) -> bool:
    return True


def _text(dumper: yaml.SafeDumper, text: str):
  style = '|' if '\n' in text else None
  return dumper.represent_scalar('tag:yaml.org,2002:str', text, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(manifests: Sequence[dict]) -> str:
  """Returns one YAML document per manifest, in order."""
  return yaml.dump_all(
    manifests,
    Dumper=_Dumper,
    sort_keys=False,
    explicit_start=True,
    allow_unicode=True,
    width=1000,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gke(Backend):
  """Launches by kubectl, in its current cluster."""

  TRAITS = frozenset({CONTAINERS, SIZED})

  namespace: str = option('default', 'Namespace of all objects.')
  shared_claim: str = option(
    '', 'Claim that many can write to, as the workdir of all roles.'
  )
  data_claim: str = option('', f'Claim that all roles read at {DATA_FOLDER}.')
  data_bucket: str = option(
    '', f'Bucket of Cloud Storage that all roles read at {DATA_FOLDER}.'
  )
  queue: str = option('', 'Local queue of Kueue that admits the roles.')

  def start(self, whole: JobSpec) -> int:
    return self._apply(self.manifests(whole))

  def add(self, whole: JobSpec, learner: int) -> int:
    tasks = _tasks(whole, only(whole, learner))
    return self._apply([self.job_set(whole, task) for task in tasks])

  def remove(self, whole: JobSpec, learner: int) -> int:
    tasks = _tasks(whole, only(whole, learner))
    names = [whole.role_name(task) for task in tasks]
    self.act(self._kubectl('delete', 'jobset', *names))
    return 0

  @property
  def shares_workdir(self) -> bool:
    return bool(self.shared_claim)

  def problems(self) -> Iterator[str]:
    if self.data_claim and self.data_bucket:
      yield (
        f'--data_claim={self.data_claim}, --data_bucket={self.data_bucket}: '
        f'one of them is at {DATA_FOLDER}'
      )

  def _apply(self, manifests: Sequence[dict]) -> int:
    self.act(self._kubectl('apply', '--filename=-'), as_yaml(manifests))
    return 0

  def _kubectl(self, *words: str) -> tuple[str, ...]:
    return ('kubectl', f'--namespace={self.namespace}', *words)

  def manifests(self, whole: JobSpec) -> list[dict]:
    """Returns all objects of a run, in the order in which they are applied."""
    config = filled(
      'config_map',
      name=_config_name(whole),
      run=whole.name,
      data={whole.config_name: whole.config_text},
    )
    service = filled(
      'service',
      name=whole.role_name(whole.syncer),
      labels=_labels(whole, whole.syncer),
      port=whole.port,
    )
    syncer = whole.syncer, *whole.shards
    claims = () if self.shared_claim else syncer
    return [
      config,
      service,
      *(
        filled(
          'claim',
          name=whole.role_name(task),
          labels=_labels(whole, task),
          size=f'{task.resources.disk_gib}Gi',
        )
        for task in claims
      ),
      *(
        self.job_set(whole, task)
        for role in (*syncer, *whole.first_learners)
        for task in _tasks(whole, role)
      ),
    ]

  def job_set(self, whole: JobSpec, role: Task) -> dict:
    """Returns the JobSet of one role."""
    labels, hosts = _labels(whole, role), role.resources.accelerator.hosts
    queue = {'kueue.x-k8s.io/queue-name': self.queue} if self.queue else {}
    # A node pool of TPU hosts that belong together is one slice, for one
    # learner. Slices of one host share a pool, which is many of them.
    alone = {
      'alpha.jobset.sigs.k8s.io/exclusive-topology': (
        'cloud.google.com/gke-nodepool'
      )
    }
    noted = dict(FUSE_PODS) if self.data_bucket else {}
    if port := whole.metrics_port_of(role):  # By these Prometheus finds a pod.
      noted |= {
        'prometheus.io/scrape': 'true',
        'prometheus.io/port': str(port),
        'prometheus.io/path': '/metrics',
      }
    volumes, mounts = self._volumes(whole, role)
    selector, tolerations = _nodes(role)
    return filled(
      'job_set',
      name=whole.role_name(role),
      labels=labels,
      queued_labels={**labels, **queue},
      annotations=(
        alone if hosts > 1 and role.resources.accelerator.is_tpu else None
      ),
      restarts_max=whole.restarts_max,
      has_names=role.kind != SYNCER,
      slice=SLICE,
      hosts=hosts,
      kind=role.kind,
      fatal=list(EXITS_FATAL),
      pod_annotations=noted or None,
      grace_s=whole.grace_s,
      containers=[_container(whole, role, mounts)],
      volumes=volumes,
      beside=_beside(whole, role, mounts),
      selector=selector or None,
      tolerations=tolerations or None,
    )

  def _volumes(self, whole: JobSpec, role: Task) -> tuple[list, list]:
    """Volumes of a pod and where its containers have them."""
    volumes, mounts = [], []

    def mount(name: str, volume: dict, path: str, read_only=True) -> None:
      volumes.append({'name': name, **volume})
      is_read = {'readOnly': True} if read_only else {}
      mounts.append({'name': name, 'mountPath': path, **is_read})

    def claim(name: str, **how) -> dict:
      return {'persistentVolumeClaim': {'claimName': name, **how}}

    workdir = {'emptyDir': {}}
    if self.shared_claim:
      workdir = claim(self.shared_claim)
    elif role.kind in (SYNCER, SHARD):
      workdir = claim(whole.role_name(role))
    mount('workdir', workdir, whole.workdir, read_only=False)
    if role.slice is not None:  # Its boundaries are kept there.
      mount('memory', SHARED_MEMORY, supervisor.SHARED_MEMORY, read_only=False)
    config = {'configMap': {'name': _config_name(whole)}}
    mount('config', config, CONFIG_FOLDER)
    if self.data_claim:
      mount('data', claim(self.data_claim, readOnly=True), DATA_FOLDER)
    elif self.data_bucket:
      mount('data', filled('bucket', name=self.data_bucket), DATA_FOLDER)
    if whole.secret:
      secret = {
        'secretName': whole.secret_of(role),
        'defaultMode': READABLE_BY_GROUP,
      }
      mount('secret', {'secret': secret}, SECRET_FOLDER)
    return volumes, mounts


def _tasks(whole: JobSpec, role: Task) -> tuple[Task, ...]:
  """Returns those of a role that are a JobSet each."""
  return *whole.rendezvous_of(role), *whole.slices_of(role)


def _beside(whole: JobSpec, role: Task, mounts: list) -> list[dict] | None:
  """Returns the evaluator's container, beside the syncer's own."""
  if role.kind != SYNCER or whole.evaluator is None:
    return None
  evaluator = filled(
    'beside',
    name=whole.evaluator.kind,
    image=whole.image,
    command=[whole.python, '-m', whole.evaluator.module],
    args=_arguments(whole, whole.evaluator),
    env=_environment(whole, whole.evaluator),
    mounts=mounts,
  )
  return [evaluator]


def _container(whole: JobSpec, role: Task, mounts: list) -> dict:
  machines = role.resources.accelerator
  ports = {'control': whole.port if role.kind == SYNCER else 0}
  ports['discovery'] = machines.is_tpu and DISCOVERY_PORT
  is_met = machines.hosts > 1 and role.slice is None
  ports['coordinator'] = is_met and COORDINATOR_PORT
  if role.kind == RENDEZVOUS:
    ports['rendezvous'] = whole.rendezvous_port(role)
  ports['metrics'] = whole.metrics_port_of(role)
  opened = [
    {'name': name, 'containerPort': number, 'protocol': 'TCP'}
    for name, number in ports.items()
    if number
  ]
  index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
  own = [_field('DILOCO_HOST_INDEX', index)] if machines.hosts > 1 else []
  container = filled(
    'container',
    kind=role.kind,
    image=whole.image,
    python=whole.python,
    module=role.module,
    args=_arguments(whole, role),
    env=_environment(whole, role, *own),
    resources=_resources(role),
    mounts=mounts,
    ports=opened or None,
  )
  if role.kind == SYNCER:
    status = shlex.quote(f'{whole.workdir}/status.json')
    container |= filled(
      'probes',
      every_s=PROBED_EVERY_S,
      starts=STARTS_S // PROBED_EVERY_S,
      starts_s=STARTS_S,
      is_fresh=f'[[ $(find {status} -mmin -{SILENT_S // 60}) ]]',
    )
  return container


def _environment(whole: JobSpec, role: Task, *own: dict) -> list[dict]:
  shared = (
    {'name': name, 'value': _literal(value)}
    for name, value in whole.variables(role)
  )
  return [_field('DILOCO_HOST', 'status.podIP'), *own, *shared]


def _field(name: str, path: str) -> dict:
  """An environment variable that a pod's own field gives."""
  return {'name': name, 'valueFrom': {'fieldRef': {'fieldPath': path}}}


def _arguments(whole: JobSpec, role: Task) -> list[str]:
  known = Addresses(
    OWN_ADDRESS,
    f'{whole.role_name(whole.syncer)}:{whole.port}',
    OWN_INDEX,
    f'{_first_pod(whole.role_name(role))}:{COORDINATOR_PORT}',
  )
  for met in whole.rendezvous_of(role):
    at = f'{_first_pod(whole.role_name(met))}:{whole.rendezvous_port(met)}'
    known = dataclasses.replace(known, rendezvous=at)
  fixed = (_literal(argument) for argument in role.arguments)
  return [*fixed, *addressed(whole, role, known)]


def _first_pod(name: str) -> str:
  """Returns the host name of the first pod of a JobSet's Job."""
  return f'{name}-{SLICE}-0-0.{name}'  # In the JobSet's own Service.


def _literal(text: str) -> str:
  """Keeps Kubernetes from filling in what only looks like a variable."""
  return text.replace('$(', '$$(')


def _resources(role: Task) -> dict:
  place, requests, limits = role.resources, {}, {}
  if place.cpus:
    requests['cpu'] = str(place.cpus)
  if place.memory_gib:
    requests['memory'] = f'{place.memory_gib}Gi'
  if chips := place.accelerator.chips_per_host:
    kind = 'google.com/tpu' if place.accelerator.is_tpu else 'nvidia.com/gpu'
    limits[kind] = str(chips)
  return {'requests': {**requests, **limits}, 'limits': limits}


def _nodes(role: Task) -> tuple[dict, list]:
  """Returns the node selector and tolerations of a role."""
  place = role.resources
  selector, tolerations = {}, []
  if tpu := place.accelerator.slice:
    selector['cloud.google.com/gke-tpu-accelerator'] = SLICES[tpu.chip]
    selector['cloud.google.com/gke-tpu-topology'] = tpu.shape
    tolerations.append(
      {'key': 'google.com/tpu', 'operator': 'Exists', 'effect': 'NoSchedule'}
    )
  if place.capacity == SPOT:
    selector[SPOT_NODES] = 'true'
    key = {'key': SPOT_NODES, 'operator': 'Equal', 'value': 'true'}
    tolerations.append({**key, 'effect': 'NoSchedule'})
  elif place.capacity == RESERVATION:
    selector['cloud.google.com/reservation-name'] = place.reservation
  return selector, tolerations


def _labels(whole: JobSpec, role: Task) -> dict[str, str]:
  labels = {'app': 'diloco', 'run': whole.name, 'role': role.kind}
  if role.learner is not None:
    labels['learner'] = str(role.learner)
  if role.slice is not None:
    labels['slice'] = str(role.slice)
  return labels


def _config_name(whole: JobSpec) -> str:
  return f'{whole.name}-config'
