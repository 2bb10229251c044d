# SPDX-License-Identifier: Apache-2.0
"""A contract of all back ends: what a launch gets from each of them."""

import dataclasses

import pytest

from launch.agent import learner_flags
from launch.backends import BACKENDS
from launch.backends.base import seeing
from tests.backends.launch_values import (
  AWKWARD,
  a_large_launch,
  a_launch,
  a_sliced_launch,
)
from tests.backends.machines import ADDRESS, MACHINES

pytestmark = pytest.mark.beside
COMMON = ['--config=experiments/quickstart.py', '--workdir=/workdir']
TOKEN = '--token_file=/etc/diloco/secret/token'
HOST = f'--config.transport.host={ADDRESS}'


@pytest.fixture(params=BACKENDS)
def machine(request, tmp_path):
  return MACHINES[request.param](tmp_path)


def launched(machine, *arguments, **changes):
  # Slurm's workdir is of the machine itself.
  workdir = str(getattr(machine, 'workdir', '/workdir'))
  options = {'workdir': workdir, **machine.alone, **changes}
  return a_launch(*arguments, **options)


def got(machine, whole, role):
  """Returns the words of each process, as if the workdir were /workdir."""
  return [
    [word.replace(whole.workdir, '/workdir') for word in each]
    for each in machine.processes(whole, role)
  ]


def test_what_a_learner_gets(machine):
  """Among it an argument that any shell or Kubernetes would change."""
  whole = launched(machine, f'--config.data.path={AWKWARD}')
  (words,) = got(machine, whole, whole.learners[1])
  assert words[:2] == ['-m', 'diloco.learner']
  assert sorted(words[2:]) == sorted(
    [
      *COMMON,
      f'--config.data.path={AWKWARD}',
      TOKEN,
      '--learner=1',
      '--notice_s=25',
      HOST,
      f'--syncer={machine.syncer}',
    ]
  )


def test_the_hosts_of_a_learner_find_each_other(machine):
  whole = launched(machine, **machine.several)
  (words,) = got(machine, whole, whole.learners[1])
  assert [*COMMON, TOKEN] == words[2:5]
  for word in (
    f'--syncer={machine.syncer}',
    f'--hosts={machine.hosts}',
    f'--host={machine.hosts - 1}',
    f'--coordinator={machine.coordinator}',
  ):
    assert word in words


def test_the_agents_of_a_slice_find_the_rendezvous(machine):
  """Behind their own flags, all of which it leaves out, are the learner's."""
  workdir = str(getattr(machine, 'workdir', '/workdir'))
  several = dict(machine.several)
  if 'hosts' in several:
    several['hosts'] *= 3
  whole = a_sliced_launch(3, workdir=workdir, **several)
  (learner,) = whole.learners[:1]
  last = whole.slices_of(learner)[2]
  (words,) = got(machine, whole, last)
  assert words[:3] == ['-m', 'diloco', 'agent']
  joined = ['--megascale'] * learner.resources.accelerator.is_tpu
  assert sorted(words[3:]) == sorted(
    [
      *(*COMMON, TOKEN, '--learner=0', '--notice_s=25', HOST, *joined),
      *(f'--syncer={machine.syncer}', f'--rendezvous={machine.rendezvous}'),
      *('--slice=2', f'--slice_hosts={machine.hosts}'),
      f'--slice_host={machine.hosts - 1}',
    ]
  )
  assert sorted(learner_flags(words[3:])) == sorted(
    [
      *(*COMMON, TOKEN, '--learner=0', '--notice_s=25', HOST),
      f'--syncer={machine.syncer}',
    ]
  )
  (met,) = whole.rendezvous_of(learner)
  (words,) = got(machine, whole, met)
  assert words == [
    *('-m', 'diloco', 'rendezvous', *COMMON, TOKEN, '--learner=0'),
    *(f'--slice_hosts={machine.hosts}', HOST, f'--bind={ADDRESS}:8500'),
  ]


