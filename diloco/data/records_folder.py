# SPDX-License-Identifier: Apache-2.0
"""A folder of ArrayRecord shards with documents, as this project writes it.

NAME-00000-of-00004.array_record   a record is a document: UTF-8, or tokens
NAME-00000-of-00004.tokens.*       for tokens: the shard's index (`documents`)
contents.json                      what the records are, and how many
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from array_record.python import array_record_module
from etils import epath

from diloco.data.documents import IndexBuilder
from diloco.data.tokenizers import Tokenizer

CONTENTS = 'contents.json'
SUFFIX = '.array_record'
FORMAT = 1
SHARDS_MAX = 100_000
# One record a chunk, so that records can be read individually.
OPTIONS = 'group_size:1'
TOKENISED_AT_ONCE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class RecordsManifest:
  """The contents of contents.json.

  Attributes:
    text_bytes: bytes of their texts in UTF-8.
    tokens: tokens of all shards, including end tokens; 0 for text.
    dtype: dtype of tokens; '' for text.
    tokenizer: its fingerprint; '' for text.
    shards: names of files with the number of documents in each.
  """

  documents: int
  text_bytes: int
  tokens: int
  dtype: str
  tokenizer: str
  made_by: str
  shards: dict[str, int]


def read_contents(folder: str) -> RecordsManifest | None:
  """Reads contents.json; None if `write_records` did not write the folder.

  The folder may be local or gs://.

  Raises:
    ValueError: it was written by another version, or is broken.
  """
  path = epath.Path(folder) / CONTENTS
  if not path.exists():
    return None
  try:
    fields = json.loads(path.read_text())
    if fields.pop('format') != FORMAT:
      raise ValueError('of another format')
    return RecordsManifest(**fields)
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f'{path}: does not say what the records are ({error})'
    ) from None


def write_records(
  folder: pathlib.Path,
  shards: int,
  documents: Iterable[bytes],
  tokenizer: Tokenizer | None,
) -> RecordsManifest:
  """Distributes documents over shards of a new folder, which appears complete.

  Args:
    folder: does not exist yet, or is empty.
    shards: number of files, from 1 to `SHARDS_MAX`.
    documents: UTF-8; read one after another, never all in memory.
    tokenizer: makes tokens of them; None keeps the text.

  Raises:
    FileExistsError: something is in the folder.
    ValueError: there are fewer documents than shards, or one can't be
      tokenised.
  """
  if not 1 <= shards <= SHARDS_MAX:
    raise ValueError(f'shards={shards}: must be in 1 … {SHARDS_MAX}')
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise FileExistsError(f'{folder} is there already, nothing is overwritten')
  folder = folder.absolute()
  temporary = pathlib.Path(
    tempfile.mkdtemp(prefix=f'.{folder.name}-', dir=folder.parent)
  )
  try:
    manifest = _write_into(temporary, folder.name, shards, documents, tokenizer)
    temporary.chmod(0o755)
    os.replace(temporary, folder)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)
  return manifest


def _write_into(
  folder: pathlib.Path,
  name: str,
  shards: int,
  documents: Iterable[bytes],
  tokenizer: Tokenizer | None,
) -> RecordsManifest:
  names = [f'{name}-{i:05d}-of-{shards:05d}{SUFFIX}' for i in range(shards)]
  dtype = token_dtype(tokenizer.vocab) if tokenizer else ''
  indices = [IndexBuilder() for _ in names]
  counts, text_bytes, tokens = [0] * shards, 0, 0
  with contextlib.ExitStack() as stack:
    writers = [stack.enter_context(_writer(folder / each)) for each in names]
    for texts in _gathered(documents):
      encoded = tokenizer.encode(texts) if tokenizer else [None] * len(texts)
      for text, ids in zip(texts, encoded):
        shard = sum(counts) % shards
        counts[shard] += 1
        text_bytes += len(text)
        if ids is None:
          writers[shard].write(text)
        else:
          writers[shard].write(ids.astype(dtype).tobytes())
          indices[shard].add([ids], len(text))
          tokens += len(ids)
  if not all(counts):
    raise ValueError(
      f'{sum(counts)} documents are too few for shards={shards}, each takes one'
    )
  if tokenizer:
    for each, index in zip(names, indices):
      index.write(folder, each.removesuffix(SUFFIX))
  manifest = RecordsManifest(
    documents=sum(counts),
    text_bytes=text_bytes,
    tokens=tokens,
    dtype=dtype,
    tokenizer=tokenizer.fingerprint if tokenizer else '',
    made_by=tokenizer.name if tokenizer else '',
    shards=dict(zip(names, counts)),
  )
  fields = {'format': FORMAT, **dataclasses.asdict(manifest)}
  (folder / CONTENTS).write_text(json.dumps(fields, indent=1) + '\n')
  return manifest


def token_dtype(vocab: int) -> str:
  """Returns the smallest dtype for tokens below `vocab`, little-endian."""
  for dtype in ('uint8', 'uint16'):
    if vocab <= np.iinfo(dtype).max + 1:
      return np.dtype(dtype).newbyteorder('<').str
  return '<i4'


@contextlib.contextmanager
def _writer(path: pathlib.Path):
  writer = array_record_module.ArrayRecordWriter(str(path), OPTIONS)
  try:
    yield writer
  finally:
    writer.close()
  with path.open('rb') as file:
    os.fsync(file.fileno())


def _gathered(documents: Iterable[bytes]) -> Iterator[Sequence[bytes]]:
  """Yields documents in groups, since tokenizers take many at once."""
  gathered, size = [], 0
  for document in documents:
    gathered.append(document)
    size += len(document)
    if size >= TOKENISED_AT_ONCE_BYTES:
      yield gathered
      gathered, size = [], 0
  if gathered:
    yield gathered
