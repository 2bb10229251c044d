# SPDX-License-Identifier: Apache-2.0
"""Files by path, pattern or URL; text files.

URLs are listed by etils.epath, for which gs:// requires the extra `gcs`.
"""

import glob
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence

from etils import epath

from diloco.data.dialogues import document_of_line
from diloco.data.sources import is_masked

_WILD = re.compile(r'[*?\[]')
KINDS = ('file', 'line', 'jsonl')
WATCHED_BYTES = 1 << 20
# Takes now and then how much of a long work is done, and of how much.
Watch = Callable[[int, int], None]


def unwatched(done: int, total: int) -> None:
  """Says nothing of how far a work is."""


def is_remote(path: str) -> bool:
  """Returns True for a URL, such as gs://bucket/file."""
  return '://' in path


def find(path: str, patterns: Sequence[str]) -> list[str]:
  """Returns the files of a path in order of their names; local ones absolute.

  Args:
    path: a file; a folder, of which the files that match a pattern are taken;
      or a pattern in its last part, such as /data/train-*.parquet.

  Raises:
    FileNotFoundError: there is none; names the path.
    ValueError: a URL is of an unknown kind, or its package is missing.
  """
  files = _remote(path, patterns) if is_remote(path) else _local(path, patterns)
  if not files:
    raise FileNotFoundError(
      f'data: {path!r}: there is no such file, nor a folder with files '
      f'{" or ".join(patterns)}'
    )
  return sorted(set(files))


def stamp(path: str) -> str:
  """Returns name, size and time of a file, which differ after a change."""
  if is_remote(path):
    status = epath.Path(path).stat()
    return f'{path}|{status.length}|{status.mtime}'
  status = os.stat(path)
  return f'{path}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}'


def _local(path: str, patterns: Sequence[str]) -> list[str]:
  path = os.path.abspath(os.path.expanduser(path))
  if os.path.isfile(path):  # Even if its name looks like a pattern.
    return [path]
  escaped = glob.escape(path)
  wanted = [path] if not os.path.isdir(path) else []
  wanted += [os.path.join(escaped, p) for p in patterns if not wanted]
  return [
    file for each in wanted for file in glob.glob(each) if os.path.isfile(file)
  ]


def _remote(path: str, patterns: Sequence[str]) -> list[str]:
  folder, _, name = path.rstrip('/').rpartition('/')
  try:
    if _WILD.search(name):
      return [os.fspath(file) for file in epath.Path(folder).glob(name)]
    whole = epath.Path(path)
    if whole.is_dir():
      return [os.fspath(file) for p in patterns for file in whole.glob(p)]
    return [path] if whole.exists() else []
  except KeyError:
    raise ValueError(
      f'data: {path!r}: nothing can be read by such a URL, gs:// can'
    ) from None
  except ImportError as error:
    raise ValueError(
      f"data: {path!r}: {error}: pip install 'diloco[gcs]'"
    ) from None


def read_documents(
  files: Sequence[pathlib.Path],
  kind: str,
  text_key: str,
  watch: Watch = unwatched,
) -> Iterator[bytes]:
  """Yields documents in UTF-8, in order; empty ones are left out.

  Args:
    kind: what a document is: a whole 'file', a 'line', or the field `text_key`
      of a JSON object on a line, 'jsonl'.
    watch: takes how many bytes of all files are read, about every MiB.

  Raises:
    FileNotFoundError: a file is missing; raised before anything is read.
    ValueError: something is not UTF-8 or not such an object; names file and
      line.
  """
  if kind not in KINDS:
    raise ValueError(f'kind={kind!r}, must be one of {KINDS}')
  if kind == 'jsonl' and is_masked(text_key):
    raise ValueError(
      f'text_key={text_key!r}: must be the name of a text; of dialogues a run '
      "reads the JSON lines themselves, data.source='jsonl'"
    )
  for file in files:
    if not file.is_file():
      raise FileNotFoundError(f'{file}: there is no such file')
  return _documents(files, kind, text_key, watch)


def _documents(
  files: Sequence[pathlib.Path], kind: str, text_key: str, watch: Watch
) -> Iterator[bytes]:
  done, reported, total = 0, 0, sum(file.stat().st_size for file in files)
  for file in files:
    if kind == 'file':
      texts = [(1, file.read_bytes())]
    else:
      texts = _lines(file)
    for number, text in texts:
      try:
        document = text
        if kind == 'jsonl':
          document = document_of_line(text, text_key)
        document.decode()
      except ValueError as error:
        raise ValueError(f'{file}, line {number}: {error}') from None
      if document:
        yield document
      done += len(text)
      if done >= reported + WATCHED_BYTES:
        reported = done
        watch(done, total)


def _lines(file: pathlib.Path) -> Iterator[tuple[int, bytes]]:
  """Yields non-empty lines with their numbers; one at a time in memory."""
  with file.open('rb') as opened:
    for number, line in enumerate(opened, start=1):
      if line.strip():
        yield number, line.rstrip(b'\r\n')
