# SPDX-License-Identifier: Apache-2.0
"""GKE: what is rendered is what the public schemas know, field by field."""

import dataclasses
import os
import subprocess

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import (
  JobsetV1alpha2JobSet,
)

from diloco.config import run_config
from diloco.config.sections import ConfigError
from experiments import quickstart
from launch.backends import gke, gke_sidecars
from launch.backends.manifest_text import as_yaml
from launch.job import launch
from tests.backends.launch_values import (
  AWKWARD,
  a_launch,
  asked,
  check_golden,
)
from tests.waiting import until

pytestmark = pytest.mark.beside

KUBERNETES = '1.31'
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


def _launch(*arguments, **changes):
  return a_launch(
    *arguments, workdir='/workdir', image='example.org/diloco:1', **changes
  )


def _all(whole, **changes) -> dict[str, dict]:
  """Kind/name -> object."""
  options = gke.GkeOptions(**changes)
  found = gke.manifests(whole, options)
  return {f'{each["kind"]}/{each["metadata"]["name"]}': each for each in found}


def _check(manifest: dict) -> None:
  """Checks against the schema of its kind; an unknown field is an error."""
  if manifest['kind'] != 'JobSet':
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    return
  read = JobsetV1alpha2JobSet.from_dict(manifest)
  assert read.to_dict() == manifest, 'a field that JobSet does not know'
  # The models check names and types of fields; the schema of a Job knows
  # also which values they may have.
  for replicated in manifest['spec']['replicatedJobs']:
    job = {
      'apiVersion': 'batch/v1',
      'kind': 'Job',
      'metadata': {'name': replicated['name']},
      **replicated['template'],
    }
    kubernetes_validate.validate(job, KUBERNETES, strict=True)


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('shared_claim', ['', 'filestore'])
def test_the_schemas_know_it(way, shared_claim):
  for manifest in _all(
    _launch(**WAYS[way]), shared_claim=shared_claim
  ).values():
    _check(manifest)


@pytest.mark.parametrize('accelerator', ['v5litepod-16', 'v5p-256'])
def test_the_schemas_know_a_learner_of_many_hosts(accelerator):
  whole = _launch(accelerator=accelerator)
  for manifest in _all(whole).values():
    _check(manifest)


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
  manifest = _all(_launch())['JobSet/first-learner-0']
  inner = manifest
  for key in path[:-1]:
    inner = inner[key]
  inner[path[-1]] = 1
  with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
    _check(manifest)


@pytest.mark.parametrize('way', WAYS)
def test_what_is_applied(way, request):
  text = as_yaml(gke.manifests(_launch(**WAYS[way]), OPTIONS))
  check_golden(f'gke-{way}.yaml', text, request.config.getoption('--rewrite'))


def test_the_text_says_what_the_value_says():
  manifests = gke.manifests(_launch(f'--config.name={AWKWARD}'), OPTIONS)
  assert list(yaml.safe_load_all(as_yaml(manifests))) == manifests


def test_what_a_learner_gets():
  whole = _launch(f'--config.data.path={AWKWARD}')
  (container,) = _pod(_all(whole)['JobSet/first-learner-1'])['containers']
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
  found = _all(_launch(port=7070))
  service = found['Service/first-syncer']['spec']
  template = _job(found['JobSet/first-syncer'])['template']
  (container,) = template['spec']['containers']
  assert service['selector'].items() <= template['metadata']['labels'].items()
  assert service['ports'][0]['port'] == 7070
  assert container['ports'] == [
    {'name': 'control', 'containerPort': 7070, 'protocol': 'TCP'}
  ]
  assert '--bind=$(DILOCO_HOST):7070' in container['args']


def test_no_two_services_of_one_name():
  # A JobSet makes a Service of its own name, unless told not to.
  network = _all(_launch())['JobSet/first-syncer']['spec']['network']
  assert network == {'enableDNSHostnames': False}


def test_one_learner_is_one_jobset_of_its_hosts():
  found = _all(_launch(accelerator='v5p-32'))
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
  found = _all(_launch(**place))
  annotations = found['JobSet/first-learner-0']['metadata'].get('annotations')
  assert bool(annotations) == alone


