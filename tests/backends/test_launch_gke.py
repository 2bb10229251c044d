# SPDX-License-Identifier: Apache-2.0
"""GKE: what is rendered is what the public schemas know, field by field."""

import kubernetes_validate
import pytest
import yaml

from diloco.config.sections import ConfigError
from launch.backends import gke
from launch.backends.manifest_text import as_yaml
from tests.backends.launch_values import (
  AWKWARD,
  a_large_launch,
  check_golden,
)
from tests.backends.rendered import (
  check_schema,
  container_launch,
  job_of,
  objects,
  pod_of,
)

pytestmark = pytest.mark.beside

OPTIONS = gke.GkeOptions()
WAYS = {
  'cpu': {'insecure': True},
  'spot': {
    'accelerator': 'v5litepod-8',
    'capacity': 'spot',
    'secret': 'first-{role}',
  },
  'reserved': {
    'accelerator': 'v5p-8',
    'capacity': 'reservation',
    'reservation': 'ours',
  },
  'slice': {'accelerator': 'v5litepod-16', 'capacity': 'spot'},
}


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('shared_claim', ['', 'filestore'])
def test_the_schemas_know_it(way, shared_claim):
  for manifest in objects(
    container_launch(**WAYS[way]), shared_claim=shared_claim
  ).values():
    check_schema(manifest)


@pytest.mark.parametrize('accelerator', ['v5litepod-16', 'v5p-256'])
def test_the_schemas_know_a_learner_of_many_hosts(accelerator):
  whole = container_launch(accelerator=accelerator)
  for manifest in objects(whole).values():
    check_schema(manifest)


@pytest.mark.parametrize(
  'path',
  [
    ('spec', 'replicas'),
    ('spec', 'replicatedJobs', 0, 'restarts'),
    ('spec', 'replicatedJobs', 0, 'template', 'spec', 'hosts'),
    ('spec', 'failurePolicy', 'rules', 0, 'exitCodes'),
  ],
)
def test_a_wrong_field_would_be_found(path):
  manifest = objects(container_launch())['JobSet/first-learner-0']
  inner = manifest
  for key in path[:-1]:
    inner = inner[key]
  inner[path[-1]] = 1
  with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
    check_schema(manifest)


@pytest.mark.parametrize('way', WAYS)
def test_what_is_applied(way, request):
  text = as_yaml(gke.manifests(container_launch(**WAYS[way]), OPTIONS))
  check_golden(f'gke-{way}.yaml', text, request.config.getoption('--rewrite'))


def test_the_text_says_what_the_value_says():
  manifests = gke.manifests(
    container_launch(f'--config.name={AWKWARD}'), OPTIONS
  )
  assert list(yaml.safe_load_all(as_yaml(manifests))) == manifests


def test_what_a_learner_gets():
  whole = container_launch(f'--config.data.path={AWKWARD}')
  (container,) = pod_of(objects(whole)['JobSet/first-learner-1'])['containers']
  assert container['command'] == ['python', '-m', 'diloco.learner']
  assert container['args'] == [
    '--config=experiments/quickstart.py',
    "--config.data.path=a b'c$$(d)",  # `$$(` is how Kubernetes reads `$(`.
    '--workdir=/workdir',
    '--token_file=/etc/diloco/secret/token',
    '--learner=1',
    '--notice_s=25',
    '--config.transport.host=$(DILOCO_HOST)',
    '--syncer=first-syncer:7777',
  ]


def test_the_syncer_is_where_the_learners_look():
  found = objects(container_launch(port=7070))
  service = found['Service/first-syncer']['spec']
  template = job_of(found['JobSet/first-syncer'])['template']
  (container,) = template['spec']['containers']
  assert service['selector'].items() <= template['metadata']['labels'].items()
  assert service['ports'][0]['port'] == 7070
  assert container['ports'] == [
    {'name': 'control', 'containerPort': 7070, 'protocol': 'TCP'}
  ]
  assert '--bind=$(DILOCO_HOST):7070' in container['args']


def test_no_two_services_of_one_name():
  # A JobSet makes a Service of its own name, unless told not to.
  network = objects(container_launch())['JobSet/first-syncer']['spec'][
    'network'
  ]
  assert network == {'enableDNSHostnames': False}


def test_one_learner_is_one_jobset_of_its_hosts():
  found = objects(container_launch(accelerator='v5p-32'))
  (replicated,) = found['JobSet/first-learner-0']['spec']['replicatedJobs']
  job = replicated['template']['spec']
  assert replicated['replicas'] == 1
  assert (job['parallelism'], job['completions']) == (4, 4)
  assert job['backoffLimit'] == 0


@pytest.mark.parametrize(
  'place, alone',
  [
    ({'accelerator': 'v5p-8'}, False),
    ({'accelerator': 'v5p-16'}, True),
    ({'accelerator': 'gpu', 'gpus_per_host': 8, 'hosts': 2}, False),
  ],
)
def test_only_a_slice_of_many_hosts_has_a_node_pool_alone(place, alone):
  found = objects(container_launch(**place))
  annotations = found['JobSet/first-learner-0']['metadata'].get('annotations')
  assert bool(annotations) == alone


