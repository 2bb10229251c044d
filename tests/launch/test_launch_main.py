# SPDX-License-Identifier: Apache-2.0
"""`python -m launch.main`: what it prints, runs and refuses, without jax."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from launch.backends import commands
from launch.backends.commands import CommandFailed
from launch.backends.registry import Gke, Slurm
from tests.backends.launch_values import a_launch

pytestmark = pytest.mark.beside

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = '--config=experiments/quickstart.py:learners=4'
# As `python -m launch.main`; and what of jax it has imported, if anything.
MAIN = """
import runpy, sys
sys.argv[0] = 'launch.main'
try:
  runpy.run_module('launch.main', run_name='__main__', alter_sys=True)
finally:
  heavy = {'jax', 'jaxlib', 'flax', 'optax', 'orbax'} & set(sys.modules)
  print('imported:', sorted(heavy), file=sys.stderr)
"""
FLAGS = {
  'local': ['--workdir=/tmp/run'],
  'gke': [
    '--workdir=/workdir',
    '--image=example.org/diloco:1',
    '--accelerator=v5litepod-8',
    '--config.mesh.fsdp=8',
    '--capacity=spot',
    '--secret=quickstart-{role}',
    '--token_file=/etc/diloco/secret/token',
    '--transfer_fenced',
  ],
  'queued_resources': [
    '--workdir=/workdir',
    '--image=example.org/diloco:1',
    '--accelerator=v5litepod-8',
    '--config.mesh.fsdp=8',
    '--project=p',
    '--zone=z',
    '--insecure',
  ],
  'slurm': [
    '--workdir=/shared/run',
    '--accelerator=gpu',
    '--gpus_per_host=8',
    '--config.mesh.fsdp=8',
    '--token_file=/shared/token',
    '--transfer_fenced',
    '--sbatch=--partition=a100',
  ],
}
# Of each, a line that its output has.
SHOWN = {
  'local': '# learner-3',
  'gke': '  name: quickstart-learner-3',
  'queued_resources': 'gcloud compute tpus queued-resources list',
  'slurm': '--array=0,1,2,3 --dependency=after:SYNCER_JOB --partition=a100',
}
WHERE = list(FLAGS)
STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" >>"$FAKES/called"
cat >"$FAKES/input"
case $(basename "$0") in
  squeue) cat "$FAKES/queue" ;;
  sbatch) echo '4711;cluster' ;;
esac
if [[ -e $FAKES/refusal ]]; then cat "$FAKES/refusal" >&2; exit 3; fi
"""


def _main(*arguments, environment=None):
  return subprocess.run(
    [sys.executable, '-c', MAIN, *arguments],
    cwd=ROOT,
    env={**os.environ, **(environment or {})},
    capture_output=True,
    text=True,
    timeout=240,
  )


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


@pytest.mark.parametrize('where', WHERE)
def test_a_dry_run_starts_nothing_and_imports_no_jax(where, tmp_path):
  # With this PATH it could not start anything either.
  ended = _main(
    CONFIG,
    f'--to={where}',
    '--dry_run',
    *FLAGS[where],
    environment={'PATH': str(tmp_path)},
  )
  assert ended.returncode == 0, ended.stderr
  assert SHOWN[where] in ended.stdout
  assert 'imported: []' in ended.stderr


@pytest.mark.parametrize('where', WHERE)
def test_all_roles_log_in_the_same_way(where):
  shown = _main(
    CONFIG, f'--to={where}', '--dry_run', '--log_json', *FLAGS[where]
  ).stdout
  # Slurm's learners are one script; locally the evaluation is a process too.
  times = {'slurm': 2, 'local': 6}.get(where, 5)
  assert shown.count('--log_json') == times


def test_what_gke_prints_is_what_kubectl_reads():
  shown = _main(CONFIG, '--to=gke', '--dry_run', *FLAGS['gke']).stdout
  kinds = [each['kind'] for each in yaml.safe_load_all(shown)]
  claim = 'PersistentVolumeClaim'
  assert kinds == ['ConfigMap', 'Service', claim, *['JobSet'] * 5]
  # And the configuration is named as it is mounted.
  assert '--config=/etc/diloco/config/quickstart.py:learners=4' in shown


