# SPDX-License-Identifier: Apache-2.0
"""ArrayRecord files: read, written, and the features of their Examples.

A record is a document in UTF-8, a tf.train.Example with one among its features,
or tokens; for files that this project wrote, `records_folder` says which.

Any document may be next, so every file stays open, with its own index of some
10 bytes a record in memory (measured with 300,000 records).
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence

import grain
import numpy as np
from array_record.python import array_record_module
from etils import epath

from diloco.data import paths
from diloco.data.documents import DocumentFile, IndexBuilder
from diloco.data.tokenizers import Tokenizer

CONTENTS = 'contents.json'
SUFFIX = '.array_record'
FORMAT = 1
SHARDS_MAX = 100_000
# One record a chunk, so that records can be read individually.
OPTIONS = 'group_size:1'
TOKENISED_AT_ONCE_BYTES = 1 << 20
# Reserve for sockets, logs, libraries, other sources of a mix.
OPEN_ANYWAY = 512
FEW = 4  # Records; more are read by threads, whose start takes about that long.
PATTERNS = ('*.array_record*', '*.arrayrecord*')


# Reads one field of a tf.train.Example, without TensorFlow or generated code.
#
# Only this part of the protobuf wire format is parsed, by field number:
#   Example {1: Features}, Features {1: entry}, entry {1: key, 2: Feature},
#   Feature {1: BytesList}, BytesList {1: bytes}.


def bytes_field(record: bytes, name: str) -> bytes:
  """Returns the first value of the feature `name`.

  Raises:
    ValueError: the record is not an Example, or has no such feature of bytes;
      says which it has.
  """
  names = []
  wanted = name.encode()
  for features in _fields(memoryview(record), 1):
    for entry in _fields(features, 1):
      key = bytes(next(_fields(entry, 1), b''))
      names.append(key.decode(errors='replace'))
      if key == wanted:
        for feature in _fields(entry, 2):
          for values in _fields(feature, 1):
            for value in _fields(values, 1):
              return bytes(value)
  has = ', '.join(sorted(set(names))) or 'none'
  raise ValueError(f'no feature {name!r} of bytes; those there are: {has}')


def _fields(message: memoryview, number: int) -> Iterator[memoryview]:
  """Yields the length-delimited fields of that number."""
  at, end = 0, len(message)
  while at < end:
    tag, at = _varint(message, at)
    match tag & 7:
      case 0:
        _, at = _varint(message, at)
      case 1:
        at += 8
      case 5:
        at += 4
      case 2:
        size, at = _varint(message, at)
        if at + size > end:
          raise ValueError('is no tf.train.Example: it ends too soon')
        if tag >> 3 == number:
          yield message[at : at + size]
        at += size
      case kind:
        raise ValueError(f'is no tf.train.Example: a field of type {kind}')
  if at != end:
    raise ValueError('is no tf.train.Example: it ends too soon')


def _varint(message: memoryview, at: int) -> tuple[int, int]:
  """Returns a number of seven bits a byte, low ones first, and its end."""
  value = shift = 0
  while at < len(message):
    byte = message[at]
    value |= (byte & 0x7F) << shift
    at, shift = at + 1, shift + 7
    if byte < 0x80:
      return value, at
    if shift > 63:
      break
  raise ValueError('is no tf.train.Example: a number does not end')


# A folder of ArrayRecord shards with documents, as this project writes it.
#
# NAME-00000-of-00004.array_record   a record is a document: UTF-8, or tokens
# NAME-00000-of-00004.tokens.*       for tokens: the shard's index (`documents`)
# contents.json                      what the records are, and how many


@dataclasses.dataclass(frozen=True)
class RecordsManifest:
  """The contents of contents.json.

  Attributes:
    documents: number in all shards.
    text_bytes: bytes of their texts in UTF-8.
    tokens: tokens of all shards, including end tokens; 0 for text.
    dtype: dtype of tokens; '' for text.
    tokenizer: its fingerprint; '' for text.
    made_by: the tokenizer's name, for humans.
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
    contents = _write_into(temporary, folder.name, shards, documents, tokenizer)
    temporary.chmod(0o755)
    os.replace(temporary, folder)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)
  return contents


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
  contents = RecordsManifest(
    documents=sum(counts),
    text_bytes=text_bytes,
    tokens=tokens,
    dtype=dtype,
    tokenizer=tokenizer.fingerprint if tokenizer else '',
    made_by=tokenizer.name if tokenizer else '',
    shards=dict(zip(names, counts)),
  )
  fields = {'format': FORMAT, **dataclasses.asdict(contents)}
  (folder / CONTENTS).write_text(json.dumps(fields, indent=1) + '\n')
  return contents


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


