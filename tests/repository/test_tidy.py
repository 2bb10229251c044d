# SPDX-License-Identifier: Apache-2.0
"""Checks what every file of the repository has in common."""

import ast
import collections
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FIRST = '# SPDX-License-Identifier: Apache-2.0'
LINES_MAX = 450
FILES_MAX = 14  # Of code, in a folder.
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 8  # Without self or cls.
ENTRIES = ('__init__', '__main__')
MIRRORED = {'diloco/protocol/learner', 'diloco/protocol/syncer'}
# A metric and its study; a command and what it runs.
SHARED = ('goodput', 'swarm')
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


def _long_files(root: pathlib.Path, names: list[str]) -> list[str]:
  return [
    name
    for name in names
    if len((root / name).read_text().splitlines()) > LINES_MAX
  ]


def _crowded_folders(root: pathlib.Path, names: list[str]) -> list[str]:
  code = [pathlib.Path(n) for n in names if not n.endswith('__init__.py')]
  files = collections.Counter(path.parent.as_posix() for path in code)
  files.pop('experiments', None)  # A file a run; its README lists them.
  return [folder for folder, count in files.items() if count > FILES_MAX]


def _wide_functions(root: pathlib.Path, names: list[str]) -> list[str]:
  """Functions that are too long or take too much."""
  wide = []
  for name in names:
    for node in ast.walk(ast.parse((root / name).read_text())):
      if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        continue
      lines = node.end_lineno - node.lineno + 1
      given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
      given = [each for each in given if each.arg not in ('self', 'cls')]
      if lines > FUNCTION_LINES_MAX or len(given) > PARAMETERS_MAX:
        wide.append(f'{name}:{node.lineno} {node.name}')
  return wide


def _wrong_pages(root: pathlib.Path, names: list[str]) -> list[str]:
  """Returns what a package's page leaves out, and lists in vain."""
  wrong = []
  for init in (n for n in names if n.endswith('/__init__.py')):
    folder = (root / init).parent
    page = ast.get_docstring(ast.parse((root / init).read_text())) or ''
    modules = {p.stem for p in folder.glob('*.py')} - {'__init__', '__main__'}
    modules |= {p.parent.name for p in folder.glob('*/__init__.py')}
    readme = folder / 'README.md'
    text = page + (readme.read_text() if readme.exists() else '')
    missing = modules - set(re.findall(r'\w+', text))
    wrong += [f'{init} leaves out {name}' for name in sorted(missing)]
    # A row is a name or several, of two spaces before and at least one behind.
    rows = re.findall(r'^  ([\w/]+(?:, [\w/]+)*) +\S', page, re.MULTILINE)
    listed = {name.rstrip('/') for row in rows for name in row.split(', ')}
    absent = listed - modules - {'__main__'}
    wrong += [f'{init} lists {name}' for name in sorted(absent)]
  return wrong


def _shared_names(root: pathlib.Path, names: list[str]) -> list[str]:
  """Modules of one name, but for the two machines, which mirror each other."""
  paths = collections.defaultdict(list)
  for name in names:
    path = pathlib.Path(name)
    if path.parts[0] in ('diloco', 'launch') and path.stem not in ENTRIES:
      paths[path.stem].append(path.as_posix())
  return [
    ' and '.join(same)
    for stem, same in paths.items()
    if len(same) > 1
    and not {str(pathlib.Path(p).parent) for p in same} <= MIRRORED
    and stem not in SHARED
  ]


LIMITS = (
  _long_files,
  _crowded_folders,
  _wide_functions,
  _wrong_pages,
  _shared_names,
)


@pytest.mark.parametrize('wrong', LIMITS)
def test_code_can_be_held_in_the_head(wrong):
  assert not wrong(ROOT, PYTHON)


@pytest.mark.parametrize(
  ('wrong', 'planted'),
  [
    (_long_files, {'diloco/long.py': '\n' * (LINES_MAX + 1)}),
    (
      _crowded_folders,
      {f'diloco/data/file_{i}.py': '' for i in range(FILES_MAX + 1)},
    ),
    (
      _wide_functions,
      {'a.py': 'def f():\n' + '  pass\n' * FUNCTION_LINES_MAX},
    ),
    (_wide_functions, {'a.py': 'def f(self, a, b, c, d, e, *, f, g, h, i): 0'}),
    (_wrong_pages, {'p/__init__.py': '"""A page."""', 'p/unsaid.py': ''}),
    (
      _wrong_pages,
      {'p/__init__.py': '"""A page.\n\n  gone  It left.\n\nEnd.\n"""'},
    ),
    (_shared_names, {'diloco/data/one.py': '', 'diloco/run/one.py': ''}),
    (
      _shared_names,
      {'diloco/protocol/syncer/one.py': '', 'diloco/run/one.py': ''},
    ),
  ],
)
def test_what_can_not_would_be_found(tmp_path, wrong, planted):
  for name, text in planted.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  assert wrong(tmp_path, list(planted))


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
  """Returns what would run a sender's code, or bytes that could, in a file."""
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
