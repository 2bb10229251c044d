# SPDX-License-Identifier: Apache-2.0
"""Checks what every file of the repository has in common."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

from tests.repository import tree

FIRST = '# SPDX-License-Identifier: Apache-2.0'
# Nothing here may read a clock, the environment, or draw by itself.
PURE = ('diloco/protocol', 'diloco/numerics', 'diloco/models', 'diloco/data')
IMPURE = {'time', 'random', 'uuid', 'secrets', 'threading', 'socket'}
# They run what the sender of the bytes wants.
UNPICKLES = (
  # Plain values and classes of its own alone; a test of its own shows that.
  'diloco/lab/checkpoints.py',
  # Programs, as JAX serializes them; its folder belongs to one launcher.
  'diloco/learner/kept_programs.py',
)
PICKLERS = {'pickle', '_pickle', 'marshal', 'dill', 'cloudpickle', 'shelve'}
BANNED = {'utils', 'helper', 'manager', 'lib', 'misc', 'data2'}
Rule = Iterator[str]


def _imported(code: ast.AST) -> Rule:
  for node in ast.walk(code):
    if isinstance(node, ast.Import):
      yield from (alias.name.partition('.')[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield (node.module or '').partition('.')[0]


def _unlicensed(name: str, text: str) -> Rule:
  if not text.startswith(FIRST):
    yield 'no licence'
  if not ast.get_docstring(ast.parse(text)):
    yield 'no module docstring'
  yield from BANNED & set(pathlib.Path(name).stem.split('_'))


def _ambient(name: str, text: str) -> Rule:
  """Yields what makes a pure package depend on more than its arguments."""
  if name.startswith(PURE):
    code = ast.parse(text)
    yield from IMPURE & set(_imported(code))
    for node in ast.walk(code):
      if isinstance(node, ast.Attribute) and node.attr == 'environ':
        yield 'environ'


def _unpickling(name: str, text: str) -> Rule:
  """Yields what would run a sender's code, or bytes that could."""
  code = ast.parse(text)
  if name not in UNPICKLES:
    yield from PICKLERS & set(_imported(code))
  for node in ast.walk(code):
    match node:
      case ast.keyword(arg='allow_pickle', value=value):
        if not (isinstance(value, ast.Constant) and value.value is False):
          yield 'allow_pickle'
      case ast.Call(func=ast.Name(id='eval' | 'exec' | '__import__' as called)):
        yield called


def _breaches(rule, *patterns: str) -> list[str]:
  return [
    f'{name}: {breach}'
    for name in tree.tracked(*patterns)
    for breach in rule(name, (tree.ROOT / name).read_text())
  ]


@pytest.mark.parametrize('rule', [_unlicensed, _ambient, _unpickling])
def test_every_module_keeps_the_rule(rule):
  assert not _breaches(rule, '*.py')


@pytest.mark.parametrize(
  ('rule', 'text'),
  [
    (_unlicensed, '"""A page."""'),
    (_unlicensed, FIRST),
    (_ambient, 'import time'),
    (_ambient, 'x = os.environ'),
    (_unpickling, 'import pickle as p'),
    (_unpickling, 'from cloudpickle import loads'),
    (_unpickling, 'np.load(path, allow_pickle=asked)'),
    (_unpickling, 'eval(text)'),
  ],
)
def test_a_breach_would_be_found(rule, text):
  assert list(rule('diloco/protocol/a.py', text))
