# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines that grow for weeks: appended to, rotated, read again.

The newest lines of NAME are in NAME, older ones in its parts, NAME.000001 and
so on, which are read before it. A line may be sealed (see `files`).
"""

import collections
import glob
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping

from absl import logging

from diloco.metrics import files

PART_BYTES = 64 << 20  # Size at which a file is rotated to a part.
WAITING_BYTES_MAX = 1 << 20  # Lines that are not on the disk yet.
BLOCK_BYTES = 1 << 16  # Read at once, from the end.


class CorruptLine(ValueError):
  """A complete line of a JSONL file is not a JSON object, or was changed."""


class JsonLines:
  """Appends lines at once, each whole; one writer at a time.

  A killed process tears at most its last line, which the next one cuts. A full
  disk is not fatal: up to `WAITING_BYTES_MAX` of lines wait and are written as
  soon as the disk takes them; lost ones are logged.

  Args:
    path: the file; its folder is created.
    part_bytes: size at which another part begins.
  """

  def __init__(self, path: pathlib.Path, part_bytes: int = PART_BYTES):
    self._path = path
    self._part_bytes = part_bytes
    self._file = None
    self._bytes = 0  # Size of the file.
    self._waiting: collections.deque[bytes] = collections.deque()
    self._waiting_bytes = 0
    self._lost = 0
    self._failed = False
    self._write()

  def append(self, line: bytes):
    """Writes a line, given without its newline."""
    self._waiting.append(line + b'\n')
    self._waiting_bytes += len(line) + 1
    while self._waiting_bytes > WAITING_BYTES_MAX and len(self._waiting) > 1:
      self._waiting_bytes -= len(self._waiting.popleft())
      self._lost += 1
    self._write()

  def close(self):
    """Closes the file; what the disk has not taken by now is lost."""
    self._write()
    if self._waiting:
      logging.error('%s: %d lines are lost', self._path, len(self._waiting))
    self._abandon()

  def _write(self):
    try:
      if self._file is None:
        self._open()
      while self._waiting:
        self._write_whole(self._waiting[0])
        self._waiting_bytes -= len(self._waiting.popleft())
    except OSError as error:
      self._abandon()  # When opened again, it is cut back to complete lines.
      if not self._failed:
        logging.error('%s waits for the disk: %s', self._path, error)
      self._failed = True
      return
    if self._failed:
      logging.warning('%s goes on; %d lines are lost', self._path, self._lost)
    self._failed, self._lost = False, 0

  def _open(self):
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self._file = self._path.open('ab', buffering=0)
    cut_torn_line(self._path)
    self._bytes = self._path.stat().st_size

  def _write_whole(self, line: bytes):
    if self._bytes and self._bytes + len(line) > self._part_bytes:
      self._abandon()
      os.rename(self._path, _next_part(self._path))
      self._open()
    written = 0
    while written < len(line):
      written += self._file.write(line[written:])
    self._bytes += len(line)

  def _abandon(self):
    if self._file is not None:
      self._file.close()
      self._file = None


def parts(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns all parts of a file of lines, the oldest first."""
  older = path.parent.glob(f'{glob.escape(path.name)}.[0-9]*')
  numbered = sorted(file for file in older if file.suffix[1:].isdecimal())
  return [*numbered, path] if path.exists() else numbered


def _next_part(path: pathlib.Path) -> pathlib.Path:
  last = [int(file.suffix[1:]) for file in parts(path) if file != path]
  return path.with_name(f'{path.name}.{max(last, default=0) + 1:06d}')


def read_jsonl(path: pathlib.Path) -> list[dict]:
  """Returns the records of a file and its parts; none if it is absent.

  A last line without its newline is left out: it is being written, or its
  process was killed while it wrote.

  Raises:
    CorruptLine: any other line is not a JSON object, or was changed.
  """
  records = []
  for part in parts(path):
    with part.open('rb') as file:
      for number, line in enumerate(file, start=1):
        if line.endswith(b'\n'):
          records.append(_record(line[:-1], f'{part}:{number}'))
  return records


def from_the_end(path: pathlib.Path) -> Iterator[dict]:
  """Yields the records of a file and its parts, the newest first.

  Unreadable lines are logged and skipped: this is for processes that go on.
  """
  for part in reversed(parts(path)):
    for line in _lines_from_the_end(part):
      try:
        yield _record(line, str(part))
      except CorruptLine as error:
        logging.error('a line is passed over: %s', error)


class Tail:
  """Reads what is appended to a file, over its parts, complete lines only.

  Args:
    path: the file, which need not exist yet.
  """

  def __init__(self, path: pathlib.Path):
    self.path = path
    self._part = 0
    self._offset = self._lines = 0  # Of that part, which were read.

  def new_records(
    self, skip: Callable[[CorruptLine], None] | None = None
  ) -> list[dict]:
    """Returns records since the last call; none if there is no file yet.

    Args:
      skip: takes what is wrong with a line that is left out; None: it raises.

    Raises:
      CorruptLine: as for `read_jsonl`.
    """
    records: list[dict] = []
    while True:
      paths = parts(self.path)
      if self._part < len(paths):
        records += self._read(paths[self._part], skip)
      if self._part >= len(paths) - 1:
        return records
      self._part += 1
      self._offset = self._lines = 0

  def _read(self, path: pathlib.Path, skip) -> Iterator[dict]:
    with path.open('rb') as file:
      file.seek(self._offset)
      for line in file:
        if not line.endswith(b'\n'):
          return
        self._lines += 1
        try:
          yield _record(line[:-1], f'{path}:{self._lines}')
        except CorruptLine as error:
          if skip is None:
            raise
          skip(error)
        self._offset += len(line)


def cut_torn_line(path: pathlib.Path) -> None:
  """Drops what a killed process left after the last newline."""
  with path.open('rb') as file:
    end = whole = file.seek(0, os.SEEK_END)
    while whole:
      start = max(0, whole - BLOCK_BYTES)
      file.seek(start)
      newline = file.read(whole - start).rfind(b'\n')
      if newline >= 0:
        whole = start + newline + 1
        break
      whole = start
  if whole < end:
    os.truncate(path, whole)


def _lines_from_the_end(path: pathlib.Path) -> Iterator[bytes]:
  """Yields complete lines of one file; holds one block and line at a time."""
  with path.open('rb') as file:
    start = file.seek(0, os.SEEK_END)
    rest = b''  # The start of a line that began in an earlier block.
    torn = True  # What follows the last newline.
    while start:
      size = min(BLOCK_BYTES, start)
      start -= size
      file.seek(start)
      rest, *lines = (file.read(size) + rest).split(b'\n')
      for line in reversed(lines):
        if not torn:
          yield line
        torn = False
    if not torn:
      yield rest


def _record(line: bytes, where: str) -> dict:
  try:
    text = files.unseal(line)
    record = json.loads(line if text is None else text)
  except ValueError as error:
    raise CorruptLine(f'{where}: {error}') from None
  if not isinstance(record, dict):
    raise CorruptLine(f'{where}: {record!r}, expected an object')
  return record


def renewed(line: dict, data: Mapping) -> dict:
  """Returns an event log's line as it is written now.

  Args:
    line: of any version. Until 0.1.0 a position counted batches, and a
      learner's lines had steps alone.
    data: the section `data` of the run's configuration.
  """
  line = dict(line)
  if 'position' in line:
    line['rows'] = line.pop('position') * data['batch']
  if 'tokens' not in line and {'process', 'step'} <= line.keys():
    line['tokens'] = line['step'] * data['batch'] * data['seq_len']
  return line
