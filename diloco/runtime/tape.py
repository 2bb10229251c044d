# SPDX-License-Identifier: Apache-2.0
"""Writes the event tapes: decisions of the syncer, and actions of learners."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

from diloco.metrics import files, jsonl
from diloco.protocol import learner_io, syncer_io
from diloco.runtime import tape_lines


class Lines:
  """Appends lines to a tape, each sealed by a checksum."""

  def __init__(self, path: pathlib.Path):
    self._lines = jsonl.Lines(path)

  def append(self, said):
    """Appends an instance of one of the classes of `tape_lines`."""
    self.append_line(line_of(said))

  def append_line(self, line: dict):
    self._lines.append(files.seal(json.dumps(line).encode()))

  def close(self):
    self._lines.close()


def line_of(said) -> dict:
  """Returns the tape line of an instance of one of the classes of
  `tape_lines`.
  """
  return {
    'time_s': time.time(),
    'kind': type(said).__name__,
    **dataclasses.asdict(said),
  }


def closing_line(effect: syncer_io.Publish, crc: int) -> tape_lines.Publish:
  """Returns the tape line of a close; `crc` is the CRC of the resulting Θ_p."""
  fields = {
    field.name: getattr(effect, field.name)
    for field in dataclasses.fields(effect)
  }
  return tape_lines.Publish(**fields, crc=crc)


class Tape:
  """The syncer's tape."""

  def __init__(self, path: pathlib.Path):
    self._lines = Lines(path)
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
      self._lines.append_line(published)

  def start(self, started: tape_lines.Started):
    """Records what this process continues from.

    It is called at the start, or once Θ is complete.
    """
    self._lines.append(started)

  def newest_first(self) -> Iterator[dict]:
    """Yields its lines, newest first; unreadable ones are logged and
    skipped.
    """
    return jsonl.from_the_end(self._path)

  def tell_work(self, worked: tape_lines.Worked):
    """Records what the learners have made so far."""
    self._lines.append(worked)

  def write(self, effect: syncer_io.Effect, crcs: Sequence[int]) -> float:
    """Writes `effect` if it is a decision; the others follow from those.

    Args:
      effect: an effect that was performed.
      crcs: CRCs of the bytes of Θ now, by fragment.

    Returns:
      The time on its line, otherwise now; in seconds since the epoch.
    """
    match effect:
      case syncer_io.Publish():
        line = line_of(closing_line(effect, crcs[effect.fragment]))
      case (
        syncer_io.Greet()
        | syncer_io.Merge()
        | syncer_io.Record()
        | syncer_io.End()
      ):
        line = line_of(effect)
      case _:
        return time.time()
    self._lines.append_line(line)
    return line['time_s']

  def close(self):
    self._lines.close()


class LearnerTape:
  """One process's lines on the tape of its learner.

  The train loop itself writes them: a line of some 150 bytes takes 15 µs, 2 µs
  of them for the write, and it must be there before the offer that it explains.

  Args:
    path: path of the learner's tape.
    process: returns the process's number, see `protocol.incarnation`. It is
      called until training begins: the syncer, which may make the process take
      a newer number, has admitted it before its first line.
    machine: the hardware and software it runs on.
  """

  def __init__(
    self,
    path: pathlib.Path,
    process: Callable[[], int],
    machine: tape_lines.Machine,
  ):
    self._lines = Lines(path)
    self._ask_process = process
    self._process = 0  # 0: it has not begun.
    self._machine = machine
    self._expected = 0  # Progress of the next step, if nothing intervenes.

  def begin(self, step: int, position: int, source: tape_lines.Source):
    self._process = self._ask_process()
    self._lines.append(
      tape_lines.Begin(self._process, step, position, source, self._machine)
    )

  def snapshot(self, step: int, effect: learner_io.Snapshot):
    """Records a snapshot, before it is offered."""
    self._lines.append(
      tape_lines.Snapshot(
        self._process,
        step,
        effect.round,
        effect.fragment,
        effect.base_version,
        effect.handle,
      )
    )

  def apply(self, step: int, effect: learner_io.Apply, crc: int):
    self._lines.append(
      tape_lines.Apply(
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
      self._lines.append(tape_lines.Progress(self._process, step, progress))
    self._expected = progress + 1

  def save(self, step: int):
    self._lines.append(tape_lines.Save(self._process, step))

  def cease(self, step: int):
    self._lines.append(tape_lines.Cease(self._process, step))

  def leave(self, step: int, reason: str):
    """Records the end of a process that has begun."""
    if self._process:
      self._lines.append(tape_lines.Leave(self._process, step, reason))

  def close(self):
    self._lines.close()
