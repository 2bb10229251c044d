# SPDX-License-Identifier: Apache-2.0
"""The planner compiles a learner, and tells what it takes."""

import os
import re
import subprocess
import sys

import pytest

TINY = (
  '--config=experiments/tests_tiny.py',
  '--config.model.heads=4',
  '--config.model.kv_heads=4',
  '--config.model.head_dim=8',
  '--config.mesh.fsdp=2',
  '--config.mesh.tensor=2',
)
PLAN = ('diloco.plan', *TINY, '--topology=v5e-4')
KINDS = (
  '--config.unlike_learners=1: accelerator=v5p-16, mesh.fsdp=4, '
  'mesh.slices=2, data.batch=32; 2: accelerator=gpu, gpus_per_host=4',
)
# Nothing is opened but the CPU, and nothing is asked of the network.
ALONE = {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '1'}


def _run(*argv: str, **environment: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, '-m', *argv],
    capture_output=True,
    text=True,
    check=False,
    timeout=400,
    env=os.environ | ALONE | environment,
  )


def _lines(*argv: str, **environment: str) -> list[str]:
  done = _run(*argv, **environment)
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines()


@pytest.fixture(scope='module')
def planned():
  return _lines(*PLAN, '--compiler=cpu')


def test_the_screen_fits_and_says_who_compiled(planned):
  assert max(map(len, planned)) <= 80, max(planned, key=len)
  assert len(planned) <= 48
  text = ' '.join(' '.join(planned).split())
  assert 'v5litepod-4: 4 chips of v5e (2x2)' in text
  assert "the CPU's compiler, for 4 forced devices (as was asked)" in text
  assert 'it fits: 0 % of the 16 GB of a v5e' in text
  assert 'goodput wait 100 %' in text, 'a learner of one slice'


def test_memory_of_a_chip_by_hand(planned):
  # Tables 2·256·32; a layer: attention 4·32·32, MLP 3·32·32, two norms, and
  # the last one. Norms lie whole on each chip, all else in quarters.
  split, norms = 2 * 256 * 32 + 4 * 1024 + 3 * 1024, 3 * 32
  parameters = split + 4 * norms
  assert _size_of(planned, 'parameters, f32') == pytest.approx(
    parameters, rel=1e-2
  )
  # Two moments of that, and a counter.
  moments = 2 * parameters + 4
  assert _size_of(planned, 'inner state') == pytest.approx(moments, rel=1e-2)


def test_each_kind_of_learner_is_planned():
  lines = _lines(
    *PLAN, '--config.protocol.learners=3', *KINDS, '--compiler=cpu'
  )
  at = lines.index('learner 1')
  assert lines[0] == 'learners 0, 3-15'  # All that may join.
  first, second = lines[:at], lines[at : (end := lines.index('learner 2'))]
  assert any('for v5litepod-4: 4 chips' in line for line in first)
  assert any('for v5p-16: 8 chips' in line for line in second)
  # Of two slices, one is compiled, with half of the batch.
  assert second[1] == 'a learner of 2 slices; of one of them, by itself:'
  assert any('a step of 16 · 32 tokens' in line for line in second)
  assert any(line.startswith('goodput      wait') for line in first)
  assert any(line.startswith('goodput      elastic') for line in second)
  assert 'the syncer, M = 3, N = 23,648' in first
  assert not any('the syncer' in line for line in second)
  assert _size_of(second, 'inner state') < _size_of(first, 'inner state')
  assert any('for H100-4: 4 chips of H100' in line for line in lines[end:])
  # The steps of so small a model are over long before an exchange.
  assert lines[-3].startswith('the rounds, simulated: steps at 40 % MFU')
  assert lines[-1].startswith('  none closes within')


def test_the_chips_own_compiler():
  pytest.importorskip('libtpu')
  done = _run(*PLAN, *KINDS)
  assert done.returncode == 0, done.stderr
  # libtpu says much where it is asked to look around.
  progress = r'(\d+:\d\d  compiles a learner for \S+: .*\n)*'
  assert re.fullmatch(progress, done.stderr), done.stderr
  # Of several kinds in one process each has its own compiler.
  text = ' '.join(done.stdout.split())
  compiled = re.findall(r'for (\S+): .*? a host by (\w+)', text)
  assert compiled == [
    ('v5litepod-4', 'libtpu'), ('v5p-16', 'libtpu'), ('H100-4', 'the'),
  ]  # fmt: skip
  assert text.count("the chips' own compiler") == 2


def test_which_compiler_is_missing_is_said(planned, tmp_path):
  code = (
    'import importlib.metadata as m, runpy, sys\n'
    'found = m.version\n'
    'def version(name):\n'
    "  if name == 'libtpu': raise m.PackageNotFoundError(name)\n"
    '  return found(name)\n'
    'm.version = version\n'
    "runpy.run_module('diloco.plan', run_name='__main__', alter_sys=True)\n"
  )
  script = tmp_path / 'without.py'
  script.write_text(code)
  done = subprocess.run(
    [sys.executable, script, *TINY, '--topology=v5e-4'],
    capture_output=True,
    text=True,
    check=False,
    timeout=400,
    env=os.environ | ALONE | {'PYTHONPATH': os.getcwd()},
  )
  assert done.returncode == 0, done.stderr
  text = ' '.join(done.stdout.split())
  assert "libtpu is not installed; the package's extra 'tpu' has it" in text
  lines, begins = done.stdout.splitlines(), 'memory of a chip'
  assert lines[lines.index(begins) :] == planned[planned.index(begins) :]


@pytest.mark.parametrize(
  ('argv', 'error'),
  [
    (
      ('diloco.plan', *TINY, '--topology=v5e-8'),
      'error: --topology=v5litepod-8: has 8 chips, the mesh mesh.fsdp=2 * '
      'mesh.expert=1 * mesh.context=1 * mesh.tensor=2 takes 4: it fits '
      'v5litepod-4, v5p-8, v6e-4; or make the product of the mesh 8',
    ),
    (
      ('diloco.plan', *TINY, '--topology=v5p-8000'),
      'error: --topology=v5p-8000: unknown; did you mean v5p-8? known are',
    ),
    (
      (*PLAN, '--config.unlike_learners=1: accelerator=gpu'),
      'error: learner 1: --accelerator=H100-0: has 0 chips, the mesh mesh.fsdp',
    ),
    (
      (*PLAN, '--config.unlike_learners=1: accelerator=cpu'),
      'error: learner 1: --accelerator=cpu: the memory and speed of CPUs',
    ),
    (
      (*PLAN, '--config.unlike_learners=1: hosts=2'),
      'error: learner 1: hosts, gpus_per_host: a slice v5litepod-4 has 1',
    ),
    (
      ('diloco.plan', *TINY),
      'error: --topology: is missing, such as --topology=v5p-256',
    ),
  ],
)
def test_what_makes_no_sense_is_named(argv, error):
  done = _run(*argv)
  assert done.returncode == 78, done.stderr
  # A line of progress may come first.
  lines = done.stderr.splitlines()
  assert any(line.startswith(error) for line in lines), done.stderr


def _size_of(lines: list[str], what: str) -> float:
  (line,) = (each for each in lines if each.startswith(f'  {what}'))
  number, unit = line.split()[-2:]
  return float(number) * {'B': 1, 'kB': 1e3, 'MB': 1e6}[unit]
