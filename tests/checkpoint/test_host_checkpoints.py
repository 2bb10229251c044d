# SPDX-License-Identifier: Apache-2.0
"""The hosts of a learner save one checkpoint, which any number restores."""

import json
import os
import re
import signal
import subprocess
import sys
import zlib

import numpy as np
import pytest

from tests.checkpoint.host_checkpoints import STEPS
from tests.learner.groups import ROOT, printed_by, world
from tests.processes.processes import START_S

pytestmark = pytest.mark.beside

MODULE = 'tests.checkpoint.host_checkpoints'
DEAD_S = 50.0  # Less than a save waits for a host that is dead: `SAVE_S`.


def _run(folder, task: str, hosts: int, devices: int) -> list[dict]:
  arguments = task, str(folder), str(hosts)
  return printed_by(world(MODULE, *arguments, processes=hosts, devices=devices))


def _whole(folder, name: str) -> dict[str, np.ndarray]:
  """Returns the arrays by path, put together of all hosts' boxes."""
  boxes = {}
  for file in folder.glob(f'{name}-*.npz'):
    with np.load(file) as found:
      boxes |= dict(found)
  shapes: dict[str, list[int]] = {}
  for box in boxes:
    path, index = box.split('@')
    ends = [int(end) for end in re.findall(r':(\d+)', index)]
    before = shapes.get(path, [0] * len(ends))
    shapes[path] = [max(pair) for pair in zip(before, ends)]
  arrays = {}
  for box, values in boxes.items():
    path, index = box.split('@')
    if path not in arrays:
      arrays[path] = np.zeros(shapes[path], values.dtype)
    ranges = re.findall(r'(\d+):(\d+)', index)
    arrays[path][tuple(slice(int(a), int(b)) for a, b in ranges)] = values
  return arrays


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Returns a learner's folder, where 2 hosts of 2 devices have saved."""
  folder = tmp_path_factory.mktemp('run') / 'learner-0'
  assert _run(folder, 'save', hosts=2, devices=2) == [{'saved': [True] * 2}] * 2
  return folder


def test_hosts_save_one_checkpoint(saved):
  steps = sorted(path.name for path in saved.iterdir())
  assert steps == [str(step) for step in STEPS]


@pytest.mark.parametrize('hosts, devices', [(2, 2), (3, 1), (1, 1)])
def test_any_number_of_hosts_restores_it_to_the_bit(saved, hosts, devices):
  for file in saved.parent.glob('restored-*.npz'):
    file.unlink()
  for host in _run(saved, 'read', hosts, devices):
    assert host['kind'] == 'checkpoint'
    assert (host['step'], host['rows']) == (STEPS[-1], 41)
    assert set(host['versions']) == {3} and set(host['crcs']) == {5}
  expected = _whole(saved.parent, 'saved')
  found = _whole(saved.parent, f'restored-by-{hosts}')
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    assert found[name].tobytes() == array.tobytes(), name
  parts = {name.split('/')[0] for name in found}
  moments = {part for name in found for part in name.split('/')}
  assert parts == {'params', 'optimizer', 'bases'} and {'mu', 'nu'} <= moments


def test_the_line_of_the_docs_reads_what_several_hosts_saved(saved):
  docs = (ROOT / 'docs/running.md').read_text().split('\n## Checkpoints\n')[1]
  code = docs.split('```text\n')[1].split('```')[0]
  path = saved / str(STEPS[-1])
  code = re.sub(r"PATH = '.*'", f'PATH = {str(path)!r}', code) + PRINT_CRCS
  done = subprocess.run(
    [sys.executable, '-c', code],
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    check=False,
    timeout=240.0,
  )
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout) == {
    name: [list(x.shape), zlib.crc32(np.ascontiguousarray(x))]
    for name, x in _whole(saved.parent, 'saved').items()
  }


# By path, as users find them: nothing of this project is imported.
PRINT_CRCS = """
import json, zlib
def found(tree, path):
  if isinstance(tree, np.ndarray):
    return {path: [list(tree.shape), zlib.crc32(np.ascontiguousarray(tree))]}
  return {k: v for name in tree for k, v in found(
    tree[name], f'{path}/{name}' if path else name).items()}
print(json.dumps(found(tree, '')))
"""


def test_a_host_that_is_killed_in_a_save_leaves_the_step_before(tmp_path):
  folder = tmp_path / 'learner-0'
  survivor, killed = world(MODULE, 'die', str(folder), '2', devices=1)
  try:
    killed.wait(START_S)
    assert killed.returncode == -signal.SIGKILL
    survivor.communicate(timeout=DEAD_S)
  finally:
    for host in (survivor, killed):
      host.kill()
      host.communicate()
  steps = [path.name for path in folder.iterdir() if path.name.isdecimal()]
  assert steps == [str(STEPS[0])], 'half a checkpoint passes for one'
  [restored] = _run(folder, 'read', hosts=1, devices=1)
  assert (restored['kind'], restored['step']) == ('checkpoint', STEPS[0])
