# SPDX-License-Identifier: Apache-2.0
"""Measures a run's speeds, from which predictions are calibrated."""

import dataclasses
import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Sequence

from diloco.metrics.goodput import StepRecord
from diloco.metrics.workdir import learner_name
from diloco.studies.run_history import SYNCER, History, Life, NotReplayable

# Of a start-up that was measured once, its standard deviation as a share: the
# starts of nine runs on two shared cores had 4 % to 31 % of their means.
START_SPREAD = 0.15
Start = tuple[float, float]  # When it began, how long it took.
CALM_STEPS_MIN = 100  # Of every learner before the first death.


@dataclasses.dataclass(frozen=True)
class Measured:
  """Durations of some starts, in seconds, and their origin.

  Attributes:
    values: one per start.
    started_s: when those began, as in the `History` of their run.
    where: in words.
  """

  values: tuple[float, ...]
  started_s: tuple[float, ...]
  where: str

  @property
  def mean(self) -> float:
    return statistics.fmean(self.values)

  def draw(self, rng: random.Random) -> float:
    """Draws the duration of another start.

    It is any of the measured ones, or about as long as the only one.
    """
    if len(self.values) > 1:
      return rng.choice(self.values)
    return self.values[0] * max(0.5, rng.gauss(1.0, START_SPREAD))


@dataclasses.dataclass(frozen=True)
class Calibration:
  """The speeds of a run's machines, in seconds.

  Attributes:
    step_s: mean length of an inner step, by learner.
    jitter: standard deviation of a step's length as a share of its mean,
      averaged over learners.
    stall_share: share of a step spent at its boundary (`names.STALL_TIME`).
    sync_s: median time from a round's first pull to its update.
    where: where steps, stalls and syncs were measured.
    learner_start_s: from a learner's start by the launcher to its first inner
      step, with a syncer there all the time.
    syncer_start_s: from the syncer's start to its first line on the tape.
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
    history: the run itself, or another one on the same machines.
    returns_max: how many returns of a role may be used. A run whose own down
      times are predicted gives 1: what is predicted must not be known. Another
      run may give all of them, None.

  Raises:
    NotReplayable: every start was disturbed.
  """
  calm_s = min((d.ended_s for d in history.deaths()), default=history.until_s)
  where = f'the {calm_s:.1f} s before the first death'
  steps = _by_learner(history, calm_s)
  if min(map(len, steps)) < CALM_STEPS_MIN:
    where = f'the whole run, {where} being too short'
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
  outages = _outages(history.lives[SYNCER])

  def took(life: Life) -> Start | None:
    if life.stepped_s is None or any(
      begin_s < life.stepped_s and life.started_s < end_s
      for begin_s, end_s in outages
    ):
      return None
    return life.started_s, life.stepped_s - life.started_s

  return _measure(
    [each[0] for each in lives],
    [life for each in lives for life in each[1:]],
    took,
    returns_max,
    'of a learner',
  )


def _syncer_start(history: History, returns_max: int | None) -> Measured:
  def took(life: Life) -> Start | None:
    if life.spoke_s is None:
      return None
    return life.started_s, life.spoke_s - life.started_s

  lives = history.lives[SYNCER]
  return _measure(lives[:1], lives[1:], took, returns_max, 'of the syncer')


def _measure(
  first: Iterable[Life],
  returns: Iterable[Life],
  took: Callable[[Life], Start | None],
  returns_max: int | None,
  whose: str,
) -> Measured:
  """Measures returns or, if none was undisturbed, first starts."""
  back = sorted(start for start in map(took, returns) if start is not None)
  used, where = back[:returns_max], f'returns {whose}'
  if not back:
    used = sorted(start for start in map(took, first) if start is not None)
    where = f'first starts {whose}: none came back undisturbed'
  if not used:
    raise NotReplayable(f'every start {whose} was disturbed by another death')
  return Measured(
    values=tuple(seconds for _, seconds in used),
    started_s=tuple(at_s for at_s, _ in used),
    where=f'{len(used)} of {len(back) or len(used)} undisturbed {where}',
  )


def _outages(lives: Sequence[Life]) -> list[tuple[float, float]]:
  """Returns when there was no syncer to talk to."""
  outages = []
  for dead, back in itertools.pairwise(lives):
    spoke_s = float('inf') if back.spoke_s is None else back.spoke_s
    outages.append((dead.ended_s, spoke_s))
  return outages
