# SPDX-License-Identifier: Apache-2.0
"""The sources of data by name: text in memory, and formats of files.

Importing this imports no reader: a configuration is checked without them.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from diloco.data.corpus import Corpus
  from diloco.data.documents import DocumentFile

BYTE_VOCAB = 256
TEXT_PATTERN = '*.txt'  # Files that are taken from a folder of text.
HELDOUT_PERCENT = 4  # Of the bytes of each file of text.


def text_files(
  path: pathlib.Path, pattern: str = TEXT_PATTERN
) -> list[pathlib.Path]:
  """Returns the files of a text: itself, or those in a folder, at any depth.

  Raises:
    FileNotFoundError: there is none.
  """
  if path.is_dir():
    found = sorted(file for file in path.rglob(pattern) if file.is_file())
    if not found:
      raise FileNotFoundError(f'no file {pattern!r} in directory {path}')
    return found
  if not path.is_file():
    raise FileNotFoundError(f'no text at {path}')
  return [path]


def heldout_bytes(nbytes: int, percent: int = HELDOUT_PERCENT) -> int:
  """Returns how many bytes at the end of a file of text are held out."""
  return nbytes * percent // 100


@dataclasses.dataclass(frozen=True)
class MemorySource:
  """A source whose text, one token per byte, is held in memory.

  Attributes:
    load: takes the section `data` and the run's seed, and returns the corpus.
    takes_path: True if `data.path` names the text.
    is_made: True if the text is drawn, of `data.grammar_bytes` bytes.
    vocab_min: tokens that a model of it must know.
  """

  load: 'Callable[[Any, int], Corpus]'
  takes_path: bool = False
  is_made: bool = False
  vocab_min: int = BYTE_VOCAB


def _stdlib(data, seed):
  del data, seed
  from diloco.data import corpus

  return corpus.stdlib_corpus()


def _grammar(data, seed):
  from diloco.data import corpus

  return corpus.grammar_corpus(seed, data.grammar_bytes)


def _text(data, seed):
  del seed
  from diloco.data import corpus

  return corpus.text_corpus([pathlib.Path(data.path)])


IN_MEMORY = {
  'stdlib': MemorySource(_stdlib),
  'grammar': MemorySource(_grammar, is_made=True, vocab_min=128),  # ASCII.
  'text': MemorySource(_text, takes_path=True),
}


@dataclasses.dataclass(frozen=True)
class Format:
  """A format of files of documents.

  Attributes:
    files: takes a path and the key of the text, and returns the files.
    needs_text_key: True if a document's text has a name in it.
    package: that reads it; an extra may hold it.
    has_splits: True if '#SPLIT' may follow a path.
  """

  files: 'Callable[[str, str], list[DocumentFile]]'
  package: str
  needs_text_key: bool = True
  has_splits: bool = False


def _array_record(path, text_key):
  from diloco.data.array_records import array_record_files

  return array_record_files(path, text_key)


def _parquet(path, text_key):
  from diloco.data.parquet_files import parquet_files

  return parquet_files(path, text_key)


def _tfds(path, text_key):
  from diloco.data.tfds_files import tfds_files

  return tfds_files(path, text_key)


FORMATS = {
  'array_record': Format(_array_record, 'array_record', needs_text_key=False),
  'parquet': Format(_parquet, 'pyarrow'),
  'tfds': Format(_tfds, 'tensorflow_datasets', has_splits=True),
}
