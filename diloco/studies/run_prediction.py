# SPDX-License-Identifier: Apache-2.0
"""Predicts a run from its kills, with the real machines."""

import dataclasses
import random
from collections.abc import Sequence

from diloco.config import RunConfig
from diloco.metrics import goodput
from diloco.metrics.goodput import StepRecord
from diloco.metrics.workdir import learner_name
from diloco.sim import decoupled
from diloco.sim.decoupled import Outcome
from diloco.sim.happenings import Arrival, Death, Happenings
from diloco.sim.links import Network
from diloco.sim.wires import SYNCER
from diloco.studies import run_history
from diloco.studies.run_calibration import Calibration
from diloco.studies.run_history import History

FOREVER_STEPS = 10**9  # The prediction ends when the run did.
# Between two attempts of a learner to find the syncer: the longest pause of
# `runtime/link.py`.
RECONNECT_S = 0.5
LATENCY_S = 0.0005  # Of a message between two processes of one machine.


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a prediction is told of a run; seconds as in `History`.

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
  """The prediction by one simulation.

  Attributes:
    plan: the plan that it was made for.
    outcome: result of the machines.
    deaths: the deaths that it was made with.
    steps: steps of `outcome`, with their share of stalls.
    stall_share: share of each step.
  """

  plan: Plan
  outcome: Outcome
  deaths: tuple[Death, ...]
  steps: tuple[StepRecord, ...]
  stall_share: float

  @property
  def goodput(self) -> float:
    """Goodput by the run's rule, with stalls, which the simulation lacks."""
    return (1 - self.stall_share) * self.outcome.goodput

  @property
  def uptime(self) -> float:
    return goodput.uptime(self.steps, 0.0, self.plan.until_s)


def plan_of(history: History) -> Plan:
  """Returns arrivals and kills of a run, and nothing else of it."""
  names = {run_history.SYNCER: SYNCER}
  names |= {learner_name(m): m for m in history.learners}
  return Plan(
    config=history.config,
    until_s=history.until_s,
    arrivals={
      m: history.lives[learner_name(m)][0].stepped_s for m in history.learners
    },
    kills=tuple(
      (names[life.process], life.ended_s) for life in history.deaths()
    ),
  )


def predict(plan: Plan, calibration: Calibration, seed: int) -> Prediction:
  """Goodput and all else, for one draw of start-ups and step lengths."""
  rng = random.Random(seed)
  happenings = _happenings(plan, calibration, rng)
  protocol = plan.config.protocol
  outcome = decoupled.run(
    dataclasses.replace(protocol, total_steps=FOREVER_STEPS),
    decoupled.Fleet(
      step_s=calibration.step_s,
      tokens=plan.config.data.batch * plan.config.data.seq_len,
      jitter=calibration.jitter,
    ),
    _network(protocol.fragments, calibration),
    happenings,
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
    plan, outcome, happenings.deaths, steps, calibration.stall_share
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


def _happenings(
  plan: Plan, calibration: Calibration, rng: random.Random
) -> Happenings:
  """Every kill costs the launcher's delay and a start-up."""
  away: dict[int, list[tuple[float, float]]] = {SYNCER: []}
  for learner, first_step_s in plan.arrivals.items():
    away[learner] = [] if first_step_s is None else [(0.0, first_step_s)]
  for process, at_s in plan.kills:
    start = (
      calibration.syncer_start_s
      if process == SYNCER
      else calibration.learner_start_s
    )
    back_at_s = at_s + plan.restart_delay_s + start.draw(rng)
    away[process].append((at_s, back_at_s))
  arrivals, deaths = [], []
  for process, spans in sorted(away.items()):
    for begin_s, end_s in _last_begun(spans):
      if begin_s <= 0.0 and process != SYNCER:
        arrivals.append(Arrival(process, max(0.0, end_s)))
      else:
        deaths.append(Death(process, max(0.0, begin_s), end_s))
  return Happenings(deaths=tuple(deaths), arrivals=tuple(arrivals))


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
