# SPDX-License-Identifier: Apache-2.0
"""`python -m launch.main`: what it prints, runs and refuses, without jax."""

import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from diloco.config import unlike
from diloco.config.hardware import TOPOLOGIES
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import Workdir
from diloco.sizing import memory
from launch import job
from launch.backends import BACKENDS, base, gke, queued_resources
from launch.backends.base import CommandFailed
from launch.backends.gke import Gke
from launch.backends.slurm import Slurm
from launch.job import only
from launch.program import Processes, on_this_machine, program
from tests.backends.launch_values import (
  a_config,
  a_large_config,
  a_large_launch,
  a_launch,
)
from tests.backends.machines import pod_of
from tests.launch.forked import run_all

pytestmark = pytest.mark.beside

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = '--config=experiments/quickstart.py:learners=4'
FLAGS = {
  'gke': [
    *('--workdir=/workdir', '--image=example.org/diloco:1'),
    *('--accelerator=v5litepod-8', '--config.mesh.fsdp=8', '--capacity=spot'),
    *('--secret=quickstart-{role}', '--token_file=/etc/diloco/secret/token'),
    '--transfer_fenced',
  ],
  'queued_resources': [
    *('--workdir=/workdir', '--image=example.org/diloco:1'),
    *('--accelerator=v5litepod-8', '--config.mesh.fsdp=8'),
    *('--project=p', '--zone=z', '--insecure'),
  ],
  'slurm': [
    *('--workdir=/shared/run', '--accelerator=gpu', '--gpus_per_host=8'),
    *('--config.mesh.fsdp=8', '--token_file=/shared/token'),
    *('--transfer_fenced', '--sbatch=--partition=a100'),
  ],
}
# Of each, a line that its output has, and how often all roles are there.
SHOWN = {
  'gke': ('  name: quickstart-learner-3', 6),
  'queued_resources': ('gcloud compute tpus queued-resources list', 6),
  # Learners are one script.
  'slurm': ('--array=0,1,2,3 --dependency=after:SYNCER_JOB --partition=a', 3),
}
STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" >>"$FAKES/called"
cat >"$FAKES/input"
case $(basename "$0") in
  squeue) cat "$FAKES/queue" ;;
  sbatch) echo '4711;cluster' ;;
esac
if [[ -e $FAKES/refusal ]]; then cat "$FAKES/refusal" >&2; exit 3; fi
"""


def _main(*calls, **environment):
  return run_all([['launch.main', *words] for words in calls], **environment)


@pytest.fixture
def programs(tmp_path, monkeypatch):
  """A folder that is the PATH's first, with stand-ins that keep their input."""
  for name in ('kubectl', 'sbatch', 'squeue', 'scancel'):
    (tmp_path / name).write_text(STAND_IN)
    (tmp_path / name).chmod(0o755)
  (tmp_path / 'queue').touch()
  monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
  monkeypatch.setenv('FAKES', str(tmp_path))
  return tmp_path


def test_a_dry_run_starts_nothing_and_all_roles_log_in_the_same_way(tmp_path):
  assert {*BACKENDS} == set(FLAGS)
  # With this PATH it could not start anything either.
  calls = [
    [CONFIG, f'--to={where}', '--dry_run', '--log_json', *flags]
    for where, flags in FLAGS.items()
  ]
  for where, ended in zip(FLAGS, _main(*calls, PATH=str(tmp_path))):
    assert ended.code == 0, ended.err
    line, times = SHOWN[where]
    assert line in ended.out
    assert ended.out.count('--log_json') == times


def test_the_launch_of_unlike_learners_that_the_page_shows():
  page = (ROOT / 'docs' / 'tpu.md').read_text()
  (command,) = re.findall(r'^    diloco launch ((?:.*\\\n)*.*)', page, re.M)
  words = shlex.split(command.replace('\\\n', ' '))
  (ended,) = _main([*words, '--dry_run'])
  assert ended.code == 0, ended.err
  jobs = [x for x in yaml.safe_load_all(ended.out) if x['kind'] == 'JobSet']
  selected = [[*pod_of(job).get('nodeSelector', {}).values()] for job in jobs]
  small, large = ['tpu-v5-lite-podslice', '2x2'], ['tpu-v5p-slice', '2x2x2']
  assert selected == [[], small, small, small, large]


