# SPDX-License-Identifier: Apache-2.0
"""A launch as a value: what it holds, and what it refuses with which words."""

import dataclasses
import math

import pytest

from diloco.config.sections import ConfigError
from diloco.sizing import syncer_machine
from launch import job, syncer_sizes
from launch.backends import gke, queued_resources
from launch.backends.manifest_text import as_yaml
from launch.backends.queued_resources import Cloud
from launch.job import only
from tests.backends.launch_values import (
  a_config,
  a_large_config,
  a_large_launch,
  a_launch,
)


def test_the_syncer_gets_what_the_planner_says():
  whole, config = a_large_launch('v5e-32'), a_large_config('v5e-32')
  planned, place = syncer_machine.of_config(config), whole.syncer.resources
  assert place.memory_gib == planned.memory_gib > 100
  assert place.disk_gib == planned.disk_gib > 190
  assert not [*syncer_sizes.notes(config, place.memory_gib, place.disk_gib)]
  rendered = as_yaml(gke.manifests(whole, gke.GkeOptions()))
  assert f'memory: {planned.memory_gib}Gi' in rendered
  assert f'storage: {planned.disk_gib}Gi' in rendered
  made = queued_resources.create_machine(
    whole, whole.syncer, Cloud('p', 'z'), 'script'
  )
  assert f'--custom-memory={planned.memory_gib}GB' in made
  assert '--custom-extensions' in made  # More than 6.5 GB for a CPU.
  assert f'--boot-disk-size={planned.disk_gib}GB' in made


def test_less_than_that_is_said():
  config = a_large_config('v5e-32')
  place = a_large_launch('v5e-32', syncer_memory_gib=16).syncer.resources
  (note,) = syncer_sizes.notes(config, place.memory_gib, place.disk_gib)
  assert note.startswith('--syncer_memory_gib=16: the syncer takes 123 GiB')


def test_a_model_of_ones_own_gets_what_is_said():
  given = a_config(devices=1)
  model = dataclasses.replace(given.model, kind='experiments.own_model:model')
  config = dataclasses.replace(given, model=model)
  assert syncer_sizes.planned(config) == (4, 16, 50)
  (note,) = syncer_sizes.notes(config, 16, 50)
  assert 'kind=experiments.own_model:model: how large it is' in note


def _refusal(**changes) -> str:
  with pytest.raises(ConfigError) as caught:
    a_launch(**changes)
  return '\n'.join(caught.value.problems)


@pytest.mark.parametrize('name', job.TPUS)
def test_chips_of_hosts_are_chips_of_the_topology(name):
  chosen = job.accelerator(name)
  chips = math.prod(int(side) for side in chosen.topology.split('x'))
  assert chosen.hosts * chosen.chips_per_host == chips
  family, _, number = name.partition('-')
  assert chips == int(number) // (2 if family == 'v5p' else 1)


def test_a_slice_of_v5e_goes_by_both_names():
  """Both names are the same slice, as `diloco.plan` takes them."""
  assert job.accelerator('v5e-256') is job.accelerator('v5litepod-256')


@pytest.mark.parametrize(
  'flag, missing',
  [
    ('--token_file', {'has_token': False}),
    ('--transfer_fenced', {'transfer_fenced': False}),
  ],
)
def test_what_the_hosts_of_a_learner_would_refuse(flag, missing):
  with pytest.raises(ConfigError, match=f'4 hosts .*give {flag}'):
    a_launch(accelerator='v5litepod-16', **missing)
  a_launch(accelerator='v5litepod-16', insecure=True, **missing)
  a_launch(accelerator='v5litepod-4', **missing)


def test_the_mesh_counts_the_devices_of_all_hosts():
  a_launch(accelerator='v5litepod-16')  # Of 4 hosts; the mesh has 16.
  a_launch(accelerator='gpu', gpus_per_host=8, hosts=2)
  with pytest.raises(ConfigError, match='has 16 devices there, and config'):
    a_launch(accelerator='v5litepod-16', mesh=4)


def test_a_slice_has_the_hosts_that_it_has():
  a_launch(accelerator='v5litepod-16', hosts=4)
  with pytest.raises(
    ConfigError, match='--hosts=2: a slice v5litepod-16 has 4'
  ):
    a_launch(accelerator='v5litepod-16', hosts=2)


def test_an_unknown_accelerator_names_the_known():
  told = _refusal(accelerator='v5litepod8')
  assert 'did you mean v5litepod-8?' in told
  assert 'v5p-256' in told


def test_gpus_need_their_number():
  assert '--gpus_per_host=0' in _refusal(accelerator='gpu')


@pytest.mark.parametrize(
  'name', ['own_model', 'Run', '1st', 'run-', '-run', 'a' * 33, 'a b', "it's"]
)
def test_a_name_that_kubernetes_would_refuse(name):
  assert f'--run_name={name}: must be a name of RFC 1123' in _refusal(
    run_name=name
  )


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'knows_peers': False}, 'without proving who they are'),
    ({'accelerator': 'cpu', 'gpus_per_host': 4}, 'config.mesh asks for 4'),
    ({'workdir': 'runs/first'}, 'must be absolute'),
    ({'capacity': 'reservation'}, 'a reservation needs its name'),
    ({'reservation': 'ours'}, 'a reservation needs its name'),
    ({'port': 0}, '--port=0: must be in 1 … 65535'),
    ({'notice_s': 0}, '--notice_s=0'),
    ({'restarts_max': -1}, '--restarts_max=-1'),
    ({'at_first': 17}, '--learners_at_first=17: must be in 1 … 16'),
  ],
)
def test_refused(changes, words):
  assert words in _refusal(**changes)


def test_all_problems_at_once():
  told = _refusal(run_name='A', port=0, knows_peers=False)
  assert len(told.splitlines()) == 3


def test_who_is_in_it():
  whole = a_launch(learners=3, at_first=2)
  assert whole.role_name(whole.syncer) == 'first-syncer'
  assert [whole.role_name(each) for each in whole.first_learners] == [
    'first-learner-0',
    'first-learner-1',
  ]
  assert only(whole, 2).name == 'learner-2'


@pytest.mark.parametrize('learner', [-1, 16])
def test_nobody_else_is(learner):
  with pytest.raises(ConfigError, match='has learners 0 to 15'):
    only(a_launch(), learner)
