# SPDX-License-Identifier: Apache-2.0
"""Runs that an older version has left can still be read, repeated and extended.

What is expected here was printed by the commands of the version that made the
runs; see README.md beside this file.
"""

import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tarfile

import pytest

from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.status import read_summary

HERE = pathlib.Path(__file__).parent
REPOSITORY = HERE.parents[1]
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


def started(*words: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, '-m', 'diloco', *words],
    cwd=REPOSITORY,
    env={**os.environ, **ENVIRONMENT},
    capture_output=True,
    text=True,
    timeout=500,
  )


def diloco(*words: str) -> str:
  """Returns the standard output of a command that must succeed."""
  done = started(*words)
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
  return done.stdout


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


@pytest.mark.parametrize('name', ['run', 'lab'])
def test_the_page_is_written(name, tmp_path):
  page = tmp_path / 'page.html'
  diloco('watch', str(unpack(name, tmp_path)), f'--write={page}')
  assert 'learner' in page.read_text()


def test_every_round_is_repeated_to_the_bit(tmp_path):
  done = started('replay', f'--workdir={unpack("run", tmp_path)}')
  assert '101 rounds, 361 inner steps of 3 processes' in done.stderr
  # Its event log does not name the processor, and this may be another.
  assert 'bytes may differ: learner 0: processor: ' in done.stderr
  if done.returncode:
    # Sums of other caches differ late; a codec or a rule of another version
    # would differ in the first round, as the steps of another jax may.
    equal = re.search(r'DIFFERS after (\d+) rounds', done.stdout + done.stderr)
    another = 'bytes may differ: learner 0: jax: ' in done.stderr
    assert equal and int(equal[1]) >= (not another), done.stdout + done.stderr
    return
  assert done.returncode == 0, done.stdout + done.stderr[-4000:]
  assert 'every round has the CRC of the run' in done.stdout
  assert 'parameters: the same bytes' in done.stdout


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


def test_the_run_is_extended(tmp_path):
  workdir = unpack('run', tmp_path)
  diloco(
    'local',
    f'--config={HERE / "golden_config.py"}',
    f'--workdir={workdir}',
    '--config.protocol.total_steps=216',
  )
  summary = read_summary(workdir / 'summary.json')
  assert summary.step >= 216
  assert summary.rounds > 101
  rounds = [
    line['round']
    for line in read_jsonl(workdir / 'tape.jsonl')
    if line['kind'] == 'Publish'
  ]
  assert rounds == list(range(1, summary.rounds + 1))
  before, after = (81, 101), [each.rounds for each in summary.learners]
  assert sorted(after) > sorted(before)
  beginnings = [each.beginning for each in summary.learners]
  assert any('checkpoint' in each for each in beginnings), beginnings
  refused = started('replay', f'--workdir={workdir}')
  assert refused.returncode == 78
  assert 'extended from 200 to 216 steps' in refused.stderr