def test_help_has_a_sentence_on_each_back_end():
  (ended,) = _main(['--help'])
  said = ' '.join(ended.out.split())
  for name, backend in BACKENDS.items():
    assert f'{name}: {backend.__doc__.splitlines()[0]}' in said


def test_what_gke_prints_is_what_kubectl_reads():
  (ended,) = _main([CONFIG, '--to=gke', '--dry_run', *FLAGS['gke']])
  kinds = [each['kind'] for each in yaml.safe_load_all(ended.out)]
  claim = 'PersistentVolumeClaim'
  assert kinds == ['ConfigMap', 'Service', claim, *['JobSet'] * 5]
  # And the configuration is named as it is mounted.
  assert '--config=/etc/diloco/config/quickstart.py:learners=4' in ended.out


GKE = ['--to=gke', *FLAGS['gke']]
UNLIKE = '--config.unlike_learners'
SLICED = ['--config.mesh.slices=2', '--config.data.batch=16']
REFUSED = (
  (['--to=gke', '--workdir=/w'], '--image: is missing'),
  (
    ['--to=queued_resources', *FLAGS['queued_resources'], '--learner_cpus=4'],
    '--learner_cpus: is for --to=gke and --to=slurm only',
  ),
  (['--to=slurm', *FLAGS['gke']], '--image: is for --to=gke'),
  (['--to=mars'], 'mars'),
  (['--to=gke'], '--workdir: is missing'),
  (['--workdir=/w'], '--to: is missing, one of gke, queued_resources, slurm;'),
  ([*GKE, '--config.mesh.fsdp=4'], 'a learner has 8 devices there, and config'),
  (
    [*GKE, *SLICED, '--hosts=3'],
    '--hosts=3: the 2 slices of a learner (config.mesh.slices) do not share',
  ),
  ([*GKE, *SLICED, '--hosts=4'], '--hosts=4: a slice v5litepod-8 has 1'),
  (
    [*GKE, *SLICED, '--config.mesh.fsdp=4'],
    'each of 2 slices (config.mesh.slices) has 8 devices there, and config',
  ),
  (
    [*GKE, *SLICED, f'--run_name={"a" * 25}'],
    'must have at most 24 characters, with config.mesh.slices=2',
  ),
  (
    [*GKE[:-1], *SLICED, '--config.transport.data_plane=grpc'],
    'the 2 hosts of a learner are joined by jax.distributed',
  ),
  ([*GKE, '--hosts=2'], '--hosts=2: a slice v5litepod-8 has 1'),
  ([*GKE, '--zone=z'], '--zone: is for --to=queued_resources only'),
  ([*GKE, '--token_file=token'], '--token_file=token: in a container'),
  (
    ['--to=slurm', *FLAGS['slurm'], '--accelerator=v5litepod-8'],
    '--accelerator=v5litepod-8: --to=slurm takes cpu and gpu',
  ),
  (
    ['--to=slurm', *FLAGS['slurm'], f'{UNLIKE}=1: accelerator=v5p-8'],
    'learner 1: --accelerator=v5p-8: --to=slurm takes cpu and gpu',
  ),
  (
    ['--to=slurm', *FLAGS['slurm'], f'{UNLIKE}=1: capacity=spot'],
    'learner 1: --capacity: is for --to=gke and --to=queued_resources only',
  ),
  ([*GKE, f'{UNLIKE}=1: seed=3'], 'learner 1: seed=3: is the same for all'),
  ([*GKE, f'{UNLIKE}=16: hosts=1'], 'the run has learners 0 to 15'),
  (['start-over', *GKE], 'start-over: must be one of'),
  (['add-learner', '--dry_run', *GKE], '--learner: is for add-learner'),
)


def test_refused():
  found = _main(*([CONFIG, *arguments] for arguments, _ in REFUSED))
  for (arguments, words), ended in zip(REFUSED, found, strict=True):
    assert ended.code == 78, arguments
    assert words in ended.err
    assert 'Traceback' not in ended.err


