# SPDX-License-Identifier: Apache-2.0
"""A launch for GKE: one JobSet per role, and what the roles share.

Every role is a JobSet of one Job, so that one slice restarts alone, at once,
and ends for good with exit code 0 or a fatal one. The syncer is one as well: a
StatefulSet would start it again after its run has ended. A Service gives it a
name that stays, a volume claim what a restarted one goes on from.
"""

import dataclasses

from diloco.config.sections import ConfigError
from launch.backends import gke_sidecars
from launch.backends.command_lines import Addresses, addressed
from launch.backends.manifest_text import Octal
from launch.exit_codes import EXITS_FATAL
from launch.job import (
  COORDINATOR_PORT,
  LEARNER,
  RESERVATION,
  SHARD,
  SPOT,
  SYNCER,
  JobSpec,
  Task,
)

CONFIG_FOLDER = '/etc/diloco/config'
SECRET_FOLDER = '/etc/diloco/secret'
DATA_FOLDER = '/data'
READABLE_BY_GROUP = Octal(0o440)  # Keys that all users can read are refused.
OWN_ADDRESS = '$(DILOCO_HOST)'  # Kubernetes fills these in.
OWN_INDEX = '$(DILOCO_HOST_INDEX)'
INDEX = 'batch.kubernetes.io/job-completion-index'
SLICE = 'slice'  # The one Job of a JobSet.
# A node pool of TPU hosts that belong together is one slice, for one learner.
EXCLUSIVE = 'alpha.jobset.sigs.k8s.io/exclusive-topology'
POOL = 'cloud.google.com/gke-nodepool'
SPOT_NODES = 'cloud.google.com/gke-spot'
DISCOVERY_PORT = 8471  # Among the hosts of one slice.
QUEUE = 'kueue.x-k8s.io/queue-name'
# GKE mounts buckets in pods that have the annotation.
FUSE = 'gcsfuse.csi.storage.gke.io'
FUSE_PODS = 'gke-gcsfuse/volumes'


@dataclasses.dataclass(frozen=True)
class GkeOptions:
  """The volumes and queue that a run uses, and how long its objects stay."""

  # Of the volume of the syncer; empty: the cluster's default.
  storage_class: str = ''
  # A claim for many writers that all roles use as workdir, in place of a
  # volume for the syncer and a passing one for each learner.
  shared_claim: str = ''
  # A claim that all roles read at DATA_FOLDER; empty: none.
  data_claim: str = ''
  data_bucket: str = ''  # A bucket of Cloud Storage in its place.
  # Where the syncer's pod serves the run's page; 0: nowhere.
  page_port: int = 0
  # The local queue of Kueue that admits the roles; empty: none.
  queue: str = ''
  ttl_s: int = 0  # After it a role that has ended is deleted; 0: never.

  def __post_init__(self):
    if self.ttl_s < 0:
      raise ConfigError([f'--ttl_s={self.ttl_s}: must not be negative'])
    if self.data_claim and self.data_bucket:
      raise ConfigError(
        [
          f'--data_claim={self.data_claim}, --data_bucket={self.data_bucket}: '
          f'one of them is at {DATA_FOLDER}'
        ]
      )


def manifests(whole: JobSpec, options: GkeOptions) -> list[dict]:
  """All objects of a run, in the order in which they are applied."""
  shared = [_config_map(whole), _service(whole)]
  syncer = whole.syncer, *whole.shards
  if not options.shared_claim:
    shared += [_claim(whole, each, options.storage_class) for each in syncer]
  roles = (*syncer, *whole.first_learners)
  return [*shared, *(job_set(whole, role, options) for role in roles)]


