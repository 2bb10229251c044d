# SPDX-License-Identifier: Apache-2.0
"""Writes and reads event tapes, of the syncer and of learners."""

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from diloco.metrics import files, jsonl
from diloco.metrics.jsonl import CorruptLine, parts, read_jsonl
from diloco.metrics.workdir import Workdir, learner_name
from diloco.protocol.learner import events as learner_events
from diloco.protocol.syncer import events as syncer_events
from diloco.run import tape_events


class SealedLines:
  """Appends lines to a tape, each sealed by a checksum."""

  def __init__(self, path: pathlib.Path):
    self._lines = jsonl.JsonLines(path)

  def append(self, said):
    """Appends an instance of one of the classes of `tape_events`."""
    self.append_line(line_of(said))

  def append_line(self, line: dict):
    self._lines.append(files.seal(json.dumps(line).encode()))

  def close(self):
    self._lines.close()


def line_of(said) -> dict:
  """Returns the tape line of an instance of one of the classes of
  `tape_events`.
  """
  return {
    'time_s': time.time(),
    'kind': tape_events.kind_of(said),
    **files.plain(said),
  }


def closing_line(
  effect: syncer_events.Publish, crc: int
) -> tape_events.Publish:
  """Returns the tape line of a close; `crc` is the CRC of the resulting Θ_p."""
  # Its fields alone: the instance also caches what was derived from them.
  said = {x.name: getattr(effect, x.name) for x in dataclasses.fields(effect)}
  return tape_events.Publish(**said, crc=crc)


class SyncerEventLog(SealedLines):
  """The syncer's tape."""

  def __init__(self, path: pathlib.Path):
    super().__init__(path)
    self._path = path

  def complete(self, published: dict):
    """Adds the last close, if its process died before it was on the tape.

    Args:
      published: its line, from the ledger.
    """
    rounds = (
      line['round']
      for line in jsonl.from_the_end(self._path)
      if line.get('kind') == published['kind']
    )
    if next(rounds, 0) < published['round']:
      self.append_line(published)

  def start(self, started: tape_events.Started):
    """Records what this process continues from.

    It is called at the start, or once Θ is complete.
    """
    self.append(started)

  def newest_first(self) -> Iterator[dict]:
    """Yields its lines, newest first; unreadable ones are logged and
    skipped.
    """
    return jsonl.from_the_end(self._path)

  def tell_work(self, worked: tape_events.Worked):
    """Records what the learners have made so far."""
    self.append(worked)

  def write(self, effect: syncer_events.Effect, crcs: Sequence[int]) -> float:
    """Writes `effect` if it is a decision; the others follow from those.

    Args:
      crcs: CRCs of the bytes of Θ now, by fragment.

    Returns:
      The time on its line, otherwise now; in seconds since the epoch.
    """
    match effect:
      case syncer_events.Publish():
        line = line_of(closing_line(effect, crcs[effect.fragment]))
      case (
        syncer_events.AdmitLearner()
        | syncer_events.Merge()
        | syncer_events.LogDecision()
        | syncer_events.End()
      ):
        line = line_of(effect)
      case _:
        return time.time()
    self.append_line(line)
    return line['time_s']


class LearnerEventLog(SealedLines):
  """One process's lines on the tape of its learner.

  The train loop itself writes them: a line of some 150 bytes takes 15 µs, 2 µs
  of them for the write, and it must be there before the offer that it explains.

  Args:
    process: returns the process's number, see `protocol.incarnation`. It is
      called until training begins: the syncer, which may make the process take
      a newer number, has admitted it before its first line.
  """

  def __init__(
    self,
    path: pathlib.Path,
    process: Callable[[], int],
    machine: tape_events.Machine,
  ):
    super().__init__(path)
    self._ask_process = process
    self._process = 0  # 0: it has not begun.
    self._machine = machine
    self._expected = 0  # Progress of the next step, if nothing intervenes.

  def begin(self, step: int, position: int, source: tape_events.Source):
    self._process = self._ask_process()
    self.append(
      tape_events.Begin(self._process, step, position, source, self._machine)
    )

  def snapshot(self, step: int, effect: learner_events.Snapshot):
    """Records a snapshot, before it is offered."""
    self.append(
      tape_events.Snapshot(
        **(effect.terms() | {'step': step}),
        process=self._process,
        handle=effect.handle,
      )
    )

  def apply(self, step: int, effect: learner_events.Apply, crc: int):
    self.append(
      tape_events.Apply(
        self._process or self._ask_process(),
        step,
        effect.fragment,
        effect.version,
        crc,
        effect.carry,
        effect.handle,
        effect.merged_tokens,
        effect.overwritten_tokens,
      )
    )

  def progress(self, step: int, progress: int):
    """Records the progress of a step, unless it follows from the last one."""
    if progress != self._expected:
      self.append(tape_events.Progress(self._process, step, progress))
    self._expected = progress + 1

  def save(self, step: int):
    self.append(tape_events.Save(self._process, step))

  def cease(self, step: int):
    self.append(tape_events.Cease(self._process, step))

  def leave(self, step: int, reason: str):
    """Records the end of a process that has begun."""
    if self._process:
      self.append(tape_events.Leave(self._process, step, reason))


@dataclasses.dataclass(frozen=True)
class LoggedEvent:
  """One line of a tape."""

  number: int  # In its file, from 1.
  time_s: float  # Since the epoch.
  said: object  # An instance of one of the classes of `tape_events`.


@dataclasses.dataclass(frozen=True)
class EventLogs:
  """All tapes of a run.

  Attributes:
    learners: lines by learner id, of those that have a tape.
    torn: files whose last line is incomplete, and was left out.
  """

  workdir: Workdir
  syncer: tuple[LoggedEvent, ...]
  learners: dict[int, tuple[LoggedEvent, ...]]
  torn: tuple[pathlib.Path, ...]


def read_tapes(workdir: Workdir) -> EventLogs:
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
      raise files.MalformedFile(f"{path}: is no learner's, such as learner-0")
    learners[int(number)] = read_tape(path, tape_events.LEARNER_KINDS)
  paths = [workdir.tape, *(workdir.learner_tape(m) for m in learners)]
  return EventLogs(
    workdir,
    read_tape(workdir.tape, tape_events.SYNCER_KINDS),
    learners,
    tuple(path for path in paths if _is_torn(path)),
  )


def read_tape(
  path: pathlib.Path, kinds: Mapping[str, type]
) -> tuple[LoggedEvent, ...]:
  """Returns the complete lines of one tape; a torn last one is left out.

  Raises:
    Malformed: another line is not JSON, not of one of `kinds`, or has other
      fields than its kind; names file and line.
  """
  try:
    records = read_jsonl(path)
  except CorruptLine as error:
    raise files.MalformedFile(str(error)) from None
  return tuple(
    _line(f'{path}:{number}', number, record, kinds)
    for number, record in enumerate(records, start=1)
  )


def _line(
  where: str, number: int, record: dict, kinds: Mapping[str, type]
) -> LoggedEvent:
  name = record.pop('kind', None)
  if _is_record(name, kinds):
    name, record = 'Record', {'kind': name, **record}
  if name not in kinds:
    raise files.MalformedFile(
      f'{where}: kind {name!r}, must be one of {", ".join(sorted(kinds))}'
    )
  try:
    time_s = files.as_type(record.pop('time_s', None), float, 'time_s')
    said = files.as_type(record, kinds[name], name)
  except ValueError as error:
    raise files.MalformedFile(f'{where}: {error}') from None
  return LoggedEvent(number, time_s, said)


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
