# SPDX-License-Identifier: Apache-2.0
"""Scheduled faults and arrivals of a simulated fleet; times in seconds."""

import dataclasses
from collections.abc import Mapping

from diloco.sim.stops import Stop


@dataclasses.dataclass(frozen=True)
class Death:
  """A process is killed, and another replaces it.

  Attributes:
    process: a learner's id, or `SYNCER`.
    at_s: time of the death.
    back_at_s: when the next one says hello, or listens; inf: never.
  """

  process: int
  at_s: float
  back_at_s: float


@dataclasses.dataclass(frozen=True)
class Arrival:
  """A learner that was not there at the start says hello."""

  learner: int
  at_s: float


@dataclasses.dataclass(frozen=True)
class Happenings:
  """All scheduled faults of one fleet.

  Attributes:
    suspensions: by learner, ascending, disjoint: it makes no steps, its process
      answers.
    capacities: by learner, (time, share of its slices that are there from then
      on), ascending.
    deaths: in any order; those of one process don't overlap.
    arrivals: of learners that don't start at 0.
  """

  suspensions: Mapping[int, tuple[Stop, ...]] = dataclasses.field(
    default_factory=dict
  )
  capacities: Mapping[int, tuple[tuple[float, float], ...]] = dataclasses.field(
    default_factory=dict
  )
  deaths: tuple[Death, ...] = ()
  arrivals: tuple[Arrival, ...] = ()
