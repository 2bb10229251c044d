# SPDX-License-Identifier: Apache-2.0
"""Writes scalars: JSONL as the record, TensorBoard as a view of it."""

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from absl import logging

from diloco.metrics import figures, names
from diloco.metrics.jsonl import JsonLines, read_jsonl
from diloco.metrics.workdir import Workdir

PREFIX = 'diloco:'  # Prefix of the paths that tensorboardX asks to open.
FLUSH_EVERY_S = 3  # A killed process loses no more than its last seconds.
# What TensorBoard shows of a run next to its configuration.
COMPARED = (
  names.EVAL_LOSS,
  names.TRAIN_LOSS,
  *(each.curve for each in figures.shown(figures.RUN, figures.COMPARED)),
)
UNWRITTEN_BYTES_MAX = 1 << 20


class Writer(Protocol):
  """Takes the scalars of a step; one thread at a time."""

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """Writes scalars, which include `names.TIME` if the reader needs a time."""

  def flush(self) -> None:
    """Makes what was written visible to readers."""

  def close(self) -> None:
    """Flushes; nothing is written afterwards."""


class JsonlWriter:
  """Writes one JSON object a line, appended, so that a restart continues it."""

  def __init__(self, path: pathlib.Path):
    self._lines = JsonLines(path)

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    record = {'step': int(step)}
    record |= {name: float(value) for name, value in scalars.items()}
    self._lines.append(json.dumps(record).encode())

  def flush(self) -> None:
    pass  # Every line is written at once.

  def close(self) -> None:
    self._lines.close()


class TensorBoardWriter:
  """An event file for TensorBoard; `names.TIME` becomes its wall time.

  It is there at once, and each process has its own: TensorBoard reads all files
  of a folder, one life of a learner after the other.

  Cards are for people: an incarnation, which no f32 holds, has none.

  Args:
    hparams: flat key -> value, by which TensorBoard compares runs.
  """

  def __init__(
    self, folder: pathlib.Path, hparams: Mapping[str, object] | None = None
  ):
    # Not at the top: the launcher reads JSONL and never writes event files.
    import tensorboardX
    from tensorboardX import record_writer, summary

    record_writer.REGISTERED_FACTORIES.setdefault(
      PREFIX.rstrip(':'), _EventFiles()
    )
    self._summary = tensorboardX.SummaryWriter(
      PREFIX + str(folder.absolute()),
      flush_secs=FLUSH_EVERY_S,
      # The rest of the name has only seconds and the host.
      filename_suffix=f'.{os.getpid()}',
    )
    if hparams:
      plain = {
        key: value if isinstance(value, bool | int | float) else str(value)
        for key, value in hparams.items()
      }
      columns = dict.fromkeys(COMPARED)
      for each in summary.hparams(plain, columns)[:2]:  # The third is an end.
        self._summary.file_writer.add_summary(each)
    self._summary.flush()

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    time_s = scalars.get(names.TIME)
    for name, value in scalars.items():
      if name not in (names.TIME, names.INCARNATION):
        card = names.BOARD_STEP if name == names.GLOBAL_STEP else name
        self._summary.add_scalar(card, float(value), int(step), time_s)

  def flush(self) -> None:
    self._summary.flush()

  def close(self) -> None:
    self._summary.close()


class MultiWriter:
  """Passes everything to each of several writers, in order."""

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


# What each process writes besides the record, of which it can be made again, by
# its folder in the run's. It takes a path there, and the flat configuration.
VIEWS: dict[str, Callable[[pathlib.Path, Mapping[str, object]], Writer]] = {
  'tensorboard': TensorBoardWriter
}


def open_views(
  workdir: Workdir, process: str, hparams: Mapping[str, object]
) -> MultiWriter:
  """Opens all views of a process's scalars."""
  return MultiWriter(
    [
      make(workdir.root / folder / process, hparams)
      for folder, make in VIEWS.items()
    ]
  )


def process_writer(
  workdir: Workdir,
  process: str,
  hparams: Mapping[str, object],
  *more: Writer,
  views_anew: bool = False,
) -> MultiWriter:
  """Opens what a process writes its scalars to: the record, views, and `more`.

  Args:
    views_anew: the views are empty, and get what is recorded already.
  """
  path, views = workdir.metrics(process), open_views(workdir, process, hparams)
  for line in read_jsonl(path) if views_anew else ():
    views.write_scalars(line.pop('step'), line)
  return MultiWriter([JsonlWriter(path), views, *more])


class _EventFiles:
  """Opens tensorboardX's files such that errors do not end its thread.

  Otherwise its queue would fill and hold up the training.
  """

  def open(self, path: str) -> '_EventFile':
    return _EventFile(path.removeprefix(PREFIX))

  def directory_check(self, path: str) -> None:
    with contextlib.suppress(OSError):  # Opening the file will report it.
      os.makedirs(path.removeprefix(PREFIX), exist_ok=True)


class _EventFile:
  """Writes whole records at each flush; a full disk is not fatal."""

  def __init__(self, path: str):
    self._path = path
    self._unwritten = b''
    self._bytes = 0  # Size of the complete records in the file.
    self._failed = False

  def write(self, data: bytes) -> None:
    self._unwritten += data

  def flush(self) -> None:
    if not self._unwritten:
      return
    try:
      self._write_out()
      self._failed = False
    except OSError as error:
      if not self._failed:
        logging.error('%s waits for the disk: %s', self._path, error)
      self._failed = True
      if len(self._unwritten) > UNWRITTEN_BYTES_MAX:
        logging.error('%s: %d bytes lost', self._path, len(self._unwritten))
        self._unwritten = b''

  def close(self) -> None:
    self.flush()

  def _write_out(self):
    descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
      os.lseek(descriptor, self._bytes, os.SEEK_SET)
      left = self._unwritten
      while left:
        left = left[os.write(descriptor, left) :]
      self._bytes += len(self._unwritten)
      self._unwritten = b''
    except OSError:
      os.ftruncate(descriptor, self._bytes)
      raise
    finally:
      os.close(descriptor)