def test_launching_imports_no_jax():
  heavy = ('jax', 'flax', 'optax', 'orbax', 'grain', 'grpc', 'matplotlib')
  code = (
    'import sys, launch.main, launch.local, launch.backends, launch.train\n'
    f'print([m for m in {heavy} if m in sys.modules])'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert done.stdout == '[]\n'


# What the steps of launch/README.md start.

TEXT = (ROOT / 'launch' / 'README.md').read_text()
# What each back end's variable ends in, by a line of what is shown.
ENDS = {
  'GKE': 'name: first-learner-4',
  'QR': '--labels=run=first,role=learner,attempt=1',
  'SLURM': '--array=4',
}


def _words(command: str) -> list[str]:
  """Returns a command of the page with its variables, behind `python -m`."""
  assert command in TEXT
  given = re.findall(r'^ +export (.*)', TEXT, re.MULTILINE)
  given += re.findall(r'^ +((?:RUN|GKE|QR|SLURM|POD)="[^"]*")', TEXT, re.M)
  ended = subprocess.run(
    ['bash', '-eu'],
    input='\n'.join(
      [*given, f'printf "%s\\n" {command.removeprefix("python -m ")}']
    ),
    capture_output=True,
    text=True,
    check=True,
  )
  words = ended.stdout.splitlines()
  return words if '--dry_run' in words else [*words, '--dry_run']


def test_the_launches_of_the_page():
  calls = []
  for name in ENDS:
    calls.append(f'python -m launch.main $RUN ${name} --dry_run')
    add = 'add-learner --learner=4'
    calls.append(f'python -m launch.main {add} $RUN ${name}')
  for name in ('GKE', 'QR'):
    calls.append(f'python -m launch.main $RUN ${name} $POD --dry_run')
  found = dict(zip(calls, run_all([_words(each) for each in calls])))
  assert [each for each in found.values() if each.code] == []
  for name, end in ENDS.items():
    shown = found[f'python -m launch.main $RUN ${name} --dry_run'].out
    assert 'learner-3' in shown or '--array=0,1,2,3' in shown
    assert 'learner-4' not in shown
    add = 'add-learner --learner=4'
    assert end in found[f'python -m launch.main {add} $RUN ${name}'].out
  for name, end in (
    ('GKE', '              - --hosts=4\n'),
    ('QR', '--accelerator-type=v5litepod-16 '),
  ):
    shown = found[f'python -m launch.main $RUN ${name} $POD --dry_run'].out
    assert end in shown and 'pod-learner-3' in shown


# Back ends call programs of their clusters.


def test_kubectl_gets_all(programs):
  (ended,) = _main([CONFIG, *GKE])
  assert ended.code == 0, ended.err
  called = (programs / 'called').read_text()
  assert called == 'kubectl --namespace=default apply --filename=-\n'
  assert len(list(yaml.safe_load_all((programs / 'input').read_text()))) == 8


def test_what_a_program_says_is_passed_on(programs):
  (programs / 'refusal').write_text('error: no cluster\n')
  (ended,) = _main([CONFIG, *GKE])
  assert ended.code == 1
  assert 'kubectl --namespace=default apply --filename=-' in ended.err
  assert 'exit code 3' in ended.err
  assert 'error: no cluster' in ended.err


def test_a_program_that_is_missing_is_named(monkeypatch, tmp_path):
  monkeypatch.setenv('PATH', str(tmp_path))
  with pytest.raises(CommandFailed, match="no program 'kubectl' on the PATH"):
    Gke().start(a_launch())


def test_kubernetes_adds_and_removes_one_learner(programs):
  backend, whole = Gke(namespace='lab'), a_launch(learners_at_first=1)
  backend.add(whole, 1)
  (added,) = yaml.safe_load_all((programs / 'input').read_text())
  assert added['metadata']['name'] == 'first-learner-1'
  backend.remove(whole, 1)
  assert (programs / 'called').read_text().splitlines() == [
    'kubectl --namespace=lab apply --filename=-',
    'kubectl --namespace=lab delete jobset first-learner-1',
  ]


def test_slurm_starts_adds_and_removes_learners(programs, tmp_path):
  workdir = tmp_path / 'run'
  whole = a_launch(workdir=str(workdir), learners=3, learners_at_first=2)
  backend = Slurm(sbatch=['--partition=a'])
  backend.start(whole)
  assert (workdir / 'logs').is_dir()
  backend.add(whole, 2)
  (programs / 'queue').write_text('9_0 0 RUNNING\n12_1 1 RUNNING\n')
  backend.remove(whole, 1)
  called = (programs / 'called').read_text().splitlines()
  _, learners, joining = [each for each in called if each.startswith('sbatch')]
  assert '--array=0,1 --dependency=after:4711 --partition=a' in learners
  assert '--array=2 --partition=a' in joining
  assert called[-1] == 'scancel --batch --signal=USR1 12_1'


def test_slurm_never_starts_a_learner_twice(programs, tmp_path):
  (programs / 'queue').write_text('9_1 1 PENDING\n')
  whole = a_launch(workdir=str(tmp_path / 'run'))
  with pytest.raises(ConfigError, match='first-learner-1: is in the queue'):
    Slurm().start(whole)
  assert 'sbatch' not in (programs / 'called').read_text()


def test_arguments_pass_as_they_are():
  words = ["a b'c", '$(d)', '*', '']
  show = 'import json, sys; print(json.dumps(sys.argv[1:]))'
  text = base.run([sys.executable, '-I', '-c', show, *words])
  assert json.loads(text) == words


# A launch as a value: what it holds, and what it refuses with which words.


def test_the_syncer_gets_what_the_planner_says_or_what_is_given():
  planned = memory.of_config(a_large_config('v5e-32'))
  place = a_large_launch('v5e-32').syncer.resources
  assert place.memory_gib == planned.memory_gib > 100
  assert place.disk_gib == planned.disk_gib > 190
  place = a_large_launch('v5e-32', syncer_memory_gib=16).syncer.resources
  assert place.memory_gib == 16


def test_the_syncer_of_a_model_of_ones_own_has_a_size():
  config = a_config(1, **{'model.kind': 'experiments.own_model:model'})
  place = a_launch(config=config).syncer.resources
  assert (place.cpus, place.memory_gib, place.disk_gib) == (4, 16, 50)


def _refusal(**changes) -> str:
  with pytest.raises(ConfigError) as caught:
    a_launch(**changes)
  return '\n'.join(caught.value.problems)


def test_each_back_end_knows_the_chips_of_all_slices():
  known = {each.chip for each in TOPOLOGIES.values()}
  assert {*gke.SLICES} == {*queued_resources.RUNTIMES} == known


def test_a_slice_of_v5e_goes_by_both_names():
  """Both names are the same slice, as `diloco.plan` takes them."""
  assert job.accelerator('v5e-256') is job.accelerator('v5litepod-256')


V5E_16 = {'accelerator': 'v5litepod-16'}


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
    ({'accelerator': 'gpu'}, '--gpus_per_host=0'),
    ({'accelerator': 'v5litepod8'}, 'did you mean v5litepod-8?'),
    ({'accelerator': 'v5litepod8'}, 'v5p-256'),
    ({**V5E_16, 'mesh': 4}, 'has 16 devices there, and config'),
    ({**V5E_16, 'hosts': 2}, '--hosts=2: a slice v5litepod-16 has 4'),
    ({**V5E_16, 'has_token': False}, '4 hosts of a learner know each other'),
    ({**V5E_16, 'transfer_fenced': False}, 'give --transfer_fenced'),
    ({'workdir': 'runs/first'}, 'must be absolute'),
    ({'capacity': 'reservation'}, 'a reservation needs its name'),
    ({'reservation': 'ours'}, 'a reservation needs its name'),
    ({'port': 0}, '--port=0: must be in 1 … 65535'),
    ({'notice_s': 0}, '--notice_s=0'),
    ({'restarts_max': -1}, '--restarts_max=-1'),
    ({'learners_at_first': 17}, '--learners_at_first=17: must be in 1 … 16'),
    ({'metrics_port': 65530}, '--metrics_port=65530: each role has a port'),
  ],
)
def test_a_launch_that_can_not_be(changes, words):
  assert words in _refusal(**changes)


