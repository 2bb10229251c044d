# SPDX-License-Identifier: Apache-2.0
"""The history of a run that can be replayed: whole, and made in one go."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping

from diloco.config import run_config
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics import goodput as metrics_goodput
from diloco.metrics import recorded_run, run_reader
from diloco.metrics.goodput import StepRecord
from diloco.metrics.recorded_run import (
  SYNCER,
  Life,
  NoReport,
  RecordedRound,
  RecordedRun,
)
from diloco.metrics.workdir import Workdir, learner_name


class NotPredictable(Exception):
  """A folder is no run, or not one that can be replayed; says why."""


@dataclasses.dataclass(frozen=True)
class History:
  """The history of a run; seconds since its first learner was ready.

  Attributes:
    until_s: its end: of the last inner step, or when the launcher began to stop
      it.
    lives: of each process in the order of time; the syncer's and, for all M
      learners, `learner_name`'s.
    steps: inner steps of all learners, in the order of time.
    closes: rounds in order; not those after `until_s`.
    goodput: from the tape; None: it has none.
  """

  config: RunConfig
  until_s: float
  lives: Mapping[str, tuple[Life, ...]]
  steps: tuple[StepRecord, ...]
  closes: tuple[RecordedRound, ...]
  goodput: float | None

  @property
  def learners(self) -> range:
    return range(self.config.protocol.learners)

  @property
  def uptime(self) -> float:
    return metrics_goodput.uptime(self.steps, 0.0, self.until_s)

  def participation(self, learner: int) -> float:
    """Share of the closed rounds that merged it."""
    merged = sum(
      any(share.learner == learner for share in close.shares)
      for close in self.closes
    )
    return merged / max(1, len(self.closes))

  def deaths(self) -> tuple[Life, ...]:
    """Lives that ended in a death within the run, in the order of time."""
    dead = recorded_run.deaths(self.lives)
    return tuple(life for life in dead if life.ended_s < self.until_s)


def read(folder: pathlib.Path) -> History:
  """The run in `folder`, finished or not.

  Raises:
    NotPredictable: there is no run; a file is missing or broken; the run was
      paused, or stopped and continued.
  """
  workdir = Workdir(pathlib.Path(folder))
  config = _config(workdir)
  try:
    run = run_reader.read(workdir.root, workdir.root.name)
  except NoReport as error:
    raise NotPredictable(str(error)) from None
  for path, why in (
    (workdir.events, 'was it started by launch.local?'),
    (workdir.tape, 'no syncer got as far as that'),
  ):
    if path.name in run.absent:
      raise NotPredictable(f'{path}: is missing; {why}')
  if run.gaps:
    raise NotPredictable(run.gaps[0])
  if 'ready' not in run.records:
    raise NotPredictable(f'{workdir.tape}: no learner was ever ready')
  lives = _lives(workdir, run)
  steps = tuple(
    step
    for step in run.steps
    if any(
      life.started_s <= step.end_s < life.ended_s
      for life in lives[learner_name(step.learner)]
    )
  )
  if not steps:
    raise NotPredictable(f'{workdir.root}: no inner step was made')
  until_s = steps[-1].end_s
  if run.stopped_s is not None and not run.ended:
    until_s = run.stopped_s
  return History(
    config=config,
    until_s=until_s,
    lives=lives,
    steps=steps,
    closes=tuple(each for each in run.rounds if each.at_s <= until_s),
    goodput=run.goodput,
  )


def _config(workdir: Workdir) -> RunConfig:
  if not workdir.root.is_dir():
    raise NotPredictable(f'{workdir.root}: is no folder')
  try:
    return run_config.restore(json.loads(workdir.config.read_text()))
  except FileNotFoundError:
    raise NotPredictable(
      f'{workdir.root}: holds no run, there is no config.json'
    ) from None
  except (ValueError, ConfigError) as error:
    raise NotPredictable(f'{workdir.config}: {error}') from None


def _lives(workdir: Workdir, run: RecordedRun) -> dict[str, tuple[Life, ...]]:
  """Returns the lives of syncer and learners, if they can be replayed."""
  processes = SYNCER, *map(learner_name, run.learners)
  lives = {name: run.lives.get(name, ()) for name in processes}
  if missing := [name for name, of_process in lives.items() if not of_process]:
    raise NotPredictable(
      f'{workdir.events}: {", ".join(missing)} never started'
    )
  if any(each.start == 'start 1' for of in lives.values() for each in of[1:]):
    raise NotPredictable(
      f'{workdir.events}: the run was stopped and continued; only one that ran '
      'in one go can be replayed'
    )
  for process, begin_s, _ in run.pauses:
    raise NotPredictable(
      f"{workdir.events}: {process} was 'paused' at {begin_s:.1f} s; a stopped "
      'process can not be replayed'
    )
  for name in sorted(run.joined - lives.keys()):
    raise NotPredictable(
      f'{name} joined, whom the launcher did not start; only the '
      "configuration's learners can be replayed"
    )
  return lives
