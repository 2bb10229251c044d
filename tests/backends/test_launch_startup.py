# SPDX-License-Identifier: Apache-2.0
"""The script of a virtual machine, run here with stand-ins for its programs."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from launch.backends import startup
from tests.backends.launch_values import (
  AWKWARD,
  a_slice_launch,
  an_evaluated_launch,
  check_golden,
)

pytestmark = pytest.mark.beside


@pytest.mark.parametrize('which', ['syncer', 'learner', 'slice'])
def test_the_startup_script(which, request):
  whole = a_slice_launch(
    accelerator='v5litepod-16' if which == 'slice' else 'v5litepod-8',
    secret='first-{role}',
    secret_files=('tls.crt', 'token'),
    image='us-docker.pkg.dev/p/r/diloco:1',
  )
  role = whole.syncer if which == 'syncer' else whole.learners[1]
  script = startup.startup_script(whole, role, 'p', '10.0.0.1:7777', 2)
  subprocess.run(['bash', '-n'], input=script, text=True, check=True)
  check_golden(
    f'startup-{which}.sh', script, request.config.getoption('--rewrite')
  )


# Answers of the metadata server and the Secret Manager, and a log of requests.
CURL = """#!/bin/bash
echo "$*" >>"$FAKES/asked"
case "$*" in
  *service-accounts*) echo '{"access_token":"t0k.en","expires_in":3599}' ;;
  *network-interfaces*) echo 10.0.0.7 ;;
  *agent-worker-number*) [[ -e $FAKES/named ]] && echo 2; touch $FAKES/named ;;
  *worker-network-endpoints*) echo 'a:8470:10.0.0.5,b:8470:10.0.0.6,c:8470:' ;;
  *secretmanager*) printf '{\\n  "payload": {"data": "aHVzaAo="}\\n}\\n' ;;
esac
"""
DOCKER = f"""#!{sys.executable} -IS
import json, os, pathlib, sys
folder = pathlib.Path(os.environ['FAKES'])
with (folder / 'docker').with_suffix('.jsonl').open('a') as file:
  file.write(json.dumps(sys.argv[1:]) + chr(10))
codes = folder / 'codes'
left = codes.read_text().split()
if sys.argv[1] == 'run':
  codes.write_text(' '.join(left[1:]))
  sys.exit(int(left[0]))
