# SPDX-License-Identifier: Apache-2.0
"""What can't be run is said in one line, before a process is started."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.transport import credentials

pytestmark = pytest.mark.beside

ROOT = pathlib.Path(__file__).parents[2]
TINY = f'--config={ROOT}/experiments/tests_tiny.py'
# Arguments of `diloco local`, and what the one line says. RUN, TEXT, … are
# replaced by paths of the test.
REFUSED = (
  ('--config.inner.lr=nan', 'inner.lr=nan: must be a finite number'),
  ('--config.inner.weight_decay=inf', 'weight_decay=inf: must be a finite'),
  ('--config.run.restart_delay_s=inf', 'restart_delay_s=inf: must be a finite'),
  (
    '--config.protocol.grace_cap_steps=inf',
    'grace_cap_steps=inf, must be finite',
  ),
  (
    '--config.model.layers=two',
    'model.layers=two: must be of type int, such as ',
  ),
  ('--config.outer.nesterov=2', 'outer.nesterov=2: must be of type bool'),
  ('--config.transport.host=0.0.0.0', "transport.host='0.0.0.0': learners can"),
  ('--config.mesh.fsdp=2', 'mesh.fsdp=2 * mesh.expert=1 * mesh.tensor=1 = 2'),
  ('--config.model.kind=nowhere:make', 'there is no module nowhere'),
  ('--config.model.kind=mine:other', 'mine.py has no function other'),
  ('--token_file=DIR/none', '--token_file=DIR/none: No such file'),
  ('--token_file=DIR/empty', '--token_file=DIR/empty: is empty'),
  ('--token_file=DIR/shown', '--token_file=DIR/shown: every user'),
  ('--tls_cert=DIR/run.pem', 'run.pem: needs --tls_key beside it'),
  (
    '--config.data.source=parquet --config.data.path=DIR/mine.py',
    "data.source='parquet': the package pyarrow is missing: pip install",
  ),
  (
    '--config.data.source=array_record --config.data.path=DIR/mine.py',
    "data.source='array_record': the package array_record is missing",
  ),
)
# A process that finds no such packages.
WITHOUT = 'import sys\nsys.modules.update(pyarrow=None, array_record=None)\n'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  made = tmp_path_factory.mktemp('own')
  credentials.copied(made, 'ours')
  for name, text, mode in (
    ('mine.py', 'def make(section):\n  pass\n', 0o600),
    ('empty', '', 0o600),
    ('shown', '0123456789abcdef\n', 0o644),
    ('run.pem', 'x', 0o600),
  ):
    (made / name).write_text(text)
    (made / name).chmod(mode)
  (made / 'site').mkdir()
  (made / 'site' / 'sitecustomize.py').write_text(WITHOUT)
  return made


def call(folder, *argv):
  places = os.pathsep.join((str(folder / 'site'), str(ROOT)))
  return subprocess.run(
    [sys.executable, '-m', 'diloco', *argv],
    cwd=folder,
    env=os.environ | {'PYTHONPATH': places, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=240,
  )


@pytest.mark.parametrize(('words', 'line'), REFUSED, ids=lambda each: each[:40])
def test_it_is_said_before_a_process_starts(folder, words, line):
  words = words.replace('DIR', str(folder)).split()
  done = call(folder, 'local', TINY, '--workdir=run', *words)
  assert done.returncode == 78, done.stdout + done.stderr
  assert done.stdout == ''
  assert done.stderr.startswith('error: ')
  assert done.stderr.count('\n') == 1, done.stderr
  assert line.replace('DIR', str(folder)) in done.stderr
  assert not (folder / 'run').exists()


@pytest.mark.parametrize('command', ['train', 'local', 'lab'])
def test_a_folder_that_can_not_be_written_to(folder, command):
  done = call(folder, command, TINY, '--workdir=/proc/nope')
  assert done.returncode == 78, done.stdout + done.stderr
  assert done.stderr.startswith('error: --workdir=/proc/nope: no run can be')
  assert done.stderr.count('\n') == 1, done.stderr