@pytest.mark.parametrize(
  'arguments, words',
  [
    (['--to=gke', '--workdir=/w'], '--image: is missing'),
    (
      ['--to=queued_resources', *FLAGS['queued_resources'], '--learner_cpus=4'],
      '--learner_cpus: is for --to=gke and --to=slurm only',
    ),
    (['--to=slurm', *FLAGS['gke']], '--image: is for --to=gke'),
    (['--to=mars'], 'mars'),
    (['--to=local'], '--workdir: is missing'),
    (['--to=local', '--port=1'], '--port: is for --to=gke'),
    (
      ['--to=gke', *FLAGS['gke'], '--config.mesh.fsdp=4'],
      'a learner has 8 devices there, and config.mesh asks for 4',
    ),
    (
      ['--to=gke', *FLAGS['gke'], '--hosts=2,1'],
      '--hosts=2,1: one number for all, but for --to=local',
    ),
    (
      ['--to=gke', *FLAGS['gke'], '--hosts=2'],
      '--hosts=2: a slice v5litepod-8 has 1',
    ),
    (['--to=gke', *FLAGS['gke'], '--cpu_devices'], '--cpu_devices: is for'),
    (
      ['--to=local', '--workdir=/tmp/run', '--hosts=3', '--dry_run'],
      '--hosts=3: the 3 of learner 0 do not share the devices',
    ),
    (
      ['--to=gke', *FLAGS['gke'], '--chips_per_learner=2'],
      '--chips_per_learner: is for --to=local only',
    ),
    (
      ['add-learner', '--to=local', '--workdir=/no/run', '--learner=3'],
      '--workdir=/no/run: no launcher is running there',
    ),
    (['start-over', '--to=gke', *FLAGS['gke']], 'start-over: must be one of'),
    (
      ['add-learner', '--to=gke', '--dry_run', *FLAGS['gke']],
      '--learner: is for add-learner',
    ),
    (
      ['--to=gke', *FLAGS['gke'], '--token_file=token'],
      '--token_file=token: in a container',
    ),
  ],
)
def test_refused(arguments, words):
  ended = _main(CONFIG, *arguments)
  assert ended.returncode == 78
  assert words in ended.stderr
  assert 'Traceback' not in ended.stderr


def test_kubectl_gets_all(programs):
  ended = _main(CONFIG, '--to=gke', *FLAGS['gke'])
  assert ended.returncode == 0, ended.stderr
  called = (programs / 'called').read_text()
  assert called == 'kubectl --namespace=default apply --filename=-\n'
  assert len(list(yaml.safe_load_all((programs / 'input').read_text()))) == 8


def test_what_a_program_says_is_passed_on(programs):
  (programs / 'refusal').write_text('error: no cluster\n')
  ended = _main(CONFIG, '--to=gke', *FLAGS['gke'])
  assert ended.returncode == 1
  assert 'kubectl --namespace=default apply --filename=-' in ended.stderr
  assert 'exit code 3' in ended.stderr
  assert 'error: no cluster' in ended.stderr


def test_a_program_that_is_missing_is_named(monkeypatch, tmp_path):
  monkeypatch.setenv('PATH', str(tmp_path))
  with pytest.raises(CommandFailed, match="no program 'kubectl' on the PATH"):
    Gke(commands.run).start(a_launch(image='a:1'))


def test_kubernetes_adds_and_removes_one_learner(programs):
  backend = Gke(commands.run, namespace='lab')
  whole = a_launch(image='a:1', at_first=1)
  backend.add(whole, 1)
  (added,) = yaml.safe_load_all((programs / 'input').read_text())
  assert added['metadata']['name'] == 'first-learner-1'
  backend.remove(whole, 1)
  assert (programs / 'called').read_text().splitlines() == [
    'kubectl --namespace=lab apply --filename=-',
    'kubectl --namespace=lab delete jobset first-learner-1',
  ]


def test_slurm_starts_the_syncer_and_the_first_learners(programs, tmp_path):
  whole = a_launch(workdir=str(tmp_path / 'run'), learners=3, at_first=2)
  Slurm(commands.run, ('--partition=a',)).start(whole)
  called = (programs / 'called').read_text().splitlines()
  jobs = [line for line in called if line.startswith('sbatch')]
  assert '--job-name=first-syncer' in jobs[0]
  assert '--array=0,1 --dependency=after:4711 --partition=a' in jobs[1]
  assert (tmp_path / 'run' / 'logs').is_dir()


def test_slurm_adds_and_removes_one_learner(programs, tmp_path):
  backend = Slurm(commands.run)
  whole = a_launch(workdir=str(tmp_path / 'run'))
  backend.add(whole, 1)
  (programs / 'queue').write_text('9_0 0 RUNNING\n12_1 1 RUNNING\n')
  backend.remove(whole, 1)
  called = (programs / 'called').read_text().splitlines()
  assert '--array=1' in called[1]
  assert called[-1] == 'scancel --batch --signal=USR1 12_1'


def test_slurm_never_starts_a_learner_twice(programs, tmp_path):
  (programs / 'queue').write_text('9_1 1 PENDING\n')
  whole = a_launch(workdir=str(tmp_path / 'run'))
  with pytest.raises(ValueError, match='first-learner-1: is in the queue'):
    Slurm(commands.run).start(whole)
  assert 'sbatch' not in (programs / 'called').read_text()


def test_arguments_pass_as_they_are(tmp_path):
  words = ["a b'c", '$(d)', '*', '']
  show = 'import json, sys; print(json.dumps(sys.argv[1:]))'
  text = commands.run([sys.executable, '-I', '-c', show, *words])
  assert json.loads(text) == words


@pytest.mark.parametrize(
  ('main', 'more'), [('local', ()), ('main', ('to', 'accelerator', 'zone'))]
)
def test_help_lists_the_flags_and_says_what_each_is(main, more):
  done = subprocess.run(
    [sys.executable, '-m', f'launch.{main}', '--help'],
    capture_output=True,
    text=True,
  )
  for name in ('config', 'workdir', 'hosts', 'tls_ca', 'token_file', *more):
    assert f'\n  --{name}=' in done.stdout
  assert '\n  --log_json\n' in done.stdout
  texts = re.findall(r'^  --.*\n      (.*)', done.stdout, re.MULTILINE)
  assert len(texts) > 15
  assert not [text for text in texts if text.startswith(('Of ', 'From '))]
