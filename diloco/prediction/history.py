# SPDX-License-Identifier: Apache-2.0
"""Reads the history of a real run from its folder: lives, steps, closes."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

from diloco.config import run_config
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics import goodput as metrics_goodput
from diloco.metrics import names
from diloco.metrics.goodput import StepRecord, Work
from diloco.metrics.workdir import Workdir, learner_name
from diloco.metrics.writer import CorruptLine, read_jsonl

SYNCER = 'syncer'
# What every line of a file has.
EVENT = (names.TIME, 'process', 'event', 'detail')
LINE = (names.TIME, 'kind')
STEP = (names.TIME, 'step', names.STEP_TIME, names.STALL_TIME)


class NotPredictable(Exception):
  """A folder is no run, or not one that can be replayed; says why."""


@dataclasses.dataclass(frozen=True)
class Life:
  """One process, from its start to its death; seconds as in `History`.

  Attributes:
    process: 'syncer', 'learner-0', …
    started_s: by the launcher.
    spoke_s: when it first appears on the syncer's tape: a learner's hello, a
      syncer's first line; None: never.
    stepped_s: start of a learner's first inner step; None: it made none.
    ended_s: when it was killed, or when the launcher noticed its end; inf: it
      was still running.
    death: how it died; '' if it left in good order or runs on.
  """

  process: str
  started_s: float
  spoke_s: float | None
  stepped_s: float | None
  ended_s: float
  death: str


@dataclasses.dataclass(frozen=True)
class Close:
  """A round that closed."""

  at_s: float
  sync_s: float  # From the first pull to the update.
  merged: tuple[int, ...]  # Learner ids.


@dataclasses.dataclass(frozen=True)
class History:
  """The history of a run; seconds since its first learner was ready.

  Attributes:
    config: the run's configuration.
    until_s: its end: of the last inner step, or when the launcher began to stop
      it.
    lives: of each process in the order of time; the syncer's and, for all M
      learners, `learner_name`'s.
    steps: inner steps of all learners, in the order of time.
    closes: rounds in order; not those after `until_s`.
    work: the learners' work from the tape; None: the tape has none.
    last_s: time of the tape's last line, since the epoch.
  """

  config: RunConfig
  until_s: float
  lives: Mapping[str, tuple[Life, ...]]
  steps: tuple[StepRecord, ...]
  closes: tuple[Close, ...]
  work: Work | None
  last_s: float

  @property
  def learners(self) -> range:
    return range(self.config.protocol.learners)

  @property
  def goodput(self) -> float | None:
    """Goodput from the tape; None for older runs without such lines."""
    return self.work.goodput(self.last_s) if self.work else None

  @property
  def uptime(self) -> float:
    return metrics_goodput.uptime(self.steps, 0.0, self.until_s)

  def participation(self, learner: int) -> float:
    """Share of the closed rounds that merged it."""
    merged = sum(learner in close.merged for close in self.closes)
    return merged / max(1, len(self.closes))

  def deaths(self) -> tuple[Life, ...]:
    """Lives that ended in a death within the run, in the order of time."""
    dead = [
      life
      for lives in self.lives.values()
      for life in lives
      if life.death and life.ended_s < self.until_s
    ]
    return tuple(sorted(dead, key=lambda life: life.ended_s))


def read(folder: pathlib.Path) -> History:
  """The run in `folder`, finished or not.

  Raises:
    NotPredictable: there is no run; a file is missing or broken; the run was
      paused, or stopped and continued.
  """
  workdir = Workdir(pathlib.Path(folder))
  config = _config(workdir)
  events = _records(workdir.events, EVENT, 'was it started by launch.local?')
  tape = _records(workdir.tape, LINE, 'no syncer got as far as that')
  ready = [line['time_s'] for line in tape if line['kind'] == 'ready']
  if not ready:
    raise NotPredictable(f'{workdir.tape}: no learner was ever ready')
  begin_s = min(ready)
  lives = _lives(workdir, config, events, begin_s)
  steps = _all_steps(workdir, config, lives, begin_s)
  if not steps:
    raise NotPredictable(f'{workdir.root}: no inner step was made')
  stopped_s = [e['time_s'] for e in events if e['event'] == 'stopped']
  finished = any(line['kind'] == 'End' for line in tape)
  until_s = steps[-1].end_s
  if stopped_s and not finished:
    until_s = min(stopped_s) - begin_s
  closes = (_close(line, begin_s) for line in tape if line['kind'] == 'Publish')
  return History(
    config=config,
    until_s=until_s,
    lives=_spoken(lives, tape, steps, begin_s),
    steps=steps,
    closes=tuple(close for close in closes if close.at_s <= until_s),
    work=_work(workdir, config, tape),
    last_s=max(line['time_s'] for line in tape),
  )


def _work(
  workdir: Workdir, config: RunConfig, tape: Sequence[dict]
) -> Work | None:
  try:
    return metrics_goodput.work_of_tape(
      reversed(tape), config.protocol.learners
    )
  except ValueError as error:
    raise NotPredictable(f'{workdir.tape}: {error}') from None


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


def _records(
  path: pathlib.Path, keys: Sequence[str], otherwise: str
) -> list[dict]:
  """Whole lines of a file that must be there, each with these keys."""
  if not path.exists():
    raise NotPredictable(f'{path}: is missing; {otherwise}')
  try:
    records = read_jsonl(path)
  except CorruptLine as error:
    raise NotPredictable(str(error)) from None
  for number, record in enumerate(records, start=1):
    if missing := [key for key in keys if key not in record]:
      raise NotPredictable(f'{path}:{number}: has no {", ".join(missing)}')
  return records


def _close(line: dict, begin_s: float) -> Close:
  return Close(
    at_s=line['time_s'] - begin_s,
    sync_s=line['sync_s'],
    merged=tuple(share['learner'] for share in line['shares']),
  )


# Lives ------------------------------------------------------------------------


def _lives(
  workdir: Workdir, config: RunConfig, events: Sequence[dict], begin_s: float
) -> dict[str, list[Life]]:
  """Returns lives from the launcher's events, without `spoke_s`,
  `stepped_s`.
  """
  learners = range(config.protocol.learners)
  lives: dict[str, list[Life]] = {
    name: [] for name in (SYNCER, *map(learner_name, learners))
  }
  for number, event in enumerate(events, start=1):
    where = f'{workdir.events}:{number}'
    if event['process'] not in lives:
      continue  # The evaluation.
    of_process, at_s = lives[event['process']], event['time_s'] - begin_s
    match event['event']:
      case 'started':
        if event['detail'] == 'start 1' and of_process:
          raise NotPredictable(
            f'{where}: the run was stopped and continued; only one that ran '
            'in one go can be replayed'
          )
        life = Life(
          event['process'], at_s, None, None, ended_s=float('inf'), death=''
        )
        of_process.append(life)
      case 'killed' | 'exited' | 'stopped':
        of_process[-1] = ended(of_process[-1], event, at_s)
      case 'paused' | 'went on':
        raise NotPredictable(
          f'{where}: {event["process"]} was {event["event"]!r}; a stopped '
          'process can not be replayed'
        )
      case unknown:
        raise NotPredictable(f'{where}: unknown event {unknown!r}')
  if missing := [name for name, of_process in lives.items() if not of_process]:
    raise NotPredictable(
      f'{workdir.events}: {", ".join(missing)} never started'
    )
  return lives


def ended(life: Life, event: Mapping, at_s: float) -> Life:
  """The first event of an end has its time; only 'exited' tells how it was."""
  ended_s = min(life.ended_s, at_s)
  match event['event'], event['detail']:
    case 'killed', reason:
      death = f'killed: {reason}'
    case 'exited', how if not life.death and life.ended_s == float('inf'):
      in_good_order = how.startswith('exited with code 0')
      death = '' if in_good_order else how
    case _:
      death = life.death  # Killed, or stopped by the launcher, before.
  return dataclasses.replace(life, ended_s=ended_s, death=death)


def _spoken(
  lives: Mapping[str, Sequence[Life]],
  tape: Sequence[dict],
  steps: Sequence[StepRecord],
  begin_s: float,
) -> dict[str, tuple[Life, ...]]:
  """Adds when each process was first heard of, and first stepped."""
  heard: dict[str, list[float]] = {name: [] for name in lives}
  for line in tape:
    at_s = line['time_s'] - begin_s
    heard[SYNCER].append(at_s)
    if line['kind'] == 'joined':
      name = learner_name(line['learner'])
      if name not in heard:
        raise NotPredictable(
          f'{name} joined, whom the launcher did not start; only the '
          "configuration's learners can be replayed"
        )
      heard[name].append(at_s)
  stepped: dict[str, list[float]] = {name: [] for name in lives}
  for step in steps:
    stepped[learner_name(step.learner)].append(step.end_s - step.step_s)
  return {
    name: tuple(
      dataclasses.replace(
        life,
        spoke_s=first(heard[name], life),
        stepped_s=first(stepped[name], life),
      )
      for life in of_process
    )
    for name, of_process in lives.items()
  }


def first(times_s: Sequence[float], life: Life) -> float | None:
  """The first of ascending times that lies within a life."""
  inside = (t for t in times_s if life.started_s <= t < life.ended_s)
  return next(inside, None)


# Inner steps ------------------------------------------------------------------


def _all_steps(
  workdir: Workdir,
  config: RunConfig,
  lives: Mapping[str, Sequence[Life]],
  begin_s: float,
) -> tuple[StepRecord, ...]:
  found = []
  for learner in range(config.protocol.learners):
    name = learner_name(learner)
    path = workdir.metrics(name)
    records = _records(path, STEP, 'it never stepped') if path.exists() else []
    for life in lives[name]:
      found += _steps_of(learner, life, path, records, begin_s)
  return tuple(sorted(found, key=lambda step: step.end_s))


def _steps_of(
  learner: int,
  life: Life,
  path: pathlib.Path,
  records: Sequence[dict],
  begin_s: float,
) -> list[StepRecord]:
  """Returns the steps of one process; if not all were written, means.

  A record then stands for all steps since the one before, its stall for theirs;
  what a process did after its last record is lost.
  """
  steps, before = [], None
  for number, record in enumerate(records, start=1):
    end_s = record[names.TIME] - begin_s
    if not life.started_s <= end_s < life.ended_s:
      continue
    try:
      steps += steps_of_record(learner, record, end_s, before)
    except ValueError as error:
      raise NotPredictable(f'{path}:{number}: {error}') from None
    before = record['step'], end_s
  return steps


def steps_of_record(
  learner: int,
  record: Mapping,
  end_s: float,
  before: tuple[int, float] | None,
) -> list[StepRecord]:
  """Returns all steps that a process made since the record before.

  Args:
    record: a record of its metrics.
    end_s: when the last of them ended.
    before: step and end of the record before; None: this is the first.

  Raises:
    ValueError: the record before is not of an earlier step.
  """
  many = record['step'] - before[0] if before else 1
  if many < 1:
    raise ValueError(f'step {record["step"]} again')
  step_s, stall_s = record[names.STEP_TIME], record[names.STALL_TIME]
  mean_s = step_s if many == 1 else (end_s - before[1]) / many
  return [
    StepRecord(learner, end_s - later * mean_s, mean_s, min(stall_s, mean_s))
    for later in reversed(range(many))
  ]
