# SPDX-License-Identifier: Apache-2.0
"""A process says when none of its threads ran; a save does not cause that."""

import queue
import subprocess
import sys

import pytest

from diloco.checkpoint import orbax_files
from diloco.run.threads import Pulse
from tests.repository.tree import ROOT

pytestmark = pytest.mark.beside
WAIT_S = 60.0
HELD_S = 1.5
# A module whose import holds the interpreter, as the mapping of a large shared
# object does: `PyDLL` calls C without releasing the lock.
HOLDS_THE_LOCK = (
  f'import ctypes; ctypes.PyDLL(None).usleep({int(HELD_S * 1e6)})'
)


def test_an_import_that_holds_the_interpreter_is_told(tmp_path, monkeypatch):
  (tmp_path / 'holds_the_lock.py').write_text(HOLDS_THE_LOCK)
  monkeypatch.syspath_prepend(tmp_path)
  told = queue.Queue()
  pulse = Pulse(told.put, limit_s=1.0)
  try:
    import holds_the_lock  # noqa: F401

    assert told.get(timeout=WAIT_S) >= 1.0
  finally:
    pulse.close()


PROCESSES = """
import os, runpy, sys
from diloco.run import command

run_command = command.run_command
# Each begins no work.
command.run_command = lambda main, *rest, **more: run_command(
  lambda config: 9, *rest, **more
)
command.threads.Pulse = lambda tell: tell(3.0)
sys.argv = ['it', '--workdir=w', '--learner=0', '--syncer=x:1', '--shard=1',
  '--leader=x:1', '--config=experiments/tests_tiny.py', '--undefok=learner,'
  'syncer,shard,leader']
for module in ('syncer', 'syncer_shard', 'learner', 'evaluator'):
  if not (child := os.fork()):
    runpy.run_module(f'diloco.{module}', run_name='__main__', alter_sys=True)
  print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_each_process_of_a_run_tells_it_in_its_log():
  done = subprocess.run(
    [sys.executable, '-c', PROCESSES], cwd=ROOT, capture_output=True, text=True
  )
  assert done.stdout.split() == ['9'] * 4, done.stderr[-2000:]
  assert done.stderr.count('no thread of this process ran for 3.0 s: it') == 4


def test_shared_objects_are_read_through_before_orbax_is_imported():
  """In a process of its own, since this one may have imported it."""
  program = """
import sys
from diloco.checkpoint import orbax_files
read, order = orbax_files.read_shared_objects, []

def reading(package):
  order.append((package, 'tensorstore' in sys.modules))
  return read(package)

orbax_files.read_shared_objects = reading
orbax_files.orbax()
assert order == [('tensorstore', False)], order
assert 'tensorstore' in sys.modules
"""
  done = subprocess.run(
    [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr[-2000:]


def test_all_bytes_of_the_shared_objects_are_read():
  import importlib.util
  import pathlib

  (folder,) = importlib.util.find_spec('tensorstore').submodule_search_locations
  sizes = [path.stat().st_size for path in pathlib.Path(folder).glob('*.so')]
  assert sum(sizes) > 1 << 20
  assert orbax_files.read_shared_objects('tensorstore') == sum(sizes)