def test_how_the_hosts_of_a_learner_find_each_other():
  found = _all(_launch(accelerator='v5litepod-16'))
  (container,) = _pod(found['JobSet/first-learner-1'])['containers']
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
  for name, each in _all(_launch(accelerator='v5litepod-16')).items():
    if name.startswith('JobSet/'):
      replicated = each['spec']['replicatedJobs']
      assert [part['replicas'] for part in replicated] == [1]
    assert 'MEGASCALE' not in as_yaml([each])


def test_the_secret_is_each_role_s_own():
  found = _all(_launch(secret='tls-{role}'))
  for role in ('syncer', 'learner-0', 'learner-1'):
    volumes = _pod(found[f'JobSet/first-{role}'])['volumes']
    names = [v['secret']['secretName'] for v in volumes if 'secret' in v]
    assert names == [f'tls-{role}']


def test_the_notice_is_within_the_grace():
  pod = _pod(_all(_launch(notice_s=40))['JobSet/first-learner-0'])
  assert pod['terminationGracePeriodSeconds'] == 45
  assert '--notice_s=40' in pod['containers'][0]['args']


def test_the_configuration_goes_along():
  data = _all(_launch())['ConfigMap/first-config']['data']
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
  found = _all(_launch(), **changes)
  for role in ('syncer', 'learner-0', 'learner-1'):
    manifest = found[f'JobSet/first-{role}']
    _check(manifest)
    pod = _pod(manifest)
    assert {'name': 'data', **volume} in pod['volumes']
    (container,) = pod['containers']
    assert container['volumeMounts'][-1] == {
      'name': 'data', 'mountPath': '/data', 'readOnly': True,
    }  # fmt: skip
    noted = _job(manifest)['template']['metadata'].get('annotations')
    wanted = {'gke-gcsfuse/volumes': 'true'}
    assert noted == (wanted if 'data_bucket' in changes else None)


def test_a_queue_admits_all_roles_and_they_go_in_time():
  for name, each in _all(_launch(), queue='team', ttl_s=3600).items():
    if not name.startswith('JobSet/'):
      continue
    _check(each)
    assert each['metadata']['labels']['kueue.x-k8s.io/queue-name'] == 'team'
    assert each['spec']['ttlSecondsAfterFinished'] == 3600
  for each in _all(_launch()).values():
    assert 'kueue.x-k8s.io/queue-name' not in each['metadata']['labels']
    assert 'ttlSecondsAfterFinished' not in each.get('spec', ())


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'data_claim': 'a', 'data_bucket': 'b'}, 'one of them is at /data'),
    ({'metrics_port': -1}, '--metrics_port=-1: must be in 1'),
    ({'ttl_s': -1}, '--ttl_s=-1: must not be negative'),
  ],
)
def test_options_that_can_not_be(changes, words):
  with pytest.raises(ConfigError, match=words):
    gke.GkeOptions(**changes)


def test_permissions_are_written_as_such():
  whole = _launch(secret='first')
  assert 'defaultMode: 0440\n' in as_yaml(gke.manifests(whole, OPTIONS))


def test_the_evaluator_is_beside_the_syncer_and_ends_with_it():
  found = _all(_evaluated_launch())
  syncer = found['JobSet/first-syncer']
  _check(syncer)
  pod = _pod(syncer)
  (beside,) = pod['initContainers']
  (container,) = pod['containers']
  assert beside['restartPolicy'] == 'Always'
  assert beside['command'] == ['python', '-m', 'diloco.evaluator']
  assert beside['args'] == [
    '--config=experiments/quickstart.py', '--workdir=/workdir', '--log_json',
  ]  # fmt: skip
  assert beside['volumeMounts'] == container['volumeMounts']
  assert 'initContainers' not in _pod(found['JobSet/first-learner-0'])
  assert 'initContainers' not in _pod(_all(_launch())['JobSet/first-syncer'])


