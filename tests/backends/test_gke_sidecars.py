# SPDX-License-Identifier: Apache-2.0
"""GKE: containers beside a role do what they are for, and probes work."""

import dataclasses
import os
import subprocess

import pytest

from diloco.config.sections import ConfigError
from launch.backends import gke_sidecars
from launch.backends.registry import check_evaluator
from tests.backends.launch_values import a_launch, an_evaluated_launch
from tests.backends.rendered import (
  check_schema,
  container_launch,
  job_of,
  objects,
  pod_of,
)
from tests.waiting import until

pytestmark = pytest.mark.beside


def test_the_evaluator_is_beside_the_syncer_and_ends_with_it():
  found = objects(an_evaluated_launch())
  syncer = found['JobSet/first-syncer']
  check_schema(syncer)
  pod = pod_of(syncer)
  (beside,) = pod['initContainers']
  (container,) = pod['containers']
  assert beside['restartPolicy'] == 'Always'
  assert beside['command'] == ['python', '-m', 'diloco.evaluator']
  assert beside['args'] == [
    '--config=experiments/quickstart.py', '--workdir=/workdir', '--log_json',
  ]  # fmt: skip
  assert beside['volumeMounts'] == container['volumeMounts']
  assert 'initContainers' not in pod_of(found['JobSet/first-learner-0'])
  assert 'initContainers' not in pod_of(
    objects(container_launch())['JobSet/first-syncer']
  )


def test_what_the_processes_leave_comes_to_a_bucket():
  found = objects(
    an_evaluated_launch(results_bucket='ours'), data_bucket='corpora'
  )
  for role in ('syncer', 'learner-0', 'learner-1'):
    manifest = found[f'JobSet/first-{role}']
    check_schema(manifest)
    pod = pod_of(manifest)
    (volume,) = [v for v in pod['volumes'] if v['name'] == 'results']
    assert volume['csi']['volumeAttributes']['bucketName'] == 'ours'
    assert not volume['csi']['readOnly']
    *before, beside = [
      each for each in pod['initContainers'] if each['name'] != 'evaluator'
    ]
    restored = [] if role == 'syncer' else ['restored']
    assert [each['name'] for each in before] == restored
    assert (beside['name'], beside['restartPolicy']) == ('results', 'Always')
    assert {'name': 'results', 'mountPath': '/results'} in beside[
      'volumeMounts'
    ]
    noted = job_of(manifest)['template']['metadata']['annotations']
    assert noted == {'gke-gcsfuse/volumes': 'true'}
  shared = objects(
    container_launch(results_bucket='ours'), shared_claim='filestore'
  )
  assert 'initContainers' in pod_of(shared['JobSet/first-syncer'])
  assert 'initContainers' not in pod_of(shared['JobSet/first-learner-0'])
  # A model is large, metrics are not.
  assert (
    pod_of(found['JobSet/first-syncer'])['terminationGracePeriodSeconds'] == 900
  )
  assert (
    pod_of(found['JobSet/first-learner-0'])['terminationGracePeriodSeconds']
    == 30
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


def test_a_new_pod_goes_on_with_the_files_of_the_last(tmp_path, monkeypatch):
  workdir, bucket = tmp_path / 'work dir', tmp_path / 'bucket'
  monkeypatch.setattr(gke_sidecars, 'RESULTS_FOLDER', str(bucket))
  whole = a_launch(workdir=str(workdir), image='a:1')
  before = gke_sidecars.restored(whole, whole.learners[1])
  assert 'restartPolicy' not in before
  assert subprocess.run(before['command']).returncode == 0  # The first pod.
  kept = bucket / 'first' / 'metrics'
  kept.mkdir(parents=True)
  for name in ('learner-0', 'learner-1', 'learner-10'):
    (kept / f'{name}.jsonl').write_text(name)
  (kept / 'learner-1.jsonl.000001').touch()
  assert subprocess.run(before['command']).returncode == 0
  found = sorted(path.name for path in (workdir / 'metrics').iterdir())
  assert found == ['learner-1.jsonl', 'learner-1.jsonl.000001']
  assert (workdir / 'metrics' / 'learner-1.jsonl').read_text() == 'learner-1'


def test_the_syncer_is_probed(tmp_path):
  whole = dataclasses.replace(
    container_launch(), workdir=str(tmp_path / 'work dir')
  )
  found = objects(whole)
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


def test_the_page_is_served_where_a_port_is_given():
  found = objects(container_launch(), page_port=8080)
  syncer = found['JobSet/first-syncer']
  check_schema(syncer)
  (beside,) = pod_of(syncer)['initContainers']
  assert beside['ports'] == [
    {'name': 'page', 'containerPort': 8080, 'protocol': 'TCP'}
  ]
  assert beside['livenessProbe']['httpGet'] == {
    'path': '/metrics', 'port': 'page',
  }  # fmt: skip
  assert (
    'diloco.watch /workdir --insecure --host=$(DILOCO_HOST)'
    in (beside['command'][-1])
  )
  assert 'initContainers' not in pod_of(
    objects(container_launch())['JobSet/first-syncer']
  )


def test_every_role_serves_its_metrics_where_a_port_is_given():
  whole = dataclasses.replace(an_evaluated_launch(), metrics_port=9100)
  found = objects(whole)
  for name, port in (
    ('syncer', 9100),
    ('learner-0', 9102),
    ('learner-1', 9103),
  ):
    made = found[f'JobSet/first-{name}']
    check_schema(made)
    (container,) = pod_of(made)['containers']
    bind = f'--metrics_bind=$(DILOCO_HOST):{port}'
    assert [bind, '--metrics_open'] == [
      each for each in container['args'] if 'metrics' in each
    ]
    opened = {
      each['name']: each['containerPort'] for each in container['ports']
    }
    assert opened['metrics'] == port
    noted = job_of(made)['template']['metadata']['annotations']
    assert noted['prometheus.io/port'] == str(port)
  (beside,) = pod_of(found['JobSet/first-syncer'])['initContainers']
  assert '--metrics_bind=$(DILOCO_HOST):9101' in beside['args']
  assert 'DILOCO_HOST' in {each['name'] for each in beside['env']}


def test_no_role_serves_metrics_without_a_port():
  text = str(objects(an_evaluated_launch()))
  assert 'metrics_bind' not in text and 'prometheus.io' not in text


def test_an_evaluator_reads_the_checkpoints_of_all_shards():
  whole = an_evaluated_launch(shards=2)
  with pytest.raises(ConfigError, match='checkpoints of all shards; give one'):
    check_evaluator(whole, is_shared=False)
  check_evaluator(whole, is_shared=True)
  check_evaluator(an_evaluated_launch(), is_shared=False)
