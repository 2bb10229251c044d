# SPDX-License-Identifier: Apache-2.0
"""Reads the event tapes of a run, line by line, every field checked."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping

from diloco.metrics import files
from diloco.metrics.jsonl import CorruptLine, parts, read_jsonl
from diloco.metrics.workdir import Workdir, learner_name
from diloco.runtime import tape_lines


@dataclasses.dataclass(frozen=True)
class Line:
  """One line of a tape."""

  number: int  # In its file, from 1.
  time_s: float  # Since the epoch.
  said: object  # An instance of one of the classes of `tape_lines`.


@dataclasses.dataclass(frozen=True)
class Tapes:
  """All tapes of a run.

  Attributes:
    workdir: the run's folder.
    syncer: the syncer's lines.
    learners: lines by learner id, of those that have a tape.
    torn: files whose last line is incomplete, and was left out.
  """

  workdir: Workdir
  syncer: tuple[Line, ...]
  learners: dict[int, tuple[Line, ...]]
  torn: tuple[pathlib.Path, ...]


def read_tapes(workdir: Workdir) -> Tapes:
  """Reads all tapes of a run.

  Raises:
    FileNotFoundError: the run has no tape.
    Malformed: a line is invalid; names file and line.
  """
  if not parts(workdir.tape):
    raise FileNotFoundError(f'no event tape at {workdir.tape}')
  learners = {}
  for path in sorted(workdir.tapes.glob('*.jsonl')):
    number = path.stem.rpartition('-')[2]
    if not number.isdecimal() or path.stem != learner_name(int(number)):
      raise files.Malformed(f"{path}: is no learner's, such as learner-0")
    learners[int(number)] = read_tape(path, tape_lines.LEARNER_KINDS)
  paths = [workdir.tape, *(workdir.learner_tape(m) for m in learners)]
  return Tapes(
    workdir,
    read_tape(workdir.tape, tape_lines.SYNCER_KINDS),
    learners,
    tuple(path for path in paths if _is_torn(path)),
  )


def read_tape(
  path: pathlib.Path, kinds: Mapping[str, type]
) -> tuple[Line, ...]:
  """Returns the complete lines of one tape; a torn last one is left out.

  Raises:
    Malformed: another line is not JSON, not of one of `kinds`, or has other
      fields than its kind; names file and line.
  """
  try:
    records = read_jsonl(path)
  except CorruptLine as error:
    raise files.Malformed(str(error)) from None
  return tuple(
    _line(f'{path}:{number}', number, record, kinds)
    for number, record in enumerate(records, start=1)
  )


def _line(
  where: str, number: int, record: dict, kinds: Mapping[str, type]
) -> Line:
  name = record.pop('kind', None)
  if _is_record(name, kinds):
    name, record = 'Record', {'kind': name, **record}
  if name not in kinds:
    raise files.Malformed(
      f'{where}: kind {name!r}, must be one of {", ".join(sorted(kinds))}'
    )
  try:
    time_s = files.as_type(record.pop('time_s', None), float, 'time_s')
    said = files.as_type(record, kinds[name], name)
  except ValueError as error:
    raise files.Malformed(f'{where}: {error}') from None
  return Line(number, time_s, said)


def _is_record(name, kinds: Mapping[str, type]) -> bool:
  """Returns True for a `Record`, whose own kind, as 'joined', is the line's."""
  return 'Record' in kinds and isinstance(name, str) and name.islower()


def _is_torn(path: pathlib.Path) -> bool:
  if not path.exists():
    return False  # It has been rotated, and holds complete lines.
  with path.open('rb') as file:
    if not file.seek(0, os.SEEK_END):
      return False
    file.seek(-1, os.SEEK_END)
    return file.read() != b'\n'