def test_the_evaluator_is_beside_the_syncer_alone(machine):
  whole = launched(machine, evaluated=16, port=7070)
  found = {words[1]: words for words in got(machine, whole, whole.syncer)}
  assert found == {
    'diloco.syncer': [
      *('-m', 'diloco.syncer', *COMMON, TOKEN, '--log_json', HOST),
      f'--bind={ADDRESS}:7070',
    ],
    'diloco.evaluator': ['-m', 'diloco.evaluator', *COMMON, '--log_json'],
  }
  (learner,) = got(machine, whole, whole.learners[0])
  assert 'diloco.learner' in learner


def test_a_shard_of_the_syncer_finds_the_one_that_leads(machine):
  whole = launched(machine, shards=3)
  (words,) = got(machine, whole, whole.shards[1])
  assert words == [
    *('-m', 'diloco.syncer_shard', *COMMON, TOKEN, '--shard=2', HOST),
    f'--leader={machine.syncer}',
  ]


def test_every_role_serves_metrics_at_its_own_port(machine):
  whole = launched(machine, evaluated=16)
  for role in (whole.syncer, whole.learners[1]):
    assert 'metrics' not in str(got(machine, whole, role))
  whole = dataclasses.replace(whole, metrics_port=9100)
  ports = {
    words[1]: [word for word in words if 'metrics' in word]
    for role in (whole.syncer, whole.learners[1])
    for words in got(machine, whole, role)
  }
  assert ports == {
    f'diloco.{name}': [f'--metrics_bind={ADDRESS}:{port}', '--metrics_open']
    for name, port in (('syncer', 9100), ('evaluator', 9101), ('learner', 9103))
  }


@pytest.mark.parametrize(
  ('code', 'restarted'),
  [(0, 0), (64, 0), (69, 0), (78, 0), (1, 1), (137, 1), (143, 1)],
)
def test_what_becomes_of_a_learner_that_exits(machine, code, restarted):
  whole = launched(machine)
  assert machine.is_restarted(whole, code) == bool(restarted)


def test_restarts_are_used_up(machine):
  whole = launched(machine, restarts_max=2)
  assert machine.is_restarted(whole, 1, restarts=1)
  assert not machine.is_restarted(whole, 1, restarts=2)


def test_an_evaluator_reads_the_checkpoints_of_all_shards(capsys):
  whole = a_launch(evaluated=16, shards=2)
  assert seeing(whole, is_shared=False).evaluator is None
  assert 'the checkpoints of all shards' in capsys.readouterr().err
  assert seeing(whole, is_shared=True) == whole
  alone = a_launch(evaluated=16)
  assert seeing(alone, is_shared=False) == alone


SHOWN = {
  'gke': ('memory: {0}Gi', 'storage: {1}Gi', 'name: first-shard-2'),
  'queued_resources': (
    '--custom-memory={0}GB', '--boot-disk-size={1}GB', '--custom-extensions',
    'create first-shard-2',
  ),
  'slurm': ('--mem={0}G', '--job-name=first-shard-2'),
}  # fmt: skip


@pytest.mark.parametrize('target', BACKENDS)
def test_the_syncer_and_its_shards_get_what_the_planner_says(target):
  chips = {'accelerator': 'v5e-32'}
  if target == 'slurm':
    chips = {'accelerator': 'gpu', 'gpus_per_host': 8, 'hosts': 4}
  whole, said = a_large_launch(shards=3, **chips), []
  needs = dict.fromkeys(BACKENDS[target].NEEDS, 'x')
  backend = BACKENDS[target](dry_run=True, say=said.append, **needs)
  assert backend.start(whole) == 0
  place = whole.syncer.resources
  for text in SHOWN[target]:
    assert text.format(place.memory_gib, place.disk_gib) in '\n'.join(said)
  alone = a_large_launch(**chips).syncer.resources
  assert place.memory_gib < 0.8 * alone.memory_gib > 80
  assert place.disk_gib < 0.6 * alone.disk_gib
