# SPDX-License-Identifier: Apache-2.0
"""A choice is an entry of one registry, in the file that CONTRIBUTING names.

What differs between choices is an attribute of their entries: nothing compares
with the name of one.
"""

import ast
import importlib
import re

import pytest

from tests.repository import tree

ROW = re.compile(r'^\| ([^|]+) \| `([\w/]+\.py)`, `([A-Z_]+)`', re.MULTILINE)
# Words that are no choice there: a key of the section `data`, and a part of the
# names of a study's rows.
OTHER_WORDS = {
  ('diloco/config/data_section.py', 'mix'),
  ('diloco/studies/heterogeneous.py', 'latest'),
}
# Common words: `kill` is also what a plan can do.
COMMON = (
  'benchmark',
  'kind of fault',
  'study over real links and processes',
)


def _rows() -> list[tuple[str, str, str]]:
  return ROW.findall((tree.ROOT / 'CONTRIBUTING.md').read_text())


def _registry(file: str, name: str):
  module = importlib.import_module(file.removesuffix('.py').replace('/', '.'))
  return getattr(module, name)


@pytest.mark.parametrize(('kind', 'file', 'name'), _rows())
def test_the_registry_of_a_choice_is_where_contributing_says(kind, file, name):
  assert len(_registry(file, name)) > 1, kind


def _compared(text: str, names: set[str]) -> set[str]:
  """The names with which a program compares something, or matches it."""
  sides = []
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Compare):
      sides += [node.left, *node.comparators]
    elif isinstance(node, ast.MatchValue):
      sides.append(node.value)
  literal = (ast.Constant, ast.Tuple, ast.List, ast.Set)
  return names & {
    part.value
    for side in sides
    if isinstance(side, literal)
    for part in ast.walk(side)
    if isinstance(part, ast.Constant) and isinstance(part.value, str)
  }


def test_nothing_is_compared_with_the_name_of_a_choice():
  names = {
    choice
    for kind, file, name in _rows()
    if kind not in COMMON and isinstance(_registry(file, name), dict)
    for choice in _registry(file, name)
  }
  assert len(names) > 40, 'the registries were not found'
  found = {
    (name, choice)
    for name in tree.tracked('diloco/*.py', 'launch/*.py')
    for choice in _compared((tree.ROOT / name).read_text(), names)
  }
  assert found == OTHER_WORDS


@pytest.mark.parametrize(
  'code',
  ["x == 'a'", "x in ('a', 'b')", "match x:\n  case 'a' | 'b':\n    pass"],
)
def test_such_a_comparison_would_be_found(code):
  assert _compared(code, {'a'}) == {'a'}
