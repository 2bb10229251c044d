# SPDX-License-Identifier: Apache-2.0
"""What every file of the repository has in common."""

import ast
import collections
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FIRST = '# SPDX-License-Identifier: Apache-2.0'
LINES_MAX = 450
FILES_MAX = 14  # Of code, in a folder.
# Nothing here may read a clock, the environment, or draw by itself.
PURE = ('diloco/protocol', 'diloco/numerics', 'diloco/models', 'diloco/data')
IMPURE = {'time', 'random', 'uuid', 'secrets', 'threading', 'socket'}
# They run what the sender of the bytes wants.
PICKLERS = {'pickle', '_pickle', 'marshal', 'dill', 'cloudpickle', 'shelve'}
BANNED = ('utils', 'helper', 'manager', 'lib', 'misc', 'data2')


def _tracked(pattern: str) -> list[str]:
  listed = subprocess.run(
    ['git', 'ls-files', '--cached', '--others', '--exclude-standard', pattern],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  return listed.stdout.split()


PYTHON = _tracked('*.py')


@pytest.mark.parametrize('name', PYTHON)
def test_file_begins_with_its_licence_and_says_what_it_is(name):
  text = (ROOT / name).read_text()
  assert text.startswith(FIRST)
  assert ast.get_docstring(ast.parse(text)), 'no module docstring'


@pytest.mark.parametrize('name', PYTHON)
def test_file_holds_one_idea(name):
  assert len((ROOT / name).read_text().splitlines()) <= LINES_MAX


def test_folder_holds_what_one_can_remember():
  code = [pathlib.Path(n) for n in PYTHON if not n.endswith('__init__.py')]
  files = collections.Counter(path.parent for path in code)
  crowded = {str(f): n for f, n in files.items() if n > FILES_MAX}
  crowded.pop('experiments', None)  # A file a run; its README lists them.
  assert not crowded


@pytest.mark.parametrize('name', PYTHON)
def test_file_has_a_name_of_the_glossary(name):
  stem = pathlib.Path(name).stem
  assert not any(word in stem.split('_') for word in BANNED)


@pytest.mark.parametrize('name', [n for n in PYTHON if n.startswith(PURE)])
def test_nothing_ambient_below_the_runtime(name):
  if name.endswith('_benchmark.py'):
    return
  found = set()
  for node in ast.walk(ast.parse((ROOT / name).read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name.partition('.')[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      found.add(node.module.partition('.')[0])
    elif isinstance(node, ast.Attribute) and node.attr == 'environ':
      found.add('environ')
  assert not found & {*IMPURE, 'environ'}


def _unpickling(tree: ast.AST):
  """What would run a sender's code, or read bytes that could, in a file."""
  for node in ast.walk(tree):
    match node:
      case ast.Import(names=names):
        yield from {a.name.partition('.')[0] for a in names} & PICKLERS
      case ast.ImportFrom(module=str(module)):
        yield from {module.partition('.')[0]} & PICKLERS
      case ast.keyword(arg='allow_pickle', value=value):
        if not (isinstance(value, ast.Constant) and value.value is False):
          yield 'allow_pickle'
      case ast.Call(func=ast.Name(id='eval' | 'exec' | '__import__' as name)):
        yield name


@pytest.mark.parametrize('name', PYTHON)
def test_nothing_is_pickled(name):
  assert not list(_unpickling(ast.parse((ROOT / name).read_text())))


@pytest.mark.parametrize(
  'code',
  [
    'import pickle',
    'import pickle as p',
    'from cloudpickle import loads',
    'np.load(path, allow_pickle=True)',
    'np.load(path, allow_pickle=asked)',
    'eval(text)',
  ],
)
def test_pickling_would_be_found(code):
  assert list(_unpickling(ast.parse(code)))
