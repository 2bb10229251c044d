# SPDX-License-Identifier: Apache-2.0
"""Each choice is added by one edit, in the file that CONTRIBUTING names.

A test makes the edit in a copy of the tree, and a process that runs there
configures what is new and uses it.
"""

import ast
import importlib
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.repository.choices import CHOICES, Choice

ROOT = pathlib.Path(__file__).parents[2]
# Configures a run, with keys that a test gives.
BUILD = """
import numpy as np
from diloco.config import run_config
from experiments import common

def built(**keys):
  config = common.base()
  config.update_from_flattened_dict(
    {key.replace('__', '.'): value for key, value in keys.items()}
  )
  return run_config.build(config)
"""


def _edited(choice: Choice, folder: pathlib.Path) -> pathlib.Path:
  """Returns a copy of the tree with the entry added."""
  for part in ('diloco', 'experiments', 'launch'):
    # Another process may be writing its bytecode there.
    unfinished = shutil.ignore_patterns('*.pyc.*')
    shutil.copytree(ROOT / part, folder / part, ignore=unfinished)
  first = choice.file, choice.registry, choice.entry
  edits = [(*first, choice.before)]
  if choice.also:
    edits.append((*choice.also, ''))
  for name, registry, entry, before in edits:
    file = folder / name
    text = file.read_text()
    head = f'\n{registry} = {{'
    assert text.count(head) == 1, f'{registry} of {name}'
    file.write_text(text.replace(head, f'{before}\n{head} {entry}'))
  return folder


@pytest.mark.parametrize('kind', CHOICES)
def test_a_choice_is_one_edit(kind, tmp_path):
  choice = CHOICES[kind]
  done = subprocess.run(
    [sys.executable, '-c', BUILD + choice.use],
    cwd=_edited(choice, tmp_path),
    env={**os.environ, 'PYTHONPATH': str(tmp_path), 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('kind', CHOICES)
def test_a_choice_is_in_the_table_of_contributing(kind):
  text = (ROOT / 'CONTRIBUTING.md').read_text()
  choice = CHOICES[kind]
  row = f'| {kind} | `{choice.file}`, `{choice.registry}`'
  assert any(line.startswith(row) for line in text.splitlines()), row


# Words that are no choice there: a key of the section `data`, and a part of the
# names of a study's rows.
OTHER_WORDS = (
  ('diloco/config/data_section.py', 'mix'),
  ('diloco/studies/heterogeneous.py', 'latest'),
)

FAULTS = 'kind of fault of a chaos run'


def _names(choice: Choice) -> set[str]:
  module = choice.file.removesuffix('.py').replace('/', '.')
  return set(getattr(importlib.import_module(module), choice.registry))


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
    each.value
    for side in sides
    if isinstance(side, literal)
    for each in ast.walk(side)
    if isinstance(each, ast.Constant) and isinstance(each.value, str)
  }


def test_nothing_is_compared_with_the_name_of_a_choice():
  """An attribute of their entries says what differs between choices."""
  names = set()
  for kind, choice in CHOICES.items():
    if kind != FAULTS:  # Common words: `kill` is also what a plan can do.
      names |= _names(choice)
  found = {
    (file.relative_to(ROOT).as_posix(), name)
    for top in ('diloco', 'launch')
    for file in (ROOT / top).rglob('*.py')
    for name in _compared(file.read_text(), names)
  }
  assert sorted(found) == sorted(OTHER_WORDS)


def test_a_chaos_run_compares_with_no_kind_of_fault():
  for file in (ROOT / 'launch/chaos').rglob('*.py'):
    assert not _compared(file.read_text(), _names(CHOICES[FAULTS])), file


@pytest.mark.parametrize(
  'code',
  ["x == 'a'", "x in ('a', 'b')", "match x:\n  case 'a' | 'b':\n    pass"],
)
def test_such_a_comparison_would_be_found(code):
  assert _compared(code, {'a'}) == {'a'}
