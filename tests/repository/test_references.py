# SPDX-License-Identifier: Apache-2.0
"""Names in comments, docstrings and pages are those of something that is there.

A name in backquotes, with a dot, an underscore or a capital inside, or a path
to a file of the tree goes stale where the thing is renamed or deleted.
"""

import ast
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

from tests.repository import tree

PAGES = ('README.md', 'CONTRIBUTING.md', 'docs/*.md', 'diloco/*.md')
QUOTED = re.compile(r'`([^`\n]+)`')
# An identifier that nobody writes by chance: dotted, with an underscore, or
# with a capital inside.
NAME = re.compile(r'\w*[a-z]\w*(?:[._]\w+)+(?:\(\))?|[A-Z][a-z]+[A-Z]\w*')
PATH = re.compile(r'(?<![\w/.-])(?:[\w-]+/)+[\w-]+\.(?:py|c|sh|md|html)\b')
WORD = re.compile(r'[^\W\d]\w*')
PYTHON = ('*.py', '*.c', '*.sh', '*.html')
TOPS = {'diloco', 'launch', 'experiments', 'tests', 'docs', 'colab'}
PLACEHOLDERS = {'NAME', 'FILE', 'STUDY', 'x'}
# Names of other people's packages.
EXTERNAL = {'torch', 'jax', 'grpc', 'optax', 'inject_hyperparams', 'preexec_fn'}


# Python 3.12 splits f-strings into tokens.
FSTRING = getattr(tokenize, 'FSTRING_MIDDLE', tokenize.STRING)


def _comments(text: str) -> Iterator[str]:
  """Yields the comments and docstrings of a module."""
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      yield token.string
  for node in ast.walk(ast.parse(text)):
    if isinstance(
      node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    ):
      yield ast.get_docstring(node) or ''


def _code_words(text: str) -> set[str]:
  """Returns the words of a module but for those of comments and docstrings."""
  words: set[str] = set()
  previous = None
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.NAME:
      words.add(token.string)
    elif token.type in (tokenize.STRING, FSTRING) and previous not in (
      tokenize.INDENT,
      tokenize.NEWLINE,
      None,
    ):
      words |= set(WORD.findall(token.string))
    if token.type not in (tokenize.NL, tokenize.COMMENT):
      previous = token.type
  return words


class Names:
  """All words of the tree, and those of each module by the module's name."""

  def __init__(self):
    self.all: set[str] = set()
    self.of_modules: dict[str, set[str]] = {}

  def add(self, name: str, words: set[str]):
    self.all |= words | set(WORD.findall(name))
    if name.endswith('.py'):
      stem = pathlib.PurePath(name).stem
      self.of_modules.setdefault(stem, set()).update(words)

  def has(self, name: str) -> bool:
    """Says whether a dotted name can be looked up in the tree."""
    words = WORD.findall(name)
    if words[0] in EXTERNAL or set(words) & PLACEHOLDERS:
      return True
    inside = self.all
    if len(words) > 1 and words[-1][0].isupper():  # A class or a constant.
      inside = self.of_modules.get(words[-2], self.all)
    return set(words) <= self.all and words[-1] in inside


def _known() -> Names:
  names = Names()
  for name in tree.tracked(*PYTHON):
    text = (tree.ROOT / name).read_text()
    is_python = name.endswith('.py')
    names.add(name, _code_words(text) if is_python else _words(text))
  for name in tree.tracked('*.toml', '.github/*', '*.ipynb', 'tests/**/*.txt'):
    names.add(name, _words((tree.ROOT / name).read_text()))
  return names


def _words(text: str) -> set[str]:
  return set(WORD.findall(text))


def _dead(text: str, known: Names) -> Iterator[str]:
  """Yields the names and paths of a text that nothing in the tree has."""
  for quoted in QUOTED.findall(text):
    if NAME.fullmatch(quoted) and not known.has(quoted):
      yield quoted
  for path in PATH.findall(text):
    is_ours = path.split('/')[0] in TOPS and not _words(path) & PLACEHOLDERS
    if is_ours and not (tree.ROOT / path).exists():
      yield path


def _all_dead() -> list[str]:
  known = _known()
  found = []
  for name in tree.tracked('*.py'):
    for comment in _comments((tree.ROOT / name).read_text()):
      found += [f'{name}: {dead}' for dead in _dead(comment, known)]
  for name in tree.tracked(*PAGES):
    text = (tree.ROOT / name).read_text()
    found += [f'{name}: {dead}' for dead in _dead(text, known)]
  return found


def test_names_in_comments_and_pages_are_of_something_that_is_there():
  assert not _all_dead()


def test_a_dead_name_would_be_found():
  known = Names()
  known.add('diloco/a/store.py', {'Store', 'restore'})
  known.add('diloco/a/other.py', {'Other'})
  assert list(_dead('# See `store.Other` of it.', known)) == ['store.Other']
  assert list(_dead('# In diloco/gone.py.', known)) == ['diloco/gone.py']
  assert not list(_dead('# See `store.restore()` of `other.Other`.', known))
