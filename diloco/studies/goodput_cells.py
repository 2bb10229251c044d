# SPDX-License-Identifier: Apache-2.0
"""Simulates one system on one fleet over some seeds: one cell of the tables."""

import dataclasses
import random
import statistics
from collections.abc import Sequence

from diloco.config.simulation import SimulationConfig
from diloco.fleets import closed_forms, fleet, speeds, synchronous
from diloco.fleets.synchronous import GroupExchange
from diloco.fleets.systems import RECOVERIES, SYSTEMS, Recovery
from diloco.simulator.network import SYNCER
from diloco.studies import inputs, traces
from diloco.studies.traces import Trace

# Programs in lock-step cost next to nothing, so they run longer: their means
# scatter less. Their failures begin with those of Decoupled DiLoCo.
LOCKSTEP_LONGER = 24


@dataclasses.dataclass(frozen=True)
class GoodputRun:
  """One seed; fields that concern rounds are None for systems without them."""

  # Share of the allocated time, and slices, that went into steps.
  goodput: float
  uptime: float  # Share of the time in which at least one learner stepped.
  learner_steps: int  # Steps made by all.
  merges_per_hour: float | None = None  # Closed rounds.
  participation: float | None = None  # Mean share of the learners in a round.
  # Participation of the learner in the fewest rounds.
  participation_least: float | None = None
  # Mean over merged offers of the versions that a base was behind.
  staleness: float | None = None
  learner_out_gbps: float | None = None  # Mean over time and learners.
  learner_in_gbps: float | None = None  # Mean over time and learners.
  syncer_in_peak_gbps: float | None = None  # In its busiest step.
  syncer_out_peak_gbps: float | None = None  # In its busiest step.


@dataclasses.dataclass(frozen=True)
class GoodputCell:
  """One system with M learners on N chips."""

  system: str
  learners: int
  chips: int
  runs: tuple[GoodputRun, ...]
  closed_goodput: float | None  # By formula; None if there is no sound one.
  closed_uptime: float | None  # By formula; None if there is no sound one.
  # Of the first seed of Decoupled DiLoCo, if a picture is wanted.
  outcome: fleet.FleetResult | None = None
  stands: tuple[traces.LearnerTrace, ...] = ()  # By learner, in that seed.

  def mean(self, name: str) -> float | None:
    """Over the seeds, of an attribute of `GoodputRun`."""
    values = self.values(name)
    return statistics.fmean(values) if values else None

  def spread(self, name: str) -> float | None:
    """Standard deviation over the seeds; None of fewer than two."""
    values = self.values(name)
    return statistics.stdev(values) if len(values) > 1 else None

  def values(self, name: str) -> list[float]:
    every = (getattr(run, name) for run in self.runs)
    return [value for value in every if value is not None]


def rows(config: SimulationConfig) -> list[tuple[str, int]]:
  """Returns (system, M) in the order of the tables."""
  study = config.study
  listed = []
  for system in study.systems:
    if SYSTEMS[system].is_decoupled:
      listed += [(system, learners) for learners in study.learners]
    elif SYSTEMS[system].is_diloco:
      listed.append((system, max(study.learners)))
    else:
      listed.append((system, 1))
  return listed


def seconds(config: SimulationConfig, system: str, learners: int) -> float:
  """Simulated time of one cell and seed."""
  hours = config.study.learner_hours / learners
  longer = 1 if SYSTEMS[system].is_decoupled else LOCKSTEP_LONGER
  return 3600 * hours * longer


def simulate(
  config: SimulationConfig,
  system: str,
  learners: int,
  fleet_traces: Sequence[Trace],
  timeline_s: float = 0.0,
) -> GoodputCell:
  """Runs a cell on the traces of a fleet, one of each seed.

  Args:
    fleet_traces: of `config.seed` and those after it.
    timeline_s: how much of the first seed is kept for a picture.
  """
  recovery = recovery_of(config, system)
  runs, first, stands = [], None, ()
  for index, trace in enumerate(fleet_traces):
    until_s = seconds(config, system, learners)
    if trace.ends_s is not None:
      until_s = min(until_s, trace.ends_s)
    every = traces.standing(trace, recovery, learners, config, until_s)
    seed = config.seed + index
    if SYSTEMS[system].is_decoupled:
      keep_s = 0.0 if index else timeline_s
      outcome = _decoupled(config, every, seed, until_s, keep_s)
      runs.append(_counted(outcome))
      if index == 0 and timeline_s:
        first, stands = outcome, tuple(every)
    else:
      runs.append(_in_lockstep(config, system, every, seed, until_s))
  goodput, uptime = _closed(config, system, learners, fleet_traces[0])
  return GoodputCell(
    system,
    learners,
    fleet_traces[0].chips,
    tuple(runs),
    goodput,
    uptime,
    first,
    stands,
  )


