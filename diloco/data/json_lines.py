# SPDX-License-Identifier: Apache-2.0
"""JSON lines: a record a line, found by an index of where lines begin.

The index takes one pass over a file and 8 bytes a line, next to those of
tokens. A compressed or remote file is copied there, as it is uncompressed.
"""

import array
import contextlib
import functools
import gzip
import hashlib
import itertools
import pathlib
import shutil

import numpy as np
from etils import epath

from diloco.data import dialogues, paths
from diloco.data.documents import (
  DocumentFile,
  allow_open,
  index_root,
  locked,
  replacing,
)
from diloco.data.sources import FORMATS, is_masked
from diloco.data.tokenizers import needed

LINES, COPY = '.lines.npy', '.jsonl'
COUNTED_BYTES = 1 << 24  # At once, for the number of a line.


def open_files(
  path: str, text_key: str, index_folder: str = ''
) -> list[DocumentFile]:
  """Returns the files of a path; those that are new are read once.

  Args:
    path: a file, a folder or a pattern, local or gs://.

  Raises:
    FileNotFoundError: there is none.
    ValueError: the folder of indices can't be written, a package is missing,
      or a compressed file is broken.
  """
  root = index_root(index_folder)
  names = paths.find(path, FORMATS['jsonl'].patterns)
  allow_open(len(names))  # A mapped file keeps a descriptor.
  files = []
  for name in names:
    stamp = f'jsonl|{paths.stamp(name)}'
    key = hashlib.sha256(stamp.encode()).hexdigest()[:32]
    plain = pathlib.Path(name)
    is_copied = paths.is_remote(name) or name.endswith(('.gz', '.zst'))
    if is_copied:
      plain = root / (key + COPY)
    with locked(root / f'{key}.lock', wait=True):
      if is_copied and not plain.exists():
        _copy(name, plain)
      if not (root / (key + LINES)).exists():
        with replacing(root / (key + LINES)) as file:
          np.save(file, _starts(plain))
    starts = np.load(root / (key + LINES), mmap_mode='r')
    files.append(
      DocumentFile(
        name=name,
        stamp=f'{text_key}|{stamp}',
        count=len(starts) - 1,
        groups=0,
        read=functools.partial(_read, name, plain, starts, text_key),
        masked=is_masked(text_key),
      )
    )
  return files


def _copy(name: str, plain: pathlib.Path):
  """Copies a file, uncompressed."""
  with contextlib.ExitStack() as stack:
    opened = source = stack.enter_context(epath.Path(name).open('rb'))
    broken = (EOFError, OSError)
    if name.endswith('.zst'):
      with needed(name):
        import zstandard
      broken = (*broken, zstandard.ZstdError)
      decompressor = zstandard.ZstdDecompressor()
      opened = decompressor.stream_reader(source, read_across_frames=True)
    elif name.endswith('.gz'):
      opened = gzip.GzipFile(fileobj=source)
    copy = stack.enter_context(replacing(plain))
    try:
      shutil.copyfileobj(opened, copy, 1 << 20)
    except broken as error:
      raise ValueError(f'{name}: can not be decompressed ({error})') from None


def _starts(path: pathlib.Path) -> np.ndarray:
  """Returns where lines that are not empty begin, and where the last ends."""
  starts, at = array.array('Q'), 0
  with path.open('rb') as file:
    for line in file:
      if not line.isspace():
        starts.append(at)
      at += len(line)
  starts.append(at)
  return np.frombuffer(starts, np.uint64)


def _read(
  name: str,
  plain: pathlib.Path,
  starts: np.ndarray,
  text_key: str,
  start: int,
  stop: int,
) -> list[bytes | dialogues.Dialogue]:
  """Returns the documents of records start … stop - 1."""
  bounds = starts[start : stop + 1].tolist()
  with plain.open('rb') as file:
    file.seek(bounds[0])
    data = file.read(bounds[-1] - bounds[0])
  documents = []
  for begin, end in itertools.pairwise(bounds):
    line = data[begin - bounds[0] : end - bounds[0]]
    try:
      documents.append(dialogues.document_of_line(line, text_key))
    except ValueError as error:
      number = _line_number(plain, begin)
      raise ValueError(f'{name}, line {number}: {error}') from None
  return documents


def _line_number(path: pathlib.Path, at: int) -> int:
  """Returns the number of the line that begins at a byte, from 1."""
  number = 1
  with path.open('rb') as file:
    while at > 0 and (data := file.read(min(at, COUNTED_BYTES))):
      number += data.count(b'\n')
      at -= len(data)
  return number