def test_what_can_be():
  for changes in (
    {**V5E_16, 'insecure': True, 'has_token': False, 'transfer_fenced': False},
    {**V5E_16, 'hosts': 4},
    {'accelerator': 'gpu', 'gpus_per_host': 8, 'hosts': 2},
  ):
    a_launch(**changes)
  told = _refusal(run_name='A', port=0, knows_peers=False)
  assert len(told.splitlines()) == 3, 'all problems at once'


def _unlike(text: str, mesh: int = 8, learners: int = 3, **changes):
  config = a_config(mesh, learners, unlike_learners=text)
  return a_launch(config=config, **changes)


def test_each_learner_has_its_own_machines_and_flags():
  first, second, third = _unlike(
    '1: accelerator=v5p-16, data.batch=16, capacity=on_demand; 2: hosts=0',
    accelerator='v5litepod-8',
    capacity='reservation',
    reservation='ours',
  ).learners[:3]
  assert first.resources == third.resources
  assert first.resources.accelerator.name == 'v5litepod-8'
  assert first.resources.reservation == 'ours'
  place = second.resources
  assert (place.accelerator.name, place.accelerator.hosts) == ('v5p-16', 2)
  assert (place.capacity, place.reservation) == ('on_demand', '')
  assert set(second.arguments) - set(first.arguments) == {
    '--learner=1', '--config.data.batch=16',
  }  # fmt: skip


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('1: mesh.fsdp=4', 'learner 1: --accelerator=v5litepod-8: a learner has 8'),
    ('1-2: hosts=2', 'learners 1-2: --hosts=2: a slice v5litepod-8 has 1'),
    ('1: accelerator=v5e-9', 'learner 1: --accelerator=v5e-9: unknown; did'),
    ('1: capacity=never', 'learner 1: --capacity=never: must be one of spot'),
    ('1: accelerator=gpu, hosts=2', 'learner 1: --gpus_per_host=0: a learner'),
  ],
)
def test_machines_of_a_learner_that_can_not_be(text, words):
  with pytest.raises(ConfigError) as caught:
    _unlike(text, accelerator='v5litepod-8')
  assert words in str(caught.value)


