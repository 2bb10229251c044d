# SPDX-License-Identifier: Apache-2.0
"""Runs that an older version has left are read, or refused in one line.

What is expected here was printed by the commands of the version that made the
runs; see README.md beside this file.
"""

import hashlib
import pathlib
import re
import tarfile

import pytest

from tests import commands

HERE = pathlib.Path(__file__).parent
ENVIRONMENT = {
  'COLUMNS': '200',
  'JAX_PLATFORMS': 'cpu',
  'JAX_DISABLE_MOST_OPTIMIZATIONS': '0',  # It would change the bits of a step.
}
# Bytes of the exported model of each, by f02de12.
EXPORTED = {
  'run': '6af8ac8dbe9a561400e3f84c81a25a2999f1f05c91b8470912ee7bbef21a42d4',
  'lab': 'ccb7e0f3310044308d43f59a3db9f47d52ea3fa9d177d53a21e5d3ce50264b67',
}


def unpack(name: str, folder: pathlib.Path) -> pathlib.Path:
  with tarfile.open(HERE / f'{name}.tar.gz') as archive:
    archive.extractall(folder, filter='data')
  return folder / name


def started(*words: str):
  return commands.python('-m', 'diloco', *words, **ENVIRONMENT)


def diloco(*words: str) -> str:
  """Returns the standard output of a command that must succeed."""
  return commands.output('-m', 'diloco', *words, **ENVIRONMENT)


def test_the_timeline_has_every_round_and_the_death(tmp_path):
  shown = diloco('tape', str(unpack('run', tmp_path)))
  assert len(re.findall(r'round \d+ ', shown)) >= 101
  assert 'the run is over at step 200, 101 rounds' in shown
  assert len(re.findall(r'learner \d+  lost: ', shown)) == 1


@pytest.mark.parametrize('name', ['run', 'lab', 'sweep'])
def test_a_report_is_written(name, tmp_path):
  page = tmp_path / 'pages'
  diloco('report', f'--workdir={unpack(name, tmp_path)}', f'--outdir={page}')
  text = (page / 'page.html').read_text()
  assert len(text) > 10_000
  # The variants of a sweep are read, and so compared.
  assert ('outer.lr = 0.6 (n = 2)' in text) == (name == 'sweep')


def test_a_replay_says_that_its_rows_were_dealt_otherwise(tmp_path):
  done = started('replay', f'--workdir={unpack("run", tmp_path)}')
  assert done.returncode == 78, done.stderr
  [error] = re.findall(r'^error: .*', done.stderr, re.MULTILINE)
  assert 'dealt the rows of the text otherwise' in error


def test_the_likeliest_text_is_what_it_was(tmp_path):
  shown = diloco(
    'generate',
    f'--workdir={unpack("run", tmp_path)}',
    '--prompt=a b',
    '--length=40',
    '--temperature=0',
  )
  assert shown == 'a b' + 'jc' + 'ed' * 19 + '\n'


@pytest.mark.parametrize('name', sorted(EXPORTED))
def test_the_exported_tensors_are_what_they_were(name, tmp_path):
  out = tmp_path / 'out'
  workdir = unpack(name, tmp_path)
  diloco('export', f'--workdir={workdir}', f'--outdir={out}')
  found = (out / 'model.safetensors').read_bytes()
  assert hashlib.sha256(found).hexdigest() == EXPORTED[name]


def test_its_goodput_is_measured_and_predicted(tmp_path):
  shown = diloco(
    'simulate',
    f'--replay={unpack("run", tmp_path)}',
    f'--outdir={tmp_path / "out"}',
  )
  measured, predicted = re.search(
    r'^goodput, % +([\d.]+) +([\d.]+)', shown, re.MULTILINE
  ).groups()
  assert float(measured) == 87.9
  assert float(predicted) == pytest.approx(86.4, abs=1.5)


def test_its_checkpoints_are_refused_in_one_line(tmp_path):
  workdir = unpack('run', tmp_path)
  done = started(
    'local',
    f'--config={HERE / "golden_config.py"}',
    f'--workdir={workdir}',
    '--config.protocol.total_steps=216',
  )
  assert done.returncode
  errors = re.findall(r'error: .*', done.stdout + done.stderr)
  assert any('is of an earlier version of this program' in x for x in errors)
