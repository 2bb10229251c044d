# SPDX-License-Identifier: Apache-2.0
"""The sources of data by name: text in memory, and formats of files.

Importing this imports no reader: a configuration is checked without them.
"""

import dataclasses
import importlib
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
    module: that reads it, in `diloco.data`: its `open_files` takes a path and
      the key of the text, and returns `documents.DocumentFile`s.
    package: that it imports; an extra may hold it.
    needs_text_key: True if a document's text has a name in it.
  """

  module: str
  package: str
  needs_text_key: bool = True

  def open_files(self, path: str, text_key: str) -> 'list[DocumentFile]':
    """Returns the files of a path."""
    module = importlib.import_module(f'diloco.data.{self.module}')
    return module.open_files(path, text_key)


FORMATS = {
  'array_record': Format('array_records', 'array_record', needs_text_key=False),
  'parquet': Format('parquet_files', 'pyarrow'),
}


@dataclasses.dataclass(frozen=True)
class MixtureSource:
  """Some files and their share of a mix.

  Attributes:
    format: a key of `FORMATS`.
    path: a file, a folder or a pattern.
    text_key: column or feature with the text.
    weight: share of rows, relative to the others'.
  """

  format: str
  path: str
  text_key: str
  weight: float = 1.0