def job_set(whole: JobSpec, role: Task, options: GkeOptions) -> dict:
  """The JobSet of one role."""
  hosts = role.resources.accelerator.hosts
  metadata = {'name': whole.role_name(role), 'labels': _labels(whole, role)}
  if options.queue:
    metadata['labels'][QUEUE] = options.queue
  # Slices of one host share a pool, which is many of them.
  if hosts > 1 and role.resources.accelerator.is_tpu:
    metadata['annotations'] = {EXCLUSIVE: POOL}
  job = {
    'parallelism': hosts,
    'completions': hosts,
    'completionMode': 'Indexed',  # A host's index is its --host.
    'backoffLimit': 0,  # One host is lost: the slice starts again as a whole.
    'podFailurePolicy': {
      'rules': [
        {
          'action': 'FailJob',
          'onExitCodes': {
            'containerName': role.kind,
            'operator': 'In',
            'values': list(EXITS_FATAL),
          },
        }
      ]
    },
    'template': {
      'metadata': _pod_metadata(whole, role, options),
      'spec': _pod(whole, role, options),
    },
  }
  lasts = {'ttlSecondsAfterFinished': options.ttl_s} if options.ttl_s else {}
  return {
    'apiVersion': 'jobset.x-k8s.io/v1alpha2',
    'kind': 'JobSet',
    'metadata': metadata,
    'spec': {
      **lasts,
      'failurePolicy': {
        'maxRestarts': whole.restarts_max,
        'rules': [
          {
            'name': 'fatal',
            'action': 'FailJobSet',
            'onJobFailureReasons': ['PodFailurePolicy'],
          }
        ],
      },
      # A slice finds its hosts by name. The syncer's name is the Service's,
      # which a JobSet's own Service would take.
      'network': {'enableDNSHostnames': role.kind != SYNCER},
      'replicatedJobs': [
        {
          'name': SLICE,
          'replicas': 1,  # More would be one JAX world of many slices.
          'template': {'spec': job},
        }
      ],
    },
  }


def _pod_metadata(whole: JobSpec, role: Task, options: GkeOptions) -> dict:
  metadata, annotations = {'labels': _labels(whole, role)}, {}
  if options.data_bucket or _copies(whole, role, options):
    annotations[FUSE_PODS] = 'true'
  if whole.metrics_port:
    annotations |= gke_sidecars.scraped(whole.metrics_port_of(role))
  if annotations:
    metadata['annotations'] = annotations
  return metadata


def _pod(whole: JobSpec, role: Task, options: GkeOptions) -> dict:
  volumes, mounts = _volumes(whole, role, options)
  shared = [
    {'name': name, 'value': _literal(value)}
    for name, value in whole.environment
  ]
  container = {
    'name': role.kind,
    'image': whole.image,
    'command': [whole.python, '-m', role.module],
    'args': _arguments(whole, role),
    'env': [
      _field('DILOCO_HOST', 'status.podIP'),
      *_index(role),
      *shared,
    ],
    'resources': _resources(role),
    'volumeMounts': mounts,
  }
  ports = []
  if role.kind == SYNCER:
    ports.append(_port('control', whole.port))
  if role.resources.accelerator.is_tpu:
    ports.append(_port('discovery', DISCOVERY_PORT))
  if role.resources.accelerator.hosts > 1:
    ports.append(_port('coordinator', COORDINATOR_PORT))
  if whole.metrics_port:
    ports.append(_port('metrics', whole.metrics_port_of(role)))
  if ports:
    container['ports'] = ports
  if role.kind == SYNCER:
    container |= gke_sidecars.syncer_probes(whole)
  pod = {
    'restartPolicy': 'Never',  # The exit code decides, above.
    'terminationGracePeriodSeconds': _grace_s(whole, role, options),
    'containers': [container],
    'volumes': volumes,
  }
  if beside := _beside(whole, role, options, shared):
    pod['initContainers'] = [
      {**each, 'volumeMounts': mounts} for each in beside
    ]
  selector, tolerations = _nodes(role)
  if selector:
    pod['nodeSelector'] = selector
  if tolerations:
    pod['tolerations'] = tolerations
  return pod


