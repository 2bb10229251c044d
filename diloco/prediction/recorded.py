# SPDX-License-Identifier: Apache-2.0
"""Reads a run that can be predicted, and measures how fast it was."""

import bisect
import dataclasses
import itertools
import json
import pathlib
import statistics
from collections.abc import Iterable, Sequence

from diloco.config import run_config
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.faults import Fault
from diloco.metrics import recorded_run
from diloco.metrics.jsonl import parts
from diloco.metrics.recorded_run import SYNCER, Life, NoReport, RecordedRun
from diloco.metrics.workdir import Workdir, learner_name

CALM_STEPS_MIN = 100  # Of every learner before the first death.
SYNCER_START_S = 3.0  # Where it never came back.
FIRST_STEPS = 2  # Of a learner, which wait for what is compiled.


class NotPredictable(Exception):
  """A folder is no run, or not one that can be predicted; says why."""


def read(folder: pathlib.Path) -> RecordedRun:
  """Returns the run in `folder`, finished or not; whole, and made in one go.

  Its end is that of the last inner step, or when the launcher began to stop it.

  Raises:
    NotPredictable: there is no run; a file is missing or broken; the run was
      paused, or stopped and continued.
  """
  workdir = Workdir(pathlib.Path(folder))
  config_of(workdir)
  try:
    run = recorded_run.read(workdir.root)
  except NoReport as error:
    raise NotPredictable(str(error)) from None
  for path, why in (
    (workdir.events, 'was it started by launch.local?'),
    (workdir.tape, 'no syncer got as far as that'),
  ):
    if not parts(path):
      raise NotPredictable(f'{path}: is missing; {why}')
  if run.problem:
    raise NotPredictable(run.problem)
  if 'ready' not in run.records:
    raise NotPredictable(f'{workdir.tape}: no learner was ever ready')
  if why := _why_not(run):
    raise NotPredictable(f'{workdir.events}: {why}')
  steps = tuple(
    step
    for step in run.steps
    if any(
      life.started_s <= step.end_s < life.ended_s
      for life in run.lives[learner_name(step.learner)]
    )
  )
  if not steps:
    raise NotPredictable(f'{workdir.root}: no inner step was made')
  stops = run.stopped_s is not None and not run.ended
  until_s = run.stopped_s if stops else steps[-1].end_s
  return dataclasses.replace(
    run,
    steps=steps,
    rounds=tuple(each for each in run.rounds if each.at_s <= until_s),
    until_s=until_s,
  )


def config_of(workdir: Workdir) -> RunConfig:
  """Returns the configuration of a run; raises `NotPredictable`."""
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


def _why_not(run: RecordedRun) -> str:
  """Returns why a run's events can't be simulated; '': they can."""
  names = SYNCER, *map(learner_name, run.learners)
  if missing := [name for name in names if not run.lives.get(name)]:
    return f'{", ".join(missing)} never started'
  if any(life.start == 'start 1' for n in names for life in run.lives[n][1:]):
    return (
      'the run was stopped and continued; only one that ran in one go can be '
      'replayed'
    )
  for process, begin_s, _ in run.pauses:
    return (
      f"{process} was 'paused' at {begin_s:.1f} s; a stopped process can not "
      'be replayed'
    )
  for name in sorted(run.joined - set(names)):
    return (
      f'{name} joined, whom the launcher did not start; only the '
      "configuration's learners can be replayed"
    )
  return ''


def kills(run: RecordedRun) -> tuple[Fault, ...]:
  """Returns the deaths within a run as faults, and nothing else of it."""
  deaths = (life for life in run.deaths() if life.ended_s < run.until_s)
  return tuple(
    Fault(number, life.ended_s, 'kill', life.process)
    for number, life in enumerate(deaths, start=1)
  )


def arrivals(run: RecordedRun) -> tuple[float | None, ...]:
  """Returns when each learner's first process stepped; None: it never did."""
  return tuple(run.lives[learner_name(m)][0].stepped_s for m in run.learners)


@dataclasses.dataclass(frozen=True)
class Speeds:
  """The speeds of a run's processes, in seconds.

  Attributes:
    step_s: mean length of an inner step, by learner.
    jitter: standard deviation of a step's length as a share of its mean,
      averaged over learners.
    stall_share: share of a step spent at its boundary (`names.STALL_TIME`).
    sync_s: median time from a round's first pull to its update.
    where: where steps, stalls and syncs were measured.
    learner_starts_s: from a learner's start by the launcher to its first inner
      step, with a syncer there all the time; of each return, or of the first
      starts where none returned so.
    syncer_starts_s: from the syncer's start to its first line in the event log,
      of each return; at its first start it waits for learners.
    leave_s: from SIGTERM to the end of a learner's process; 0: none left.
    first_reform_s: from the last step with some of a learner's slices to the
      begin of the first with others, the first time, when programs are
      compiled; median; 0: none was lost.
    reform_s: the same, every other time.
  """

  step_s: tuple[float, ...]
  jitter: float
  stall_share: float
  sync_s: float
  where: str
  learner_starts_s: tuple[float, ...]
  syncer_starts_s: tuple[float, ...]
  leave_s: float = 0.0
  first_reform_s: float = 0.0
  reform_s: float = 0.0


