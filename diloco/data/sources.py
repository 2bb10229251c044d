# SPDX-License-Identifier: Apache-2.0
"""The sources of data by name: text in memory, and formats of files.

Importing this imports no reader: a configuration is checked without them.
"""

import dataclasses
import fnmatch
import importlib
import os
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from diloco.data.corpus import Corpus
  from diloco.data.documents import DocumentFile

BYTE_VOCAB = 256
TEXT_PATTERN = '*.txt'  # Files that are taken from a folder of text.
HELDOUT_PERCENT = 4  # Of the bytes of each file of text.


def text_files(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files of a text: itself, or those in a folder, at any depth.

  Raises:
    FileNotFoundError: there is none.
  """
  if path.is_dir():
    files = sorted(file for file in path.rglob(TEXT_PATTERN) if file.is_file())
    if not files:
      raise FileNotFoundError(f'no file {TEXT_PATTERN!r} in directory {path}')
    return files
  if not path.is_file():
    raise FileNotFoundError(f'no text at {path}')
  return [path]


def heldout_bytes(nbytes: int) -> int:
  """Returns how many bytes at the end of a file of text are held out."""
  return nbytes * HELDOUT_PERCENT // 100


@dataclasses.dataclass(frozen=True)
class MemorySource:
  """A source whose text, one token per byte, is held in memory.

  Attributes:
    make: takes the module `corpus`, the section `data` and the run's seed.
    takes_path: True if `data.path` names the text.
    is_made: True if the text is drawn, of `data.grammar_bytes` bytes.
    vocab_min: tokens that a model of it must know.
    is_elsewhere: True if there is no text: a loop that is not ours has it.
  """

  make: 'Callable[[Any, Any, int], Corpus]'
  takes_path: bool = False
  is_made: bool = False
  vocab_min: int = BYTE_VOCAB
  is_elsewhere: bool = False

  def load(self, data, seed: int) -> 'Corpus':
    """Returns the corpus that the section `data` describes."""
    from diloco.data import corpus

    return self.make(corpus, data, seed)


IN_MEMORY = {
  'stdlib': MemorySource(lambda corpus, data, seed: corpus.stdlib_corpus()),
  'grammar': MemorySource(
    lambda corpus, data, seed: corpus.grammar_corpus(seed, data.grammar_bytes),
    is_made=True,
    vocab_min=128,  # ASCII.
  ),
  'text': MemorySource(
    lambda corpus, data, seed: corpus.text_corpus(data.path), takes_path=True
  ),
  'given': MemorySource(
    lambda corpus, data, seed: corpus.no_corpus(), is_elsewhere=True
  ),
}


@dataclasses.dataclass(frozen=True)
class Format:
  """A format of files of documents.

  Attributes:
    module: that reads it, in `diloco.data`: its `open_files` takes a path, the
      key of the text and the folder of indices, and returns
      `documents.DocumentFile`s.
    patterns: names of its files, as they are taken from a folder.
    package: that it imports, if any; an extra may hold it.
    needs_text_key: True if a document's text has a name in it.
    also: names of single files that are more likely of it than of a text.
  """

  module: str
  patterns: tuple[str, ...]
  package: str = ''
  needs_text_key: bool = True
  also: tuple[str, ...] = ()

  def open_files(
    self, path: str, text_key: str, index_folder: str = ''
  ) -> 'list[DocumentFile]':
    """Returns the files of a path."""
    module = importlib.import_module(f'diloco.data.{self.module}')
    return module.open_files(path, text_key, index_folder)

  def has(self, name: str) -> bool:
    """Returns True if files of it are called like this."""
    wanted = (*self.patterns, *self.also)
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)


FORMATS = {
  'array_record': Format(
    'array_records',
    ('*.array_record*', '*.arrayrecord*'),
    'array_record',
    needs_text_key=False,
  ),
  'parquet': Format('parquet_files', ('*.parquet',), 'pyarrow'),
  'jsonl': Format(
    'json_lines',
    ('*.jsonl', '*.jsonl.zst', '*.jsonl.gz', '*.ndjson'),
    also=('*.json', '*.json.zst', '*.json.gz'),
  ),
  'arrow': Format('arrow_folders', ('*.arrow',), 'pyarrow'),
}


def recognised(path: str) -> str:
  """Returns the source of a file or folder, by names: 'text' or a format.

  A folder is of the format of its files; other files in it are left out.

  Raises:
    ValueError: a folder has files of several formats, or none at all.
  """
  local = os.path.expanduser(path)
  if not os.path.isdir(local):
    base = os.path.basename(path)
    return next((name for name, f in FORMATS.items() if f.has(base)), 'text')
  found = {
    name: file
    for file in sorted(os.listdir(local), reverse=True)
    for name, format_ in FORMATS.items()
    if any(fnmatch.fnmatchcase(file, each) for each in format_.patterns)
  }
  if len(found) > 1:
    raise ValueError(
      f'{path!r}: has files of several formats, such as '
      f'{" and ".join(sorted(found.values()))}; name some of one by a pattern, '
      f"such as '{path.rstrip('/')}/{FORMATS[min(found)].patterns[0]}'"
    )
  return next(iter(found), 'text')


# What `text_key` may say. A name: of the text. 'chat:NAME': of a list of
# messages. 'PROMPT+COMPLETION': of two texts. Of the latter two only what the
# model is to say counts in the loss.
CHAT = 'chat:'


def fields_of(text_key: str) -> tuple[str, ...]:
  """Returns the names of the fields that a `text_key` reads."""
  if text_key.startswith(CHAT):
    return (text_key.removeprefix(CHAT),)
  return tuple(text_key.split('+'))


def is_masked(text_key: str) -> bool:
  """Returns True if some of a document's tokens count, not all."""
  return text_key.startswith(CHAT) or '+' in text_key


@dataclasses.dataclass(frozen=True)
class MixtureSource:
  """Some files and their share of a mix.

  Attributes:
    format: a key of `FORMATS`.
    path: a file, a folder or a pattern.
    text_key: field, column or feature with the text; see `CHAT`.
    weight: share of rows, relative to the others'.
  """

  format: str
  path: str
  text_key: str
  weight: float = 1.0