def recovery_of(config: SimulationConfig, system: str) -> Recovery:
  """Returns how a group of slices of this system recovers from losing one."""
  return RECOVERIES[SYSTEMS[system].recovery or config.failures.recovery]


def exchange_of(config: SimulationConfig, system: str) -> GroupExchange:
  """Returns the exchange that groups in lock-step wait for.

  Without a DiLoCo, that is every step of the others.
  """
  if not SYSTEMS[system].is_diloco:
    return GroupExchange(1)
  return inputs.exchange_of(
    config, SYSTEMS[system].streams, max(config.study.learners)
  )


def _in_lockstep(
  config: SimulationConfig,
  system: str,
  every: Sequence[traces.LearnerTrace],
  seed: int,
  until_s: float,
) -> GoodputRun:
  fleet = config.fleet
  is_even = not (fleet.slow_learners or fleet.jitter or fleet.drift)
  if not SYSTEMS[system].is_diloco and not is_even:
    # Parts of unequal speed wait for each other after every step.
    every = list(every) * max(config.study.learners)
  steps_s = speeds.mean_steps_s(
    len(every), fleet.step_s, fleet.slow_learners, fleet.slow_gap
  )
  paces = [
    speeds.Speeds(
      step_s,
      fleet.jitter,
      fleet.drift,
      random.Random(f'steps of {group}, seed {seed}'),
    )
    for group, step_s in enumerate(steps_s)
  ]
  done = synchronous.run(
    [one.stops for one in every],
    paces,
    until_s,
    exchange_of(config, system),
    config.failures.redoes_step,
    [one.capacities for one in every],
  )
  steps = sum(group.steps for group in done.groups)
  return GoodputRun(done.goodput, done.uptime, steps)


def _decoupled(
  config: SimulationConfig,
  every: Sequence[traces.LearnerTrace],
  seed: int,
  until_s: float,
  timeline_s: float,
) -> fleet.FleetResult:
  learners = len(every)
  protocol = dataclasses.replace(
    config.protocol,
    learners=learners,
    quorum=min(config.protocol.quorum, learners),
  )
  return fleet.run(
    protocol,
    inputs.fleet_of(config, learners),
    inputs.network_of(config),
    traces.fault_events(every, config.failures, seed, until_s),
    seed,
    until_s,
    config.failures.redoes_step,
    timeline_s,
  )


def _counted(outcome: fleet.FleetResult) -> GoodputRun:
  participations = [outcome.participation(m) for m in outcome.learners]
  counts = outcome.learners.values()
  merged = sum(count.merged for count in counts)
  staleness = sum(count.staleness for count in counts)
  return GoodputRun(
    goodput=outcome.goodput,
    uptime=outcome.uptime,
    learner_steps=outcome.steps,
    merges_per_hour=outcome.merges_per_hour,
    participation=statistics.fmean(participations),
    participation_least=min(participations),
    staleness=staleness / merged if merged else None,
    learner_out_gbps=statistics.fmean(_gbps(outcome, 'out', False, 'mean_bps')),
    learner_in_gbps=statistics.fmean(_gbps(outcome, 'in', False, 'mean_bps')),
    syncer_in_peak_gbps=max(_gbps(outcome, 'in', True, 'peak_bps')),
    syncer_out_peak_gbps=max(_gbps(outcome, 'out', True, 'peak_bps')),
  )


def _gbps(
  outcome: fleet.FleetResult, direction: str, of_syncer: bool, rate: str
) -> list[float]:
  """Returns a rate of links that were used, by a field such as 'mean_bps'."""
  return [
    getattr(use, rate) / 1e9
    for use in outcome.links
    if use.direction == direction and (use.process == SYNCER) == of_syncer
  ] or [0.0]


def _closed(
  config: SimulationConfig, system: str, learners: int, trace: Trace
) -> tuple[float | None, float | None]:
  """Returns (goodput, uptime) by formula."""
  kind = SYSTEMS[system]
  if kind.is_diloco and not kind.is_decoupled:
    return None, None
  recovery = recovery_of(config, system)
  goodput = traces.expected_goodput(
    trace, recovery, learners, config.failures.pause_s
  )
  return goodput, closed_forms.uptime(goodput, learners)