def array_record_files(path: str, text_key: str) -> list[DocumentFile]:
  """Returns the files of a path.

  Args:
    path: a file, a folder or a pattern, local or gs://.
    text_key: the feature with the text; '': a record is the text. Ignored for
      files that this project wrote, which say what their records are.

  Raises:
    FileNotFoundError: there is none.
    ValueError: a file is not an ArrayRecord file.
  """
  files = []
  folders = {}
  names = paths.find(path, PATTERNS)
  allow_open(len(names))
  for name in names:
    folder, _, base = name.rpartition('/')
    if folder not in folders:
      folders[folder] = read_contents(folder)
    contents = folders[folder]
    source = open_records(name)
    if contents is not None and base in contents.shards:
      files.append(
        DocumentFile(
          name=name,
          stamp=f'records|{contents.dtype}|{paths.stamp(name)}',
          count=len(source),
          groups=0,
          read=functools.partial(read_records, source, _same),
          dtype=contents.dtype,
          tokenizer=contents.tokenizer,
          index=(folder, base.removesuffix(SUFFIX)) if contents.dtype else None,
        )
      )
      continue
    decode = _feature(name, text_key) if text_key else _same
    files.append(
      DocumentFile(
        name=name,
        stamp=f'array_record|{text_key}|{paths.stamp(name)}',
        count=len(source),
        groups=0,
        read=functools.partial(read_records, source, decode),
      )
    )
  return files


def open_records(
  file: str | os.PathLike | object,
) -> grain.sources.ArrayRecordDataSource:
  """Opens a file, or a range of one (array_record's FileInstruction).

  Raises:
    ValueError: it is not an ArrayRecord file.
  """
  try:
    return grain.sources.ArrayRecordDataSource([file])
  except RuntimeError as error:
    name = getattr(file, 'filename', file)
    raise ValueError(f'{name}: is no ArrayRecord file ({error})') from None


def allow_open(files: int) -> None:
  """Raises this process's limit of open files by `files`.

  Raises:
    ValueError: the machine forbids it; says how to allow it.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft == resource.RLIM_INFINITY or soft >= OPEN_ANYWAY + 2 * files:
    return
  wanted = soft + files
  if hard != resource.RLIM_INFINITY and wanted > hard:
    raise ValueError(
      f'data: {files} files would be open, this process may have {hard} in '
      "all; 'ulimit -n' raises that, and fewer, larger files need less"
    )
  resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def read_records(
  source: grain.sources.ArrayRecordDataSource,
  decode: Callable[[bytes], bytes],
  start: int,
  stop: int,
) -> list[bytes]:
  """Returns the documents of records start … stop - 1."""
  if stop - start <= FEW:
    return [decode(source[i]) for i in range(start, stop)]
  return [decode(each) for each in source.__getitems__(range(start, stop))]


def _same(record: bytes) -> bytes:
  return record


def _feature(name: str, text_key: str) -> Callable[[bytes], bytes]:
  def decode(record: bytes) -> bytes:
    try:
      return bytes_field(record, text_key)
    except ValueError as error:
      raise ValueError(
        f'{name}: a record {error}; data.text_key={text_key!r} names the '
        "feature with the text, '' says that a record is the text"
      ) from None

  return decode
