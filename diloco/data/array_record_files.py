# SPDX-License-Identifier: Apache-2.0
"""ArrayRecord files: any record can be read by itself, also from gs://.

A record is a document in UTF-8, a tf.train.Example with one among its
features, or tokens, as `records_folder` says of files that this project wrote.

Any document may be next, so every file stays open, with its own index of some
10 bytes a record in memory (measured with 300,000 records).
"""

import functools
import os
import resource
from collections.abc import Callable

import grain

from diloco.data import paths
from diloco.data.documents import DocumentFile
from diloco.data.example_proto import bytes_field
from diloco.data.records_folder import SUFFIX, read_contents

OPEN_ANYWAY = 512  # Sockets, logs, libraries, other sources of a mix.
FEW = 4  # Records; more are read by threads, whose start takes as long.
PATTERNS = ('*.array_record*', '*.arrayrecord*')


def array_record_files(path: str, text_key: str) -> list[DocumentFile]:
  """The files of a path.

  Args:
    path: of a file, a folder or a pattern, local or gs://.
    text_key: the feature with the text; '': a record is the text. What this
      project wrote says itself what its records are.

  Raises:
    FileNotFoundError: there is none.
    ValueError: a file is no ArrayRecord.
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
  """Records of a file, or of a range of one (array_record's FileInstruction).

  Raises:
    ValueError: it is no ArrayRecord.
  """
  try:
    return grain.sources.ArrayRecordDataSource([file])
  except RuntimeError as error:
    name = getattr(file, 'filename', file)
    raise ValueError(f'{name}: is no ArrayRecord file ({error})') from None


def allow_open(files: int) -> None:
  """Lets this process have so many more files open.

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
  """Documents of the records start … stop - 1."""
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
