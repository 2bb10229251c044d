# SPDX-License-Identifier: Apache-2.0
"""GKE: what is rendered is what the public schemas know, field by field."""

import os
import subprocess

import kubernetes_validate
import pytest
import yaml

from launch.backends import gke
from launch.backends.gke import Gke, as_yaml
from tests.backends.launch_values import (
  AWKWARD,
  a_config,
  a_launch,
  a_sliced_launch,
  check_golden,
)
from tests.backends.machines import check_schema, job_of, objects, pod_of

pytestmark = pytest.mark.beside

SLICES = {
  'accelerator': 'v5litepod-16',
  'capacity': 'spot',
  'secret': 'first-{role}',
}
WAYS = [
  {'insecure': True},
  {'accelerator': 'v5litepod-8', 'capacity': 'spot', 'secret': 'first'},
  {'accelerator': 'v5p-8', 'capacity': 'reservation', 'reservation': 'ours'},
  SLICES,
  {'accelerator': 'v5p-256'},
  {'accelerator': 'gpu', 'gpus_per_host': 8, 'hosts': 2},
]
ROLES = ('syncer', 'learner-0', 'learner-1')


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('shared_claim', ['', 'filestore'])
def test_the_schemas_know_it(way, shared_claim):
  assert len(objects(a_launch(**way), shared_claim=shared_claim)) >= 5


@pytest.mark.parametrize(
  'path',
  [
    ('spec', 'replicatedJobs', 0, 'restarts'),
    ('spec', 'replicatedJobs', 0, 'template', 'spec', 'hosts'),
  ],
)
def test_a_wrong_field_would_be_found(path):
  manifest = objects(a_launch())['JobSet/first-learner-0']
  inner = manifest
  for key in path[:-1]:
    inner = inner[key]
  inner[path[-1]] = 1
  with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
    check_schema(manifest)


def test_what_is_applied(request):
  text = as_yaml(Gke().manifests(a_launch(**SLICES)))
  check_golden('gke-slice.yaml', text, request.config.getoption('--rewrite'))


def test_what_is_applied_of_a_learner_of_several_slices(request):
  whole = a_sliced_launch(**SLICES)
  assert len(objects(whole)) == 7
  text = as_yaml(Gke().manifests(whole))
  check_golden('gke-slices.yaml', text, request.config.getoption('--rewrite'))


def test_the_text_says_what_the_value_says():
  manifests = Gke().manifests(a_launch(f'--config.name={AWKWARD}'))
  assert list(yaml.safe_load_all(as_yaml(manifests))) == manifests


def test_the_syncer_is_where_the_learners_look():
  found = objects(a_launch(port=7070))
  service = found['Service/first-syncer']['spec']
  template = job_of(found['JobSet/first-syncer'])['template']
  (container,) = template['spec']['containers']
  assert service['selector'].items() <= template['metadata']['labels'].items()
  assert service['ports'][0]['port'] == 7070
  assert container['ports'] == [
    {'name': 'control', 'containerPort': 7070, 'protocol': 'TCP'}
  ]
  # A JobSet makes a Service of its own name, unless told not to.
  network = found['JobSet/first-syncer']['spec']['network']
  assert network == {'enableDNSHostnames': False}


def test_one_learner_is_one_jobset_of_its_hosts():
  """GKE joins the replicas of a JobSet into one world; ours have none."""
  found = objects(a_launch(**SLICES))
  for each in (found[f'JobSet/first-{role}'] for role in ROLES):
    (replicated,) = each['spec']['replicatedJobs']
    assert replicated['replicas'] == 1
    assert 'MEGASCALE' not in as_yaml([each])
  learner = found['JobSet/first-learner-0']
  job = job_of(learner)
  assert (job['parallelism'], job['completions']) == (4, 4)
  assert job['backoffLimit'] == 0
  assert learner['spec']['network'] == {'enableDNSHostnames': True}
  (container,) = pod_of(learner)['containers']
  ports = {each['name']: each['containerPort'] for each in container['ports']}
  assert ports == {'discovery': 8471, 'coordinator': 8476}


@pytest.mark.parametrize(
  'place, alone',
  [
    ({'accelerator': 'v5p-8'}, False),
    ({'accelerator': 'v5p-16'}, True),
    ({'accelerator': 'gpu', 'gpus_per_host': 8, 'hosts': 2}, False),
  ],
)
def test_only_a_slice_of_many_hosts_has_a_node_pool_alone(place, alone):
  found = objects(a_launch(**place))
  annotations = found['JobSet/first-learner-0']['metadata'].get('annotations')
  assert bool(annotations) == alone