def measure(
  run: RecordedRun,
  restart_delay_s: float,
  calm_s: tuple[float, float] | None = None,
) -> Speeds:
  """Measures a run.

  Args:
    restart_delay_s: from a death to the next start.
    calm_s: begin and end of the time in which steps and syncs are measured;
      None: what is before the first death, if that suffices.

  Raises:
    NotPredictable: every start was disturbed, or there is no step to measure.
  """
  if calm_s is None:
    ended_s = min((d.ended_s for d in run.deaths()), default=run.until_s)
    calm_s = 0.0, ended_s
    where = f'the {ended_s:.1f} s before the first death'
    if min(map(len, _steps(run, calm_s))) < CALM_STEPS_MIN:
      where = f'the whole run, {where} being too short'
      calm_s = 0.0, run.until_s
  else:
    where = f'{calm_s[1] - calm_s[0]:.1f} s of calm'
  steps = _steps(run, calm_s)
  for learner, count in zip(run.learners, steps):
    if not count:
      raise NotPredictable(
        f'learner {learner} made no step after its first: too short a run'
      )
  lengths = [[step.step_s for step in each] for each in steps]
  stalls_s = sum(
    min(step.stall_s, step.step_s) for each in steps for step in each
  )
  syncs_s = [
    c.sync_s for c in run.rounds if calm_s[0] <= c.at_s < calm_s[1]
  ] or [c.sync_s for c in run.rounds]
  learners = [_whole_starts(run, m) for m in run.learners]
  outages = list(_outages(run.lives[SYNCER]))
  starts_s = _starts((x for own in learners for x in own[1:]), outages)
  starts_s = starts_s or _starts((own[0] for own in learners), outages)
  if not starts_s:
    raise NotPredictable('every start of a learner was disturbed by a death')
  return Speeds(
    step_s=tuple(statistics.fmean(each) for each in lengths),
    jitter=statistics.fmean(
      statistics.pstdev(each) / statistics.fmean(each) for each in lengths
    ),
    stall_share=stalls_s / sum(map(sum, lengths)),
    sync_s=statistics.median(syncs_s),
    where=where,
    learner_starts_s=starts_s,
    syncer_starts_s=_starts(run.lives[SYNCER][1:]) or (SYNCER_START_S,),
    leave_s=_leave_s(learners, restart_delay_s),
    **_reforms_s(run),
  )


def _whole_starts(run: RecordedRun, learner: int) -> list[Life]:
  """Returns a learner's lives, but for those of slices that went on."""
  times_s = [at_s for at_s, which in run.reformed if which == learner]
  return [
    life
    for life in run.lives[learner_name(learner)]
    if not any(life.started_s <= at_s < life.ended_s for at_s in times_s)
  ]


def _steps(run: RecordedRun, calm_s: tuple[float, float]) -> list[list]:
  """Returns the steps of each learner within a time, but for its first ones.

  A learner that has none then gives an empty list.
  """
  steps: list[list] = [[] for _ in run.learners]
  for step in run.steps:
    if step.end_s < calm_s[1]:
      steps[step.learner].append(step)
  return [
    [step for step in each[FIRST_STEPS:] if step.end_s >= calm_s[0]]
    for each in steps
  ]


def _starts(
  lives: Iterable[Life], outages: Sequence[tuple[float, float]] = ()
) -> tuple[float, ...]:
  """Returns how long the starts took that the syncer was there for."""
  return tuple(
    life.used_s - life.started_s
    for life in lives
    if life.used_s is not None
    and not any(a < life.used_s and life.started_s < b for a, b in outages)
  )


def _outages(lives: Sequence[Life]) -> Iterable[tuple[float, float]]:
  """Yields when there was no syncer to talk to."""
  for dead, back in itertools.pairwise(lives):
    spoke_s = float('inf') if back.spoke_s is None else back.spoke_s
    yield dead.ended_s, spoke_s


def _reforms_s(run: RecordedRun) -> dict[str, float]:
  """Returns the pauses of learners that went on with other slices."""
  first_s, later_s = [], []
  for learner in run.learners:
    steps = [step for step in run.steps if step.learner == learner]
    ends_s = [step.end_s for step in steps]
    times_s = (at_s for at_s, which in run.reformed if which == learner)
    gaps = sorted({bisect.bisect(ends_s, at_s) for at_s in times_s})
    pauses_s = [
      max(0.0, steps[i].end_s - steps[i].step_s - ends_s[i - 1])
      for i in gaps
      if 0 < i < len(steps)
    ]
    first_s += pauses_s[:1]
    later_s += pauses_s[1:]
  if not first_s:
    return {}
  return {
    'first_reform_s': statistics.median(first_s),
    'reform_s': statistics.median(later_s or first_s),
  }


def _leave_s(lives: Sequence[Sequence[Life]], restart_delay_s: float) -> float:
  """Returns the median time in which learners that came back had left."""
  took_s = [
    max(0.0, back.started_s - left.ended_s - restart_delay_s)
    for own in lives
    for left, back in itertools.pairwise(own)
    if not left.death
  ]
  return statistics.median(took_s) if took_s else 0.0