"""


@pytest.fixture
def machine(tmp_path):
  """Runs a startup script here; the containers end with these codes."""
  for name, text in (
    ('curl', CURL),
    ('docker', DOCKER),
    ('iptables', '#!/bin/sh\n'),
    ('sleep', '#!/bin/sh\necho "$1" >>"$FAKES/slept"\n'),
  ):
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)

  def start(script: str, *codes: int) -> list[list[str]]:
    (tmp_path / 'codes').write_text(' '.join(map(str, codes)))
    (tmp_path / 'docker.jsonl').write_text('')
    subprocess.run(
      ['bash'],
      input=script,
      env={
        **os.environ,
        'PATH': f'{tmp_path}:{os.environ["PATH"]}',
        'FAKES': str(tmp_path),
        'DILOCO_FOLDER': str(tmp_path / 'machine'),
      },
      text=True,
      check=True,
      timeout=240,
    )
    lines = (tmp_path / 'docker.jsonl').read_text().splitlines()
    return [call for call in map(json.loads, lines) if call[0] == 'run']

  return tmp_path, start


def _script(*arguments, **changes) -> str:
  whole = a_slice_launch(*arguments, **changes)
  return startup.startup_script(
    whole, whole.learners[1], 'p', '10.0.0.1:7777', 1
  )


def test_the_evaluator_is_started_beside_the_syncer_alone(machine):
  _, start = machine
  whole = an_evaluated_launch()
  script = startup.startup_script(whole, whole.syncer, 'p', '', 1)
  evaluator, syncer = start(script, 0, 0)
  assert evaluator[1:5] == [
    '--network=host', '--detach', '--name=evaluator', '--restart=on-failure',
  ]  # fmt: skip
  assert evaluator[-3:] == [
    '--config=experiments/quickstart.py', '--workdir=/workdir', '--log_json',
  ]  # fmt: skip
  assert 'diloco.evaluator' in evaluator and 'diloco.syncer' in syncer
  learner = startup.startup_script(whole, whole.learners[0], 'p', 'a:1', 1)
  assert 'evaluator' not in learner


def test_every_role_serves_metrics_at_its_own_port(machine):
  folder, start = machine
  whole = dataclasses.replace(an_evaluated_launch(), metrics_port=9100)
  first, learner = whole.syncer, whole.learners[1]
  evaluator, syncer = start(
    startup.startup_script(whole, first, 'p', '', 1), 0, 0
  )
  (folder / 'machine' / 'over').unlink()  # As another machine.
  (other,) = start(startup.startup_script(whole, learner, 'p', 'a:1', 1), 0)
  for call, port in ((syncer, 9100), (evaluator, 9101), (other, 9103)):
    assert [each for each in call if each.startswith('--metrics')] == [
      f'--metrics_bind=10.0.0.7:{port}', '--metrics_open',
    ]  # fmt: skip
    assert '--network=host' in call


def test_what_a_learner_leaves_comes_to_the_bucket(machine):
  """And what its last slice left comes back before it begins."""
  folder, start = machine
  curl = (folder / 'curl').read_text()
  listed = '{"items": [\\n {"name": "first/metrics/learner-1.jsonl"}\\n]}'
  (folder / 'curl').write_text(
    curl.replace(
      'case "$*" in',
      'case "$*" in\n'
      f"  *prefix=first%2Fmetrics*) printf '{listed}' ;;\n"
      '  *alt=media) while [[ $1 != --output ]]; do shift; done\n'
      '    echo kept >"$2" ;;',
    )
  )
  workdir = folder / 'machine' / 'workdir'
  docker = (folder / 'docker').read_text()  # The learner writes some files.
  (folder / 'docker').write_text(
    docker.replace(
      "if sys.argv[1] == 'run':\n",
      "if sys.argv[1] == 'run':\n"
      f"  workdir = pathlib.Path('{workdir}')\n"
      "  for name in ('checkpoints/large', 'tapes/learner-1.jsonl'):\n"
      '    (workdir / name).parent.mkdir(exist_ok=True)\n'
      '    (workdir / name).touch()\n',
    )
  )
  start(_script(results_bucket='ours'), 0)
  assert (workdir / 'metrics' / 'learner-1.jsonl').read_text() == 'kept\n'
  asked = (folder / 'asked').read_text()
  assert (
    '/b/ours/o/first%2Fmetrics%2Flearner-1.jsonl?alt=media' in asked
    and 'prefix=first%2Ftapes%2Flearner-1.jsonl' in asked
  )
  assert '--upload-file ./tapes/learner-1.jsonl' in asked
  assert '/b/ours/o?uploadType=media&name=first%2Ftapes%2Flearner-1' in asked
  assert '--upload-file ./metrics' not in asked  # It has not changed.
  assert 'large' not in asked


@pytest.mark.parametrize(
  'codes, starts', [([0], 1), ([78], 1), ([1, 143, 0], 3), ([1, 64], 2)]
)
def test_which_exit_codes_end_it(machine, codes, starts):
  folder, start = machine
  assert len(start(_script(), *codes)) == starts
  assert (folder / 'machine' / 'over').read_text() == f'{codes[-1]}\n'
  assert f'--data {codes[-1]} ' in (folder / 'asked').read_text()


def test_restarts_of_a_machine_are_used_up(machine):
  _, start = machine
  assert len(start(_script(restarts_max=2), 1, 1, 1, 1)) == 3


def test_a_machine_that_starts_again_does_nothing_after_the_end(machine):
  _, start = machine
  start(_script(), 0)
  assert start(_script(), 0) == []


def test_what_the_container_gets(machine):
  folder, start = machine
  script = _script(
    f'--config.data.path={AWKWARD}', secret='s', secret_files=('token',)
  )
  (call,) = start(script, 0)
  behind = call[call.index('example.org/diloco:1') + 1 :]
  assert behind == [
    '-m',
    'diloco.learner',
    '--config=experiments/quickstart.py',
    f'--config.data.path={AWKWARD}',
    '--workdir=/workdir',
    '--token_file=/etc/diloco/secret/token',
    '--learner=1',
    '--notice_s=25',
    '--config.transport.host=10.0.0.7',
    '--syncer=10.0.0.1:7777',
  ]
  secret = folder / 'machine' / 'secret' / 'token'
  assert secret.read_text() == 'hush\n'
  assert secret.stat().st_mode & 0o077 == 0
  config = folder / 'machine' / 'config' / 'quickstart.py'
  assert config.read_text() == 'text of the configuration\n'
  assert 'Bearer t0k.en' in (folder / 'asked').read_text()


def test_a_host_of_a_slice_knows_itself_and_the_first(machine):
  """The host asks for its number until the metadata server has it."""
  folder, start = machine
  (call,) = start(_script(accelerator='v5litepod-16'), 0)
  assert call[-4:] == [
    '--syncer=10.0.0.1:7777',
    '--hosts=4',
    '--host=2',
    '--coordinator=10.0.0.5:8476',
  ]
  assert (folder / 'slept').read_text() == f'{startup.AGAIN_S}\n'


def test_a_host_of_a_slice_waits_until_all_others_are_dead(machine):
  folder, start = machine
  (folder / 'named').touch()
  start(_script(accelerator='v5litepod-16'), 134, 0)
  (slept_s,) = map(int, (folder / 'slept').read_text().split())
  assert slept_s > startup.DEAD_WITHIN_S
