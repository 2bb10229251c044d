# SPDX-License-Identifier: Apache-2.0
"""Docstrings and comments are sentences that stand alone in a tooltip.

A first sentence does not continue the name of what it documents, and a process
is "it", "the learner" or "the peer", never a person.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.repository import tree

ITSELF = 'tests/repository/test_prose.py'
PRODUCT = ('diloco/', 'launch/', 'experiments/')
PERSONS = re.compile(
  r'\b(who|whom|who(m)?(so)?ever'
  r'|(no|some|every|any)body|(some|every|any)one)\b',
  re.IGNORECASE,
)
# Code and quoted text, such as a reason that a user reads.
QUOTED = re.compile(r"`[^`]*`|'[^'\n]*'")
CONTINUES = re.compile(
  r'(Of|Those|What|Whether|Which|Whose|As|For|How|Where|When|Unless|Also'
  r'|Likewise|The same)\b'
)
FORMULA = re.compile(r'[=^·√Σ+/(]')
# The first line of a command names it: `python -m diloco.tape DIR`.
COMMAND = re.compile(r': python -m [\w.]+')
Found = Iterator[tuple[int, str]]


def _docstrings(text: str) -> Found:
  for node in ast.walk(ast.parse(text)):
    if isinstance(
      node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    ):
      docstring = ast.get_docstring(node)
      if docstring:
        yield node.body[0].lineno, docstring


def _comments(text: str) -> Found:
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      yield token.start[0], token.string


def _first(docstring: str) -> str:
  return ' '.join(docstring.split('\n\n')[0].split())


def _persons(text: str) -> Found:
  """Yields the lines that speak of a process as of a person."""
  for line, found in (*_docstrings(text), *_comments(text)):
    if PERSONS.search(QUOTED.sub('', found)):
      yield line, found


def _fragments(text: str) -> Found:
  """Yields docstrings that continue a name; a question may begin so."""
  for line, docstring in _docstrings(text):
    first = _first(docstring)
    if CONTINUES.match(first) and not first.endswith('?'):
      yield line, first


def _unfinished(text: str) -> Found:
  """Yields first sentences without a capital letter or a full stop."""
  for line, docstring in _docstrings(text):
    first = _first(docstring)
    ends = first.endswith(('.', ':', '?')) or COMMAND.search(first)
    begins = not re.match('[a-z]', first) or FORMULA.search(first)
    if not (ends and begins):
      yield line, first


def _unfinished_helps(text: str) -> Found:
  """Yields help texts of flags that continue the flag's name."""
  for node in ast.walk(ast.parse(text)):
    called = getattr(getattr(node, 'func', None), 'attr', '')
    if called.startswith('DEFINE_') and isinstance(node, ast.Call):
      given = [x.value for x in node.args if isinstance(x, ast.Constant)]
      if len(given) > 2 and isinstance(said := given[-1], str):
        begins = re.match(r'[^a-z]|\S*:\S', said)
        if said and (CONTINUES.match(said) or not (begins and said[-1] == '.')):
          yield node.lineno, said


def _all(rule, *folders: str) -> list[str]:
  return [
    f'{name}:{line}: {" ".join(found.split())[:100]}'
    for name in tree.tracked('*.py')
    if name.startswith(folders) and name != ITSELF
    for line, found in rule((tree.ROOT / name).read_text())
  ]


def test_a_process_is_no_person():
  assert not _all(_persons, '')


def test_a_docstring_does_not_continue_its_name():
  assert not _all(_fragments, *PRODUCT, 'tests/')


def test_a_flag_says_what_it_is():
  assert not _all(_unfinished_helps, '')


def test_a_docstring_begins_with_a_sentence():
  assert not _all(_unfinished, *PRODUCT, 'tests/')


@pytest.mark.parametrize(
  ('rule', 'code'),
  [
    (_persons, '"""Waits for whoever is late."""'),
    (_persons, 'x = 1  # Nobody has reported yet.'),
    (_persons, '# The learner, who waits.'),
    (_fragments, 'def f():\n  """Of the bytes of every fragment."""'),
    (_fragments, 'def f():\n  """Whether it waits."""'),
    (_fragments, 'class A:\n  """What a learner holds."""'),
    (_unfinished, '"""bytes of an offer."""'),
    (_unfinished_helps, "flags.DEFINE_integer('seeds', 3, 'Of each one.')"),
    (_unfinished_helps, "flags.DEFINE_integer('seeds', 3, 'Their number')"),
    (_unfinished, '"""Bytes of an offer"""'),
  ],
)
def test_such_a_sentence_would_be_found(rule, code):
  assert list(rule(code))


@pytest.mark.parametrize(
  ('rule', 'code'),
  [
    (_persons, '"""The reason \'everyone is in\'; see `who`."""'),
    (_fragments, '"""How often should a fragment be synchronised?"""'),
    (_unfinished, '"""w = c_tokens · quality; 0 without a step."""'),
    (_unfinished, '"""Prints a tape: python -m diloco.tape DIR"""'),
  ],
)
def test_such_a_sentence_passes(rule, code):
  assert not list(rule(code))
