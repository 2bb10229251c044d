# SPDX-License-Identifier: Apache-2.0
"""Failures of a fleet in one seed, the same for every system on it."""

import dataclasses
import random
import statistics
from collections.abc import Sequence

from diloco.config.simulation import FailuresConfig, SimulationConfig
from diloco.fleets import failures
from diloco.fleets.failures import Death, FaultEvents, Interruption, Stall
from diloco.fleets.systems import Recovery

# A drawn fleet has been at it for so many times the mean repair and pause: at
# the start, slices are away, and some learners stand.
WARM_UP = 5


@dataclasses.dataclass(frozen=True)
class Trace:
  """The failures of a fleet on a clock on which the run starts at `from_s`."""

  chips: int  # N.
  interruptions: tuple[Interruption, ...]  # In order of time.
  from_s: float  # Start of the run; what was before still has its effects.
  rate_per_s: float  # Of the whole fleet.
  repair_s: float  # Mean.
  # End of a record, as a time of the run; None: drawn, no end.
  ends_s: float | None = None


@dataclasses.dataclass(frozen=True)
class LearnerTrace:
  """The stops of one learner, and its capacity between them."""

  stops: tuple[Stall, ...]
  capacities: tuple[tuple[float, float], ...] = ()


def drawn(
  config: FailuresConfig, chips: int, seed: int, until_s: float
) -> Trace:
  """A fleet of N chips; a longer run begins with the same failures."""
  rate_per_s = failures.rate_per_s(chips, config.mtbi_days)
  from_s = WARM_UP * (config.repair_s + config.pause_s)
  rng = random.Random(f'failures of {chips} chips, seed {seed}')
  interruptions = failures.draw(
    rate_per_s,
    from_s + until_s,
    failures.make(config.repair, config.repair_s, config.repair_shape),
    rng,
  )
  return Trace(chips, interruptions, from_s, rate_per_s, config.repair_s)


def recorded(config: SimulationConfig) -> Trace:
  """Reads `failures.trace`, a CSV file; the cluster has `fleet.chips`.

  Raises:
    TraceError: the file is not what `failures.read_csv` documents, or it holds
      no failure.
  """
  path, chips = config.failures.trace, config.fleet.chips
  interruptions = failures.read_csv(path, chips)
  if not interruptions or not interruptions[-1].at_s > 0:
    raise failures.TraceError(
      f'{path}: no failure after 0 s; the record ends with the last one, so '
      'it must hold some'
    )
  ends_s = interruptions[-1].at_s
  mean_s = statistics.fmean(i.repair_s for i in interruptions)
  rate_per_s = len(interruptions) / ends_s
  return Trace(chips, interruptions, 0.0, rate_per_s, mean_s, ends_s)


def standing(
  trace: Trace,
  recovery: Recovery,
  learners: int,
  config: SimulationConfig,
  until_s: float,
) -> list[LearnerTrace]:
  """Returns the stops of each of M learners, from the start of the run."""
  ends_s = trace.from_s + until_s
  within = [i for i in trace.interruptions if i.at_s < ends_s]
  slices = trace.chips / learners / config.fleet.slice_chips
  pause_s = config.failures.pause_s
  every = []
  for learner in range(learners):
    own = failures.of_learner(within, learner, learners)
    stands = recovery.stops(own, pause_s, ends_s)
    shares = ()
    if recovery.runs_on:
      shares = failures.capacities(own, stands, 1 / max(slices, 1.0))
    every.append(
      LearnerTrace(
        failures.stops_from(stands, trace.from_s),
        failures.capacities_from(shares, trace.from_s),
      )
    )
  return every


def fault_events(
  every: Sequence[LearnerTrace], recovery: Recovery
) -> FaultEvents:
  """Returns the faults for Decoupled DiLoCo.

  For learners that restart, each reconfiguration, with fewer slices or with
  more, is a death; the next process bootstraps after the pause.
  """
  capacities = {m: one.capacities for m, one in enumerate(every)}
  if not recovery.dies:
    stops = {m: one.stops for m, one in enumerate(every)}
    return FaultEvents(stops, capacities)
  deaths = tuple(
    Death(m, stop.begin_s, stop.end_s)
    for m, one in enumerate(every)
    for stop in one.stops
  )
  return FaultEvents(capacities=capacities, deaths=deaths)