def _beside(
  whole: JobSpec, role: Task, options: GkeOptions, shared: list
) -> list[dict]:
  """Returns the containers beside the role's own, without their volumes."""
  found = []
  if _copies(whole, role, options):
    if role.kind == LEARNER:
      found.append(gke_sidecars.restored(whole, role))
    found.append(gke_sidecars.results(whole))
  if role.kind == SYNCER and whole.evaluator:
    known = Addresses(OWN_ADDRESS)
    arguments = [
      *(_literal(each) for each in whole.evaluator.arguments),
      *addressed(whole, whole.evaluator, known),
    ]
    own = [_field('DILOCO_HOST', 'status.podIP'), *shared]
    found.append(gke_sidecars.evaluator(whole, arguments, own))
  if role.kind == SYNCER and options.page_port:
    address = _field('DILOCO_HOST', 'status.podIP')
    port = options.page_port
    found.append(gke_sidecars.watch(whole, address, OWN_ADDRESS, port))
  return found


def _copies(whole: JobSpec, role: Task, options: GkeOptions) -> bool:
  """Returns True if a role copies to the bucket what is in its workdir."""
  if role.kind == SHARD:
    return False  # It leaves what it resumes from, and no more.
  is_alone = not options.shared_claim or role.kind == SYNCER
  return bool(whole.results_bucket) and is_alone


def _grace_s(whole: JobSpec, role: Task, options: GkeOptions) -> int:
  """Returns the seconds from SIGTERM to SIGKILL of all containers of a pod."""
  if role.kind == SYNCER and _copies(whole, role, options):
    return max(whole.grace_s, gke_sidecars.COPY_GRACE_S)
  return whole.grace_s


def _index(role: Task) -> list[dict]:
  if role.resources.accelerator.hosts == 1:
    return []
  return [_field('DILOCO_HOST_INDEX', f"metadata.annotations['{INDEX}']")]


def _field(name: str, path: str) -> dict:
  """An environment variable that a pod's own field gives."""
  return {'name': name, 'valueFrom': {'fieldRef': {'fieldPath': path}}}


def _port(name: str, number: int) -> dict:
  return {'name': name, 'containerPort': number, 'protocol': 'TCP'}


def _arguments(whole: JobSpec, role: Task) -> list[str]:
  name = whole.role_name(role)
  known = Addresses(
    OWN_ADDRESS,
    f'{whole.role_name(whole.syncer)}:{whole.port}',
    OWN_INDEX,
    # The first pod of the first Job, in the JobSet's own Service.
    f'{name}-{SLICE}-0-0.{name}:{COORDINATOR_PORT}',
  )
  fixed = (_literal(argument) for argument in role.arguments)
  return [*fixed, *addressed(whole, role, known)]


def _literal(text: str) -> str:
  """Keeps Kubernetes from filling in what only looks like a variable."""
  return text.replace('$(', '$$(')


def _resources(role: Task) -> dict:
  place = role.resources
  requests = {}
  if place.cpus:
    requests['cpu'] = str(place.cpus)
  if place.memory_gib:
    requests['memory'] = f'{place.memory_gib}Gi'
  limits = {}
  if place.accelerator.is_tpu:
    limits = {'google.com/tpu': str(place.accelerator.chips_per_host)}
  elif place.accelerator.chips_per_host:
    limits = {'nvidia.com/gpu': str(place.accelerator.chips_per_host)}
  return {'requests': {**requests, **limits}, 'limits': limits}


def _nodes(role: Task) -> tuple[dict, list]:
  """Returns the node selector and tolerations of a role."""
  place = role.resources
  selector, tolerations = {}, []
  if place.accelerator.is_tpu:
    selector['cloud.google.com/gke-tpu-accelerator'] = (
      place.accelerator.gke_label
    )
    selector['cloud.google.com/gke-tpu-topology'] = place.accelerator.topology
    tolerations.append(
      {'key': 'google.com/tpu', 'operator': 'Exists', 'effect': 'NoSchedule'}
    )
  if place.capacity == SPOT:
    selector[SPOT_NODES] = 'true'
    tolerations.append(
      {
        'key': SPOT_NODES,
        'operator': 'Equal',
        'value': 'true',
        'effect': 'NoSchedule',
      }
    )
  elif place.capacity == RESERVATION:
    selector['cloud.google.com/reservation-name'] = place.reservation
  return selector, tolerations