def test_how_the_hosts_of_a_learner_find_each_other():
  found = objects(container_launch(accelerator='v5litepod-16'))
  (container,) = pod_of(found['JobSet/first-learner-1'])['containers']
  assert container['args'][-3:] == [
    '--hosts=4',
    '--host=$(DILOCO_HOST_INDEX)',
    # JOBSET-REPLICATEDJOB-JOB-POD.JOBSET, as JobSet names its pods.
    '--coordinator=first-learner-1-slice-0-0.first-learner-1:8476',
  ]
  fields = {
    each['name']: each['valueFrom']['fieldRef']['fieldPath']
    for each in container['env']
    if 'valueFrom' in each
  }
  assert fields['DILOCO_HOST_INDEX'] == (
    "metadata.annotations['batch.kubernetes.io/job-completion-index']"
  )
  network = found['JobSet/first-learner-1']['spec']['network']
  assert network == {'enableDNSHostnames': True}
  ports = {each['name']: each['containerPort'] for each in container['ports']}
  assert ports == {'discovery': 8471, 'coordinator': 8476}


def test_slices_never_become_one_world():
  """GKE joins the replicas of a JobSet into one world; ours have none."""
  for name, each in objects(
    container_launch(accelerator='v5litepod-16')
  ).items():
    if name.startswith('JobSet/'):
      replicated = each['spec']['replicatedJobs']
      assert [part['replicas'] for part in replicated] == [1]
    assert 'MEGASCALE' not in as_yaml([each])


def test_the_secret_is_each_role_s_own():
  found = objects(container_launch(secret='tls-{role}'))
  for role in ('syncer', 'learner-0', 'learner-1'):
    volumes = pod_of(found[f'JobSet/first-{role}'])['volumes']
    names = [v['secret']['secretName'] for v in volumes if 'secret' in v]
    assert names == [f'tls-{role}']


def test_the_notice_is_within_the_grace():
  pod = pod_of(objects(container_launch(notice_s=40))['JobSet/first-learner-0'])
  assert pod['terminationGracePeriodSeconds'] == 45
  assert '--notice_s=40' in pod['containers'][0]['args']


def test_the_configuration_goes_along():
  data = objects(container_launch())['ConfigMap/first-config']['data']
  assert data == {'quickstart.py': 'text of the configuration\n'}


@pytest.mark.parametrize(
  ('changes', 'volume'),
  [
    (
      {'data_claim': 'corpus'},
      {'persistentVolumeClaim': {'claimName': 'corpus', 'readOnly': True}},
    ),
    (
      {'data_bucket': 'corpora'},
      {
        'csi': {
          'driver': 'gcsfuse.csi.storage.gke.io',
          'readOnly': True,
          'volumeAttributes': {
            'bucketName': 'corpora',
            'mountOptions': 'implicit-dirs',
          },
        }
      },
    ),
  ],
)
def test_all_roles_read_the_same_data(changes, volume):
  found = objects(container_launch(), **changes)
  for role in ('syncer', 'learner-0', 'learner-1'):
    manifest = found[f'JobSet/first-{role}']
    check_schema(manifest)
    pod = pod_of(manifest)
    assert {'name': 'data', **volume} in pod['volumes']
    (container,) = pod['containers']
    assert container['volumeMounts'][-1] == {
      'name': 'data', 'mountPath': '/data', 'readOnly': True,
    }  # fmt: skip
    noted = job_of(manifest)['template']['metadata'].get('annotations')
    wanted = {'gke-gcsfuse/volumes': 'true'}
    assert noted == (wanted if 'data_bucket' in changes else None)


def test_a_queue_admits_all_roles_and_they_go_in_time():
  for name, each in objects(
    container_launch(), queue='team', ttl_s=3600
  ).items():
    if not name.startswith('JobSet/'):
      continue
    check_schema(each)
    assert each['metadata']['labels']['kueue.x-k8s.io/queue-name'] == 'team'
    assert each['spec']['ttlSecondsAfterFinished'] == 3600
  for each in objects(container_launch()).values():
    assert 'kueue.x-k8s.io/queue-name' not in each['metadata']['labels']
    assert 'ttlSecondsAfterFinished' not in each.get('spec', ())


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'data_claim': 'a', 'data_bucket': 'b'}, 'one of them is at /data'),
    ({'ttl_s': -1}, '--ttl_s=-1: must not be negative'),
  ],
)
def test_options_that_can_not_be(changes, words):
  with pytest.raises(ConfigError, match=words):
    gke.GkeOptions(**changes)


def test_permissions_are_written_as_such():
  whole = container_launch(secret='first')
  assert 'defaultMode: 0440\n' in as_yaml(gke.manifests(whole, OPTIONS))


def test_each_shard_of_the_syncer_has_a_pod_and_a_volume():
  whole = a_large_launch(
    'v5e-32',
    shards=3,
    image='a:1',
    workdir='/workdir',
    secret='first-{role}',
    results_bucket='ours',
  )
  found = objects(whole)
  for i in (1, 2):
    shard = found[f'JobSet/first-shard-{i}']
    check_schema(shard)
    pod = pod_of(shard)
    (container,) = pod['containers']
    assert container['command'] == ['python', '-m', 'diloco.syncer_shard']
    assert container['args'][-3:] == [
      f'--shard={i}',
      '--config.transport.host=$(DILOCO_HOST)',
      '--lead=first-syncer:7777',
    ]
    memory = container['resources']['requests']['memory']
    assert memory == f'{whole.syncer.resources.memory_gib}Gi'
    claim = {'persistentVolumeClaim': {'claimName': f'first-shard-{i}'}}
    assert {'name': 'workdir', **claim} in pod['volumes']
    assert f'PersistentVolumeClaim/first-shard-{i}' in found
    assert pod['volumes'][-1]['secret']['secretName'] == f'first-shard-{i}'
  alone = a_large_launch('v5e-32').syncer.resources
  assert whole.syncer.resources.memory_gib < 0.8 * alone.memory_gib
  assert whole.syncer.resources.disk_gib < 0.6 * alone.disk_gib
