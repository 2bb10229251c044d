# SPDX-License-Identifier: Apache-2.0
"""The launches that launch/README.md tells, as dry runs."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / 'launch' / 'README.md').read_text()
SHARED = re.findall(r'^ +(export .*|RUN="[^"]*")', TEXT, re.MULTILINE)
# What each back end's variable ends in, by a line of what is shown.
ENDS = {
  'GKE': 'name: first-learner-4',
  'QR': '--labels=run=first,role=learner,attempt=1',
  'SLURM': '--array=4',
}


def _dry_run(name: str, command: str, more: str = '') -> str:
  given = [_variable(each) for each in (name, more) if each]
  words = f'$RUN ${name}' + (f' ${more}' if more else '')
  script = [
    'python() { "$PYTHON" "$@"; }',
    *SHARED,
    *given,
    f'python -m launch.main {command}{words} --dry_run',
  ]
  ended = subprocess.run(
    ['bash', '-eu'],
    input='\n'.join(script),
    cwd=ROOT,
    env={**os.environ, 'PYTHON': sys.executable},
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert ended.returncode == 0, ended.stderr
  return ended.stdout


def _variable(name: str) -> str:
  (found,) = re.findall(rf'^ +({name}="[^"]*")', TEXT, re.MULTILINE)
  return found


@pytest.mark.parametrize('name', ENDS)
def test_four_learners_are_started(name):
  shown = _dry_run(name, '')
  assert f'python -m launch.main $RUN ${name} --dry_run' in TEXT
  assert 'learner-3' in shown or '--array=0,1,2,3' in shown
  assert 'learner-4' not in shown


@pytest.mark.parametrize('name, end', ENDS.items())
def test_a_fifth_is_added(name, end):
  command = 'add-learner --learner=4 '
  assert f'python -m launch.main {command}$RUN ${name}' in TEXT
  assert end in _dry_run(name, command)


@pytest.mark.parametrize(
  'name, end',
  [
    ('GKE', '              - --hosts=4\n'),
    ('QR', '--accelerator-type=v5litepod-16 '),
  ],
)
def test_learners_of_four_hosts(name, end):
  assert f'python -m launch.main $RUN ${name} $POD --dry_run' in TEXT
  shown = _dry_run(name, '', 'POD')
  assert end in shown
  assert 'pod-learner-3' in shown


def test_learners_of_several_processes_here():
  (command,) = re.findall(
    r'(python -m launch)\.local( .*\\\n.*--hosts=.*)', TEXT
  )
  ended = subprocess.run(
    ['bash', '-eu', '-c', f'{command[0]}.main{command[1]} --dry_run'],
    cwd=ROOT,
    env={
      **os.environ,
      'PATH': f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}',
    },
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert ended.returncode == 0, ended.stderr
  assert '# learner-0.1\n' in ended.stdout
  assert '# learner-1.1\n' not in ended.stdout
