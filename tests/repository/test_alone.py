# SPDX-License-Identifier: Apache-2.0
"""A test that another one beside it could disturb carries the mark `alone`.

Or `beside`: it waits for processes or ports of its own, but whatever it waits
for, it waits for long: minutes where it takes seconds on a quiet machine.
"""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MARK = 'pytestmark = pytest.mark.alone'
BESIDE = 'pytestmark = pytest.mark.beside'
# What imports one of these waits for a clock, a port, a thread, or a process
# that lives beside it. (`subprocess.run` waits for the end, however late.)
DISTURBED = {'grpc', 'psutil', 'signal', 'socket', 'threading', 'time'}
FOLLOWED = ('tests.', 'launch.')
FILES = sorted(
  path.relative_to(ROOT).as_posix() for path in ROOT.glob('tests/*/test_*.py')
)


def _imported(text: str) -> set[str]:
  """Modules and, since they may be modules too, names taken from them."""
  found = set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      found |= {f'{node.module}.{alias.name}' for alias in node.names}
      found.add(node.module)
  return found


def _reasons(text: str) -> set[str]:
  """Returns DISTURBED modules that a test imports, itself or indirectly."""
  seen, waiting = set(), [text]
  while waiting:
    for module in _imported(waiting.pop()) - seen:
      seen.add(module)
      path = (ROOT / module.replace('.', '/')).with_suffix('.py')
      if module.startswith(FOLLOWED) and path.exists():
        waiting.append(path.read_text())
  return seen & DISTURBED


@pytest.mark.parametrize('name', FILES)
def test_what_could_be_disturbed_is_alone(name):
  text = (ROOT / name).read_text()
  reasons = sorted(_reasons(text))
  marked = {MARK, BESIDE} & set(text.splitlines())
  assert not reasons or marked, f'imports {reasons}: {MARK}, or {BESIDE}'


@pytest.mark.parametrize(
  'text',
  [
    'import time',
    'from tests.processes.processes import Processes',
    'from tests.processes import processes',
    'from launch.chaos.live_run import LiveRun',
  ],
)
def test_it_would_be_found(text):
  assert _reasons(text)


def test_waiting_for_an_end_is_no_reason():
  assert not _reasons('import subprocess\nfrom launch import epochs')
