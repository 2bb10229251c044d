# SPDX-License-Identifier: Apache-2.0
"""Writes a lab run into its folder, in the format of real runs.

Times are simulated seconds since the run began, not since the epoch. A
learner's record is written once its next step is done: the evaluation of a
boundary is part of the record of the step before it.
"""

import json
import pathlib
import shutil
from collections.abc import Mapping

from diloco.config import RunConfig
from diloco.config_values import ConfigError
from diloco.lab.journal import Journal
from diloco.lab.trained import Point
from diloco.metrics import files, names
from diloco.metrics.workdir import Workdir, learner_name
from diloco.metrics.writer import (
  JsonlWriter,
  MultiWriter,
  TensorBoardWriter,
  Writer,
)


class Recording(Journal):
  """Writes into an empty folder, or over an earlier run of the lab.

  Args:
    folder: folder of the run.

  Raises:
    ConfigError: the folder holds a run of processes.
  """

  def __init__(self, folder: pathlib.Path, config: RunConfig):
    workdir = Workdir(folder)
    for other in (workdir.status, workdir.pids):
      if other.exists():
        raise ConfigError(
          [f'--workdir={folder}: holds a run of processes, see {other.name}']
        )
    for old in (workdir.tape, workdir.events):
      old.unlink(missing_ok=True)
    for old in (folder / 'metrics', folder / 'tensorboard'):
      shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(workdir.config, config)
    self._workdir = workdir
    self._every = config.run.log_every_steps
    self._writers: dict[int, Writer] = {}
    # The last step of each learner: its number and scalars.
    self._last: dict[int, tuple[int, dict[str, float]]] = {}
    self._newest: int | None = None  # The learner with the latest step.
    self._tape = workdir.tape.open('w')
    self._events = workdir.events.open('w')

  def happened(self, at_s: float, process: str, event: str, detail: str = ''):
    _write(
      self._events,
      {
        names.TIME: at_s,
        'process': process,
        'event': event,
        'detail': detail,
      },
    )

  def stepped(self, learner: int, step: int, scalars: Mapping[str, float]):
    self._write_last(learner)
    self._last[learner] = step, dict(scalars)
    self._newest = learner

  def decided(self, at_s: float, kind: str, fields: Mapping):
    _write(self._tape, {names.TIME: at_s, 'kind': kind, **fields})

  def evaluated(self, point: Point):
    if self._newest is not None:
      self._last[self._newest][1][names.EVAL_LOSS] = point.loss

  def close(self):
    for learner in sorted(self._last):
      self._write_last(learner, always=True)
    for writer in self._writers.values():
      writer.close()
    self._tape.close()
    self._events.close()

  def _write_last(self, learner: int, always: bool = False):
    step, scalars = self._last.get(learner, (0, {}))
    if scalars and (
      always or step % self._every == 0 or names.EVAL_LOSS in scalars
    ):
      self._writer(learner).write_scalars(step, scalars)

  def _writer(self, learner: int) -> Writer:
    if learner not in self._writers:
      name = learner_name(learner)
      self._writers[learner] = MultiWriter(
        [
          JsonlWriter(self._workdir.metrics(name)),
          TensorBoardWriter(self._workdir.tensorboard(name)),
        ]
      )
    return self._writers[learner]


def _write(file, line: Mapping):
  file.write(json.dumps(line) + '\n')
  file.flush()
