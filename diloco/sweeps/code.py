# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of the code that the result of a run depends on.

It changes with what the packages compute, not with comments, docstrings or
layout, and is the same on all versions of Python.
"""

import ast
import functools
import hashlib
import pathlib
from collections.abc import Iterator

PACKAGES = ('numerics', 'models', 'protocol', 'lab')


@functools.cache
def fingerprint() -> str:
  """Returns 8 hex digits; of the files as they are at the first call."""
  root = pathlib.Path(__file__).parents[1]
  files = [
    path for name in PACKAGES for path in sorted((root / name).rglob('*.py'))
  ]
  texts = {str(path.relative_to(root)): path.read_text() for path in files}
  return fingerprint_of(texts)


def fingerprint_of(texts: dict[str, str]) -> str:
  """Returns the fingerprint of files: 8 hex digits of their texts by name."""
  digest = hashlib.sha256()
  for name, text in texts.items():
    digest.update(name.encode() + b'\0')
    for word in _words(ast.parse(text)):
      digest.update(word.encode() + b'\0')
  return digest.hexdigest()[:8]


def _words(node: ast.AST) -> Iterator[str]:
  """Yields what a tree is made of, without docstrings and what is empty."""
  yield type(node).__name__
  for field, value in ast.iter_fields(node):
    if value is None or value == []:
      continue  # Newer versions of Python have more fields.
    yield field
    for each in value if isinstance(value, list) else [value]:
      if _is_text(each):
        continue
      if isinstance(each, ast.AST):
        yield from _words(each)
      else:
        yield repr(each)
  yield '.'


def _is_text(node) -> bool:
  """Returns True for a statement that is a string, such as a docstring."""
  return (
    isinstance(node, ast.Expr)
    and isinstance(node.value, ast.Constant)
    and isinstance(node.value.value, str)
  )