def _volumes(
  whole: JobSpec, role: Task, options: GkeOptions
) -> tuple[list, list]:
  """Volumes of a pod and where its container has them."""
  if options.shared_claim:
    workdir = {'persistentVolumeClaim': {'claimName': options.shared_claim}}
  elif role.kind in (SYNCER, SHARD):
    workdir = {'persistentVolumeClaim': {'claimName': whole.role_name(role)}}
  else:
    workdir = {'emptyDir': {}}
  config = {'configMap': {'name': _config_name(whole)}}
  volumes = [
    {'name': 'workdir', **workdir},
    {'name': 'config', **config},
  ]
  mounts = [
    {'name': 'workdir', 'mountPath': whole.workdir},
    {'name': 'config', 'mountPath': CONFIG_FOLDER, 'readOnly': True},
  ]
  if data := _data(options):
    volumes.append({'name': 'data', **data})
    mounts.append({'name': 'data', 'mountPath': DATA_FOLDER, 'readOnly': True})
  if _copies(whole, role, options):
    bucket = _bucket(whole.results_bucket, read_only=False)
    volumes.append({'name': 'results', **bucket})
    mounts.append({'name': 'results', 'mountPath': gke_sidecars.RESULTS_FOLDER})
  if whole.secret:
    secret = {
      'secretName': whole.secret_of(role),
      'defaultMode': READABLE_BY_GROUP,
    }
    volumes.append({'name': 'secret', 'secret': secret})
    mounts.append(
      {'name': 'secret', 'mountPath': SECRET_FOLDER, 'readOnly': True}
    )
  return volumes, mounts


def _data(options: GkeOptions) -> dict:
  """The volume that the roles read their data from; empty: the image's."""
  if options.data_claim:
    claim = {'claimName': options.data_claim, 'readOnly': True}
    return {'persistentVolumeClaim': claim}
  if options.data_bucket:
    return _bucket(options.data_bucket, read_only=True)
  return {}


def _bucket(name: str, read_only: bool) -> dict:
  attributes = {'bucketName': name, 'mountOptions': 'implicit-dirs'}
  return {
    'csi': {
      'driver': FUSE,
      'readOnly': read_only,
      'volumeAttributes': attributes,
    }
  }


def _labels(whole: JobSpec, role: Task) -> dict[str, str]:
  labels = {'app': 'diloco', 'run': whole.name, 'role': role.kind}
  if role.learner is not None:
    labels['learner'] = str(role.learner)
  return labels


def _config_name(whole: JobSpec) -> str:
  return f'{whole.name}-config'


def _config_map(whole: JobSpec) -> dict:
  return {
    'apiVersion': 'v1',
    'kind': 'ConfigMap',
    'metadata': {
      'name': _config_name(whole),
      'labels': {'app': 'diloco', 'run': whole.name},
    },
    'data': {whole.config_name: whole.config_text},
  }


def _service(whole: JobSpec) -> dict:
  """Returns a service, whose address stays valid for clients across
  restarts.
  """
  labels = _labels(whole, whole.syncer)
  return {
    'apiVersion': 'v1',
    'kind': 'Service',
    'metadata': {'name': whole.role_name(whole.syncer), 'labels': labels},
    'spec': {
      'selector': labels,
      'ports': [
        {'name': 'control', 'port': whole.port, 'targetPort': 'control'}
      ],
    },
  }


def _claim(whole: JobSpec, role: Task, storage_class: str) -> dict:
  storage_gib = role.resources.disk_gib
  spec = {
    'accessModes': ['ReadWriteOncePod'],  # Two syncers never write at once.
    'resources': {'requests': {'storage': f'{storage_gib}Gi'}},
  }
  if storage_class:
    spec['storageClassName'] = storage_class
  return {
    'apiVersion': 'v1',
    'kind': 'PersistentVolumeClaim',
    'metadata': {
      'name': whole.role_name(role),
      'labels': _labels(whole, role),
    },
    'spec': spec,
  }