def test_the_options_of_a_learner_are_those_of_a_launch():
  kinds = {
    field.name: field.type for field in dataclasses.fields(job.JobOptions)
  }
  own = {k: kind for k, kind in unlike.TYPES.items() if '.' not in k}
  assert own.pop('sbatch') is str  # A flag of Slurm's alone.
  assert {name: kinds[name] for name in own} == own


def test_who_is_in_it():
  whole = a_launch(learners=3, learners_at_first=2)
  names = [
    whole.role_name(each) for each in (whole.syncer, *whole.first_learners)
  ]
  assert names == ['first-syncer', 'first-learner-0', 'first-learner-1']
  assert only(whole, 2).name == 'learner-2'
  for learner in (-1, 16):
    with pytest.raises(ConfigError, match='has learners 0 to 15'):
      only(whole, learner)


# How many hosts each learner has, and how they share its devices.


def _forced(count):
  return (('XLA_FLAGS', f'--xla_force_host_platform_device_count={count}'),)


def test_hosts_share_the_devices_of_a_learner():
  assert on_this_machine(a_config(4), '2,1', True, '') == (
    Processes(2, _forced(2)),
    Processes(1, _forced(4)),
  )
  assert on_this_machine(a_config(4, 3), '4', False, '') == (Processes(4),) * 3
  (each,) = on_this_machine(a_config(4, 1), '1', True, '--xla_a=b')
  ((_, value),) = each.environment
  assert value == f'--xla_a=b {_forced(4)[0][1]}', 'others are kept'


def test_unlike_learners_here():
  text = '0: hosts=2; 1: mesh.fsdp=2, data.batch=6'
  config = a_config(4, 3, unlike_learners=text)
  flags = ('--config.data.batch=6', '--config.mesh.fsdp=2')
  assert on_this_machine(config, '1', True, '') == (
    Processes(2, _forced(2)),
    Processes(1, _forced(2), flags),
    Processes(1, _forced(4)),
  )
  whole = program(
    config,
    [],
    Workdir(pathlib.Path('w')),
    'localhost:7',
    learners=on_this_machine(config, '1', True, ''),
  )
  own = [{*flags} <= {*role.argv} for role in whole.roles[1:4]]
  assert own == [False, True, False]


def test_other_machines_are_not_here():
  config = a_config(4, 2, unlike_learners='1: accelerator=gpu')
  with pytest.raises(ConfigError, match='learner 1: accelerator: is for `dilo'):
    on_this_machine(config, '1', True, '')


@pytest.mark.parametrize(
  'asked, words',
  [
    *((each, 'must be a number from 1') for each in ('', '0', '-1', '2,')),
    ('2,1,1', '--hosts=2,1,1: has 3 numbers, and there are 2 learners'),
    ('1,3', 'the 3 of learner 1 do not share the devices of config.mesh'),
  ],
)
def test_hosts_that_can_not_be(asked, words):
  with pytest.raises(ConfigError, match=words):
    on_this_machine(a_config(4), asked, False, '')
