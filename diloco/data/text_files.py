# SPDX-License-Identifier: Apache-2.0
"""Reads documents from text files: whole files, lines, or lines of JSON."""

import json
import pathlib
from collections.abc import Iterator, Sequence

KINDS = ('file', 'line', 'jsonl')


def read_documents(
  files: Sequence[pathlib.Path], kind: str, text_key: str
) -> Iterator[bytes]:
  """Yields documents in UTF-8, in order; empty ones are left out.

  Args:
    files: text files.
    kind: what a document is: a whole 'file', a 'line', or the field `text_key`
      of a JSON object on a line, 'jsonl'.
    text_key: see `kind`.

  Raises:
    FileNotFoundError: a file is missing; raised before anything is read.
    ValueError: something is not UTF-8 or not such an object; names file and
      line.
  """
  if kind not in KINDS:
    raise ValueError(f'kind={kind!r}, must be one of {KINDS}')
  for file in files:
    if not file.is_file():
      raise FileNotFoundError(f'{file}: there is no such file')
  return _documents(files, kind, text_key)


def _documents(
  files: Sequence[pathlib.Path], kind: str, text_key: str
) -> Iterator[bytes]:
  for file in files:
    if kind == 'file':
      texts = [(1, file.read_bytes())]
    else:
      texts = _lines(file)
    for number, text in texts:
      try:
        document = _field(text, text_key) if kind == 'jsonl' else text
        document.decode()
      except ValueError as error:
        raise ValueError(f'{file}, line {number}: {error}') from None
      if document:
        yield document


def _lines(file: pathlib.Path) -> Iterator[tuple[int, bytes]]:
  """Yields non-empty lines with their numbers; one at a time in memory."""
  with file.open('rb') as opened:
    for number, line in enumerate(opened, start=1):
      if line.strip():
        yield number, line.rstrip(b'\r\n')


def _field(line: bytes, text_key: str) -> bytes:
  value = json.loads(line)
  if not isinstance(value, dict) or not isinstance(value.get(text_key), str):
    raise ValueError(f'is no object with a string {text_key!r}')
  return value[text_key].encode()
