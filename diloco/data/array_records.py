# SPDX-License-Identifier: Apache-2.0
"""ArrayRecord files: any record can be read by itself, also from gs://.

A record is a document in UTF-8, a tf.train.Example with one among its features,
as in the files of TFDS, or tokens; for files that this project wrote,
`records_folder` says which.

Any document may be next, so every file stays open, with its own index of some
10 bytes a record in memory (measured with 300,000 records).
"""

import functools
from collections.abc import Callable, Iterator

import grain
from google.protobuf import empty_pb2, unknown_fields
from google.protobuf.message import DecodeError

from diloco.data import paths, records_folder
from diloco.data.documents import DocumentFile, allow_open
from diloco.data.records_folder import SUFFIX
from diloco.data.sources import FORMATS

FEW = 4  # Records; more are read by threads, whose start takes about that long.
DELIMITED = 2  # A wire type of protobuf.


# Reads one field of a tf.train.Example, without TensorFlow or generated code: a
# message that declares no fields has them all as unknown ones, by number.
#
#   Example {1: Features}, Features {1: entry}, entry {1: key, 2: Feature},
#   Feature {1: BytesList}, BytesList {1: bytes}.


def bytes_field(record: bytes, name: str) -> bytes:
  """Returns the first value of the feature `name`.

  Raises:
    ValueError: the record is not an Example, or has no such feature of bytes;
      says which it has.
  """
  names = set()
  for entry in _fields(record, 1, 1):
    key = b''.join(_fields(entry, 1)).decode(errors='replace')
    names.add(key)
    if key == name:
      for value in _fields(entry, 2, 1, 1):
        return value
  has = ', '.join(sorted(names)) or 'none'
  raise ValueError(f'no feature {name!r} of bytes; those there are: {has}')


def _fields(message: bytes, *path: int) -> Iterator[bytes]:
  """Yields the length-delimited fields at a path of numbers."""
  if not path:
    yield message
    return
  try:
    parsed = empty_pb2.Empty.FromString(message)
  except DecodeError:
    raise ValueError('is no tf.train.Example') from None
  for field in unknown_fields.UnknownFieldSet(parsed):
    if (field.field_number, field.wire_type) == (path[0], DELIMITED):
      yield from _fields(field.data, *path[1:])


def open_files(
  path: str, text_key: str, index_folder: str = ''
) -> list[DocumentFile]:
  """Returns the files of a path.

  Args:
    path: a file, a folder or a pattern, local or gs://.
    text_key: the feature with the text; '': a record is the text. Ignored for
      files that this project wrote, which say what their records are.

  Raises:
    FileNotFoundError: there is none.
    ValueError: a file is not an ArrayRecord file.
  """
  del index_folder  # It has an index of its own.
  names = paths.find(path, FORMATS['array_record'].patterns)
  allow_open(len(names))
  contents = functools.cache(records_folder.read_contents)
  files = []
  for name in names:
    folder, _, base = name.rpartition('/')
    manifest = contents(folder)
    decode, kind = _same, f'array_record|{text_key}'
    if manifest is not None and base in manifest.shards:
      kind = f'records|{manifest.dtype}'
    else:
      manifest = None
      decode = _feature(name, text_key) if text_key else _same
    dtype = manifest.dtype if manifest else ''
    source = _opened(name)
    files.append(
      DocumentFile(
        name=name,
        stamp=f'{kind}|{paths.stamp(name)}',
        count=len(source),
        groups=0,
        read=functools.partial(_read, source, decode),
        dtype=dtype,
        tokenizer=manifest.tokenizer if manifest else '',
        index=(folder, base.removesuffix(SUFFIX)) if dtype else None,
      )
    )
  return files


def _opened(name: str) -> grain.sources.ArrayRecordDataSource:
  try:
    return grain.sources.ArrayRecordDataSource([name])
  except RuntimeError as error:
    raise ValueError(f'{name}: is no ArrayRecord file ({error})') from None


def _read(
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
