# SPDX-License-Identifier: Apache-2.0
"""Writes scalars: JSONL as the truth, TensorBoard as a view of it."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from diloco.metrics import names


class Writer(Protocol):
  """Takes the scalars of a step; one thread at a time."""

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """`scalars` hold `names.TIME` where the reader needs a time."""

  def flush(self) -> None:
    """What was written can be read by others afterwards."""

  def close(self) -> None:
    """Flushes; nothing is written afterwards."""


class JsonlWriter:
  """One JSON object a line, appended, so a restarted process goes on.

  A line reaches the file in one write, so that a killed process tears at most
  the last one; the next process cuts what is torn. One writer at a time.
  """

  def __init__(self, path: pathlib.Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = path.open('ab', buffering=0)
    cut_torn_line(path)

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    record = {'step': int(step)}
    record |= {name: float(value) for name, value in scalars.items()}
    self._file.write(json.dumps(record).encode() + b'\n')

  def flush(self) -> None:
    pass  # Every line is written at once.

  def close(self) -> None:
    self._file.close()


class TensorBoardWriter:
  """Event files for TensorBoard; `names.TIME` becomes their wall time."""

  def __init__(self, folder: pathlib.Path):
    # Here, since the launcher reads JSONL and never writes event files.
    import tensorboardX

    self._summary = tensorboardX.SummaryWriter(str(folder))

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    time_s = scalars.get(names.TIME)
    for name, value in scalars.items():
      if name != names.TIME:
        self._summary.add_scalar(name, float(value), int(step), time_s)

  def flush(self) -> None:
    self._summary.flush()

  def close(self) -> None:
    self._summary.close()


class MultiWriter:
  """Hands everything to each of several writers, in their order."""

  def __init__(self, writers: Sequence[Writer]):
    self._writers = tuple(writers)

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    for writer in self._writers:
      writer.write_scalars(step, scalars)

  def flush(self) -> None:
    for writer in self._writers:
      writer.flush()

  def close(self) -> None:
    for writer in self._writers:
      writer.close()


class CorruptLine(ValueError):
  """A whole line of a JSONL file is not a JSON object."""


def read_jsonl(path: pathlib.Path) -> list[dict]:
  """All records of a file; an empty list where there is none.

  A last line without its newline is left out: it is being written, or its
  process was killed while it wrote.

  Raises:
    CorruptLine: any other line is not a JSON object.
  """
  try:
    lines = path.read_bytes().split(b'\n')
  except FileNotFoundError:
    return []
  records = []
  for number, line in enumerate(lines[:-1], start=1):
    try:
      record = json.loads(line)
    except ValueError as error:
      raise CorruptLine(f'{path}:{number}: {error}') from None
    if not isinstance(record, dict):
      raise CorruptLine(f'{path}:{number}: {record!r}, expected an object')
    records.append(record)
  return records


def cut_torn_line(path: pathlib.Path) -> None:
  """Drops what a killed process left behind the last newline."""
  data = path.read_bytes()
  whole = data.rfind(b'\n') + 1
  if whole < len(data):
    os.truncate(path, whole)