def test_what_the_processes_leave_comes_to_a_bucket():
  found = _all(
    _evaluated_launch(), results_bucket='ours', data_bucket='corpora'
  )
  for role in ('syncer', 'learner-0', 'learner-1'):
    manifest = found[f'JobSet/first-{role}']
    _check(manifest)
    pod = _pod(manifest)
    (volume,) = [v for v in pod['volumes'] if v['name'] == 'results']
    assert volume['csi']['volumeAttributes']['bucketName'] == 'ours'
    assert not volume['csi']['readOnly']
    beside = pod['initContainers'][0]
    assert (beside['name'], beside['restartPolicy']) == ('results', 'Always')
    assert {'name': 'results', 'mountPath': '/results'} in beside[
      'volumeMounts'
    ]
    noted = _job(manifest)['template']['metadata']['annotations']
    assert noted == {'gke-gcsfuse/volumes': 'true'}
  shared = _all(_launch(), results_bucket='ours', shared_claim='filestore')
  assert 'initContainers' in _pod(shared['JobSet/first-syncer'])
  assert 'initContainers' not in _pod(shared['JobSet/first-learner-0'])
  # A model is large, metrics are not.
  assert (
    _pod(found['JobSet/first-syncer'])['terminationGracePeriodSeconds'] == 900
  )
  assert (
    _pod(found['JobSet/first-learner-0'])['terminationGracePeriodSeconds'] == 30
  )


def test_files_are_copied_as_they_grow_and_once_more_at_the_end(
  tmp_path, monkeypatch
):
  workdir, bucket = tmp_path / 'work dir', tmp_path / 'bucket'
  monkeypatch.setattr(gke_sidecars, 'RESULTS_FOLDER', str(bucket))
  monkeypatch.setattr(gke_sidecars, 'COPIED_EVERY_S', 0.1)
  metrics = workdir / 'metrics' / 'learner-0.jsonl'
  metrics.parent.mkdir(parents=True)
  metrics.write_text('1\n')
  (workdir / 'tape.jsonl').touch()
  (workdir / 'tape.jsonl.000001').touch()
  (workdir / 'checkpoints').mkdir()
  beside = gke_sidecars.results(a_launch(workdir=str(workdir), image='a:1'))
  copied = bucket / 'first' / 'metrics' / 'learner-0.jsonl'
  with subprocess.Popen(beside['command']) as started:
    try:
      until(copied.exists, 60, 'a first copy')
      metrics.write_text('1\n2\n')
      until(lambda: copied.read_text() == '1\n2\n', 60, 'a second')
      (workdir / 'summary.json').touch()
    finally:
      started.terminate()
    assert started.wait(60) == 0
  found = sorted(each.name for each in (bucket / 'first').iterdir())
  assert found == [
    'metrics', 'summary.json', 'tape.jsonl', 'tape.jsonl.000001',
  ]  # fmt: skip


def test_the_syncer_is_probed(tmp_path):
  whole = dataclasses.replace(_launch(), workdir=str(tmp_path / 'work dir'))
  found = _all(whole)
  (container,) = _pod(found['JobSet/first-syncer'])['containers']
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
  (learner,) = _pod(found['JobSet/first-learner-0'])['containers']
  assert not [name for name in learner if name.endswith('Probe')]


def test_figures_are_served_where_a_port_is_given():
  found = _all(_launch(), metrics_port=9100)
  syncer = found['JobSet/first-syncer']
  _check(syncer)
  (beside,) = _pod(syncer)['initContainers']
  assert beside['ports'] == [
    {'name': 'metrics', 'containerPort': 9100, 'protocol': 'TCP'}
  ]
  assert beside['livenessProbe']['httpGet'] == {
    'path': '/metrics', 'port': 'metrics',
  }  # fmt: skip
  assert (
    'diloco.watch /workdir --insecure --host=$(DILOCO_HOST)'
    in (beside['command'][-1])
  )
  noted = _job(syncer)['template']['metadata']['annotations']
  assert noted['prometheus.io/port'] == '9100'
  learner = _job(found['JobSet/first-learner-0'])['template']['metadata']
  assert 'annotations' not in learner
  assert 'initContainers' not in _pod(_all(_launch())['JobSet/first-syncer'])


def _evaluated_launch():
  given = quickstart.get_config()
  given.transport.data_plane = 'grpc'
  given.run.eval_every_rounds = 16
  return launch(
    run_config.build(given),
    ['--config=experiments/quickstart.py'],
    'quickstart.py',
    'text of the configuration\n',
    ['--token_file=/etc/diloco/secret/token', '--log_json'],
    asked(workdir='/workdir', image='example.org/diloco:1'),
  )


def _job(manifest: dict) -> dict:
  return manifest['spec']['replicatedJobs'][0]['template']['spec']


def _pod(manifest: dict) -> dict:
  return _job(manifest)['template']['spec']
