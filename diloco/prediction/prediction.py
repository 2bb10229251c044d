# SPDX-License-Identifier: Apache-2.0
"""Predicts a run from its kills and its measured speeds, by simulation."""

import dataclasses
import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Sequence

from diloco.config.run_config import RunConfig
from diloco.fleets import fleet
from diloco.fleets.failures import Arrival, Death, FaultEvents
from diloco.fleets.fleet import FleetResult
from diloco.metrics import goodput as metrics_goodput
from diloco.metrics.goodput import StepRecord
from diloco.metrics.recorded_run import SYNCER, Life
from diloco.metrics.workdir import learner_name
from diloco.prediction.history import History, NotPredictable
from diloco.simulator import network
from diloco.simulator.network import Network

# Of a start-up that was measured once, its standard deviation as a share: the
# starts of nine runs on two shared cores had 4 % to 31 % of their means.
START_SPREAD = 0.15
Start = tuple[float, float]  # When it began, how long it took.
CALM_STEPS_MIN = 100  # Of every learner before the first death.
FOREVER_STEPS = 10**9  # The prediction ends when the run did.
# Between two attempts of a learner to find the syncer: the longest pause of
# `learner/connection.py`.
RECONNECT_S = 0.5
LATENCY_S = 0.0005  # Of a message between two processes of one machine.


@dataclasses.dataclass(frozen=True)
class Measured:
  """Durations of some starts, in seconds, and their origin."""

  values: tuple[float, ...]  # One per start.
  # When those began, as in the `History` of their run.
  started_s: tuple[float, ...]
  where: str  # In words.

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
    NotPredictable: every start was disturbed, or there is no step to measure.
  """
  calm_s = min((d.ended_s for d in history.deaths()), default=history.until_s)
  where = f'the {calm_s:.1f} s before the first death'
  steps = _by_learner(history, calm_s)
  if min(map(len, steps)) < CALM_STEPS_MIN:
    where = f'the whole run, {where} being too short'
    calm_s = history.until_s
    steps = _by_learner(history, calm_s)
  for learner, made in zip(history.learners, steps):
    if not made:
      raise NotPredictable(
        f'learner {learner} made no step after its first: too short a run'
      )
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
    raise NotPredictable(f'every start {whose} was disturbed by another death')
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


@dataclasses.dataclass(frozen=True)
class PredictionInputs:
  """The inputs of a prediction from a run; seconds as in `History`.

  Attributes:
    until_s: when the run ended.
    arrivals: by learner, its first inner step; None: killed before it.
    kills: (process, time), in the order of time; of all processes, also of
      those that had just started and were not ready again.
    restart_delay_s: from a death to the next start.
  """

  config: RunConfig
  until_s: float
  arrivals: dict[int, float | None]
  kills: tuple[tuple[int, float], ...]

  @property
  def restart_delay_s(self) -> float:
    return self.config.run.restart_delay_s


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The prediction by one simulation."""

  plan: PredictionInputs  # The plan that it was made for.
  outcome: FleetResult  # Result of the machines.
  deaths: tuple[Death, ...]  # The deaths that it was made with.
  # Steps of `outcome`, with their share of stalls.
  steps: tuple[StepRecord, ...]
  stall_share: float  # Share of each step.

  @property
  def goodput(self) -> float:
    """Goodput by the run's rule, with stalls, which the simulation lacks."""
    return (1 - self.stall_share) * self.outcome.goodput

  @property
  def uptime(self) -> float:
    return metrics_goodput.uptime(self.steps, 0.0, self.plan.until_s)


def plan_of(history: History) -> PredictionInputs:
  """Returns arrivals and kills of a run, and nothing else of it."""
  names = {SYNCER: network.SYNCER}
  names |= {learner_name(m): m for m in history.learners}
  return PredictionInputs(
    config=history.config,
    until_s=history.until_s,
    arrivals={
      m: history.lives[learner_name(m)][0].stepped_s for m in history.learners
    },
    kills=tuple(
      (names[life.process], life.ended_s) for life in history.deaths()
    ),
  )


def predict(
  plan: PredictionInputs, calibration: Calibration, seed: int
) -> Prediction:
  """Goodput and all else, for one draw of start-ups and step lengths."""
  rng = random.Random(seed)
  fault_events = _fault_events(plan, calibration, rng)
  protocol = plan.config.protocol
  outcome = fleet.run(
    dataclasses.replace(protocol, total_steps=FOREVER_STEPS),
    fleet.Fleet(
      step_s=calibration.step_s,
      tokens=plan.config.data.batch * plan.config.data.seq_len,
      jitter=calibration.jitter,
    ),
    _network(protocol.fragments, calibration),
    fault_events,
    seed=rng.getrandbits(32),
    until_s=plan.until_s,
    timeline_s=plan.until_s,
  )
  steps = tuple(
    StepRecord(m, end_s, step_s, stall_s=calibration.stall_share * step_s)
    for m, begin_s, end_s in outcome.tally.steps_spans
    if (step_s := end_s - begin_s)
  )
  return Prediction(
    plan, outcome, fault_events.deaths, steps, calibration.stall_share
  )


def _network(fragments: int, calibration: Calibration) -> Network:
  """Returns a network for one machine, where bytes take no time of their own.

  The duration of a round is measured as a whole; a newcomer's transfer is part
  of its start-up.
  """
  bytes_ = (1.0,) * fragments  # On links without a limit, any number will do.
  return Network(
    up_bytes=bytes_,
    down_bytes=bytes_,
    full_bytes=bytes_,
    state_bytes=1.0,
    latency_s=LATENCY_S,
    merge_s=calibration.sync_s,
    reconnect_s=RECONNECT_S,
  )


def _fault_events(
  plan: PredictionInputs, calibration: Calibration, rng: random.Random
) -> FaultEvents:
  """Every kill costs the launcher's delay and a start-up."""
  away: dict[int, list[tuple[float, float]]] = {network.SYNCER: []}
  for learner, first_step_s in plan.arrivals.items():
    away[learner] = [] if first_step_s is None else [(0.0, first_step_s)]
  for process, at_s in plan.kills:
    start = (
      calibration.syncer_start_s
      if process == network.SYNCER
      else calibration.learner_start_s
    )
    back_at_s = at_s + plan.restart_delay_s + start.draw(rng)
    away[process].append((at_s, back_at_s))
  arrivals, deaths = [], []
  for process, spans in sorted(away.items()):
    for begin_s, end_s in _last_begun(spans):
      if begin_s <= 0.0 and process != network.SYNCER:
        arrivals.append(Arrival(process, max(0.0, end_s)))
      else:
        deaths.append(Death(process, max(0.0, begin_s), end_s))
  return FaultEvents(deaths=tuple(deaths), arrivals=tuple(arrivals))


def _last_begun(
  spans: Sequence[tuple[float, float]],
) -> list[tuple[float, float]]:
  """Joins overlapping spans: a process killed in its start-up starts anew."""
  joined: list[tuple[float, float]] = []
  for begin_s, end_s in sorted(spans):
    if joined and begin_s <= joined[-1][1]:
      joined[-1] = joined[-1][0], end_s
    else:
      joined.append((begin_s, end_s))
  return joined