def test_each_kind_of_learner_has_its_nodes_hosts_and_flags():
  text = (
    '1: accelerator=v5p-16, data.batch=16; '
    '2: accelerator=gpu, gpus_per_host=2, mesh.fsdp=2'
  )
  config = a_config(8, 3, unlike_learners=text)
  whole = a_launch(config=config, accelerator='v5litepod-8')
  kept = objects(whole)
  found = []
  for learner in range(3):
    job = job_of(kept[f'JobSet/first-learner-{learner}'])
    pod = pod_of(kept[f'JobSet/first-learner-{learner}'])
    (container,) = pod['containers']
    found.append(
      (
        job['completions'],
        [*pod.get('nodeSelector', {}).values()],
        container['resources']['limits'],
        [x for x in container['args'] if 'batch' in x or 'fsdp' in x],
      )
    )
  tpus, gpus = 'google.com/tpu', 'nvidia.com/gpu'
  assert found == [
    (1, ['tpu-v5-lite-podslice', '2x4'], {tpus: '8'}, []),
    (2, ['tpu-v5p-slice', '2x2x2'], {tpus: '4'}, ['--config.data.batch=16']),
    (1, [], {gpus: '2'}, ['--config.mesh.fsdp=2']),
  ]


def test_each_role_has_its_secret_and_the_notice():
  found = objects(a_launch(secret='tls-{role}', notice_s=40))
  for role in ROLES:
    pod = pod_of(found[f'JobSet/first-{role}'])
    (secret,) = [v['secret'] for v in pod['volumes'] if 'secret' in v]
    assert secret == {'secretName': f'tls-{role}', 'defaultMode': 0o440}
    assert pod['terminationGracePeriodSeconds'] == 45
  data = found['ConfigMap/first-config']['data']
  assert data == {'quickstart.py': 'text of the configuration\n'}


@pytest.mark.parametrize(
  ('options', 'volume', 'noted'),
  [
    (
      {'data_claim': 'corpus'},
      {'persistentVolumeClaim': {'claimName': 'corpus', 'readOnly': True}},
      None,
    ),
    (
      {'data_bucket': 'corpora'},
      gke.filled('bucket', name='corpora'),
      {'gke-gcsfuse/volumes': 'true'},
    ),
  ],
)
def test_all_roles_read_the_same_data(options, volume, noted):
  found = objects(a_launch(), **options)
  for manifest in (found[f'JobSet/first-{role}'] for role in ROLES):
    pod = pod_of(manifest)
    assert {'name': 'data', **volume} in pod['volumes']
    (container,) = pod['containers']
    assert container['volumeMounts'][-1] == {
      'name': 'data', 'mountPath': '/data', 'readOnly': True,
    }  # fmt: skip
    assert job_of(manifest)['template']['metadata'].get('annotations') == noted


def test_a_queue_admits_all_roles():
  found = objects(a_launch(), queue='team')
  for each in (found[f'JobSet/first-{role}'] for role in ROLES):
    assert each['metadata']['labels']['kueue.x-k8s.io/queue-name'] == 'team'


def test_options_that_can_not_be():
  (both,) = Gke(data_claim='a', data_bucket='b').problems()
  assert 'one of them is at /data' in both


def test_each_shard_of_the_syncer_has_a_volume():
  found = objects(a_launch(shards=3))
  for i in (1, 2):
    pod = pod_of(found[f'JobSet/first-shard-{i}'])
    claim = {'persistentVolumeClaim': {'claimName': f'first-shard-{i}'}}
    assert {'name': 'workdir', **claim} in pod['volumes']
    assert f'PersistentVolumeClaim/first-shard-{i}' in found
    assert 'initContainers' not in pod


# Containers beside a role, and probes.


def test_the_evaluator_ends_with_the_syncer():
  syncer = objects(a_launch(evaluated=16, metrics_port=9100))
  pod = pod_of(syncer['JobSet/first-syncer'])
  (beside,) = pod['initContainers']
  (container,) = pod['containers']
  assert beside['restartPolicy'] == 'Always'
  assert beside['volumeMounts'] == container['volumeMounts']
  opened = {each['name']: each['containerPort'] for each in container['ports']}
  assert opened['metrics'] == 9100
  noted = job_of(syncer['JobSet/first-syncer'])['template']['metadata']
  assert noted['annotations']['prometheus.io/port'] == '9100'


def test_the_syncer_is_probed(tmp_path):
  found = objects(a_launch(workdir=str(tmp_path / 'work dir')))
  (container,) = pod_of(found['JobSet/first-syncer'])['containers']
  ports = {each['name']: each['containerPort'] for each in container['ports']}
  for probe in ('startupProbe', 'readinessProbe'):
    assert container[probe]['tcpSocket']['port'] in ports
  command = container['livenessProbe']['exec']['command']
  status = tmp_path / 'work dir' / 'status.json'
  status.parent.mkdir()
  status.touch()
  assert subprocess.run(command).returncode == 0
  os.utime(status, (0, 0))
  assert subprocess.run(command).returncode == 1
  (learner,) = pod_of(found['JobSet/first-learner-0'])['containers']
  assert not [name for name in learner if name.endswith('Probe')]
