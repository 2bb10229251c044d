# SPDX-License-Identifier: Apache-2.0
"""What a prediction takes from a measured run besides who was killed when."""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence

from diloco.metrics.goodput import StepRecord
from diloco.metrics.workdir import learner_name
from diloco.studies.run_history import SYNCER, History, Life

CALM_STEPS_MIN = 20  # Of every learner before the first death.


@dataclasses.dataclass(frozen=True)
class Measured:
  """Some values, and where they were measured."""

  values: tuple[float, ...]
  where: str

  @property
  def mean(self) -> float:
    return statistics.fmean(self.values)


@dataclasses.dataclass(frozen=True)
class Calibration:
  """How fast the machines of a run are, in seconds.

  Attributes:
    step_s: mean length of an inner step, by learner.
    jitter: standard deviation of a step's length as a share of its mean, the
      mean of the learners'.
    stall_share: of a step, spent at its boundary (`names.STALL_TIME`).
    sync_s: median time from a round's first pull to its update.
    where: steps, stalls and syncs were measured.
    learner_start_s: from a learner's start by the launcher to its first inner
      step, with a syncer there all the time.
    syncer_start_s: from the syncer's start to its first word on the tape.
  """

  step_s: tuple[float, ...]
  jitter: float
  stall_share: float
  sync_s: float
  where: str
  learner_start_s: Measured
  syncer_start_s: Measured


def calibrate(history: History, returns_max: int | None = None) -> Calibration:
  """Measures a run.

  Args:
    history: of the run itself, or of another one of the same machines.
    returns_max: how many returns of a role may be looked at. A run whose own
      down times are predicted gives 1: what is predicted must not be known.
      Another run may give all of them, None.
  """
  calm_s = min((d.ended_s for d in history.deaths()), default=history.until_s)
  where = f'before the first death, {calm_s:.1f} s'
  steps = _by_learner(history, calm_s)
  if min(map(len, steps)) < CALM_STEPS_MIN:
    where = f'in the whole run: too few steps {where}'
    calm_s = history.until_s
    steps = _by_learner(history, calm_s)
  lengths = [[step.step_s for step in each] for each in steps]
  all_s = sum(map(sum, lengths))
  syncs = [c.sync_s for c in history.closes if c.at_s < calm_s]
  return Calibration(
    step_s=tuple(statistics.fmean(each) for each in lengths),
    jitter=statistics.fmean(
      statistics.pstdev(each) / statistics.fmean(each) for each in lengths
    ),
    stall_share=sum(step.stall_s for each in steps for step in each) / all_s,
    sync_s=statistics.median(syncs or [c.sync_s for c in history.closes]),
    where=where,
    learner_start_s=_learner_start(history, returns_max),
    syncer_start_s=_syncer_start(history, returns_max),
  )


def _by_learner(history: History, until_s: float) -> list[list[StepRecord]]:
  """All but each learner's first steps, which wait for what is compiled.

  A learner that has none before `until_s` gives an empty list.
  """
  found: list[list[StepRecord]] = [[] for _ in history.learners]
  for step in history.steps:
    if step.end_s < until_s:
      found[step.learner].append(step)
  return [each[2:] for each in found]


def _learner_start(history: History, returns_max: int | None) -> Measured:
  lives = [history.lives[learner_name(m)] for m in history.learners]
  first = [each[0] for each in lives]
  returns = sorted(
    (life for each in lives for life in each[1:]),
    key=lambda life: life.started_s,
  )
  outages = _outages(history.lives[SYNCER])
  return _measure(
    [
      life.stepped_s - life.started_s
      for life in returns
      if life.stepped_s is not None
      and not any(
        begin_s < life.stepped_s and life.started_s < end_s
        for begin_s, end_s in outages
      )
    ],
    [
      life.stepped_s - life.started_s
      for life in first
      if life.stepped_s is not None
    ],
    returns_max,
    'of a learner',
  )


def _syncer_start(history: History, returns_max: int | None) -> Measured:
  def of(lives: Iterable[Life]) -> list[float]:
    return [
      life.spoke_s - life.started_s
      for life in lives
      if life.spoke_s is not None
    ]

  lives = history.lives[SYNCER]
  return _measure(of(lives[1:]), of(lives[:1]), returns_max, 'of the syncer')


def _measure(
  returns: Sequence[float],
  first: Sequence[float],
  returns_max: int | None,
  whose: str,
) -> Measured:
  if not returns:
    where = f'first start {whose}; none came back undisturbed'
    return Measured((statistics.fmean(first),), where)
  used = tuple(returns[:returns_max])
  where = f'{len(used)} of {len(returns)} undisturbed returns {whose}'
  return Measured(used, where)


def _outages(lives: Sequence[Life]) -> list[tuple[float, float]]:
  """When there was no syncer to talk to."""
  outages = []
  for dead, back in itertools.pairwise(lives):
    spoke_s = float('inf') if back.spoke_s is None else back.spoke_s
    outages.append((dead.ended_s, spoke_s))
  return outages
