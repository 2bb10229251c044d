# SPDX-License-Identifier: Apache-2.0
"""Failures of a fleet, and the stops and deaths that follow from them.

One trace covers the whole fleet, so that systems with different numbers of
learners are compared on the same failures.
"""

import bisect
import dataclasses
import heapq
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

Repair = Callable[[random.Random], float]  # Draws seconds.


def make(kind: str, mean_s: float, shape: float = 1.0) -> Repair:
  """Returns a distribution of repair times with the mean `mean_s`.

  Args:
    kind: a key of `REPAIRS`.
    mean_s: mean of the draws, in seconds, at least 0.
    shape: k > 0 of the Weibull, P(x) = 1 − e^−(x/l)^k; others ignore it. The
      scale l follows from the mean.
  """
  return REPAIRS[kind](mean_s, shape)


def _constant(mean_s: float, shape: float) -> Repair:
  del shape
  return lambda rng: mean_s


def _weibull(mean_s: float, shape: float) -> Repair:
  scale_s = mean_s / math.gamma(1 + 1 / shape)
  return lambda rng: scale_s * (-math.log1p(-rng.random())) ** (1 / shape)


# Laws of repair times, from mean and shape. The paper names the exponentiated
# Weibull, without its parameters; here its power is 1.
REPAIRS = {
  'constant': _constant,
  'exponential': lambda mean_s, shape: _weibull(mean_s, 1.0),
  'exponentiated_weibull': _weibull,
}


@dataclasses.dataclass(frozen=True)
class Interruption:
  """A chip breaks, and its slice is lost until it is repaired."""

  at_s: float  # Time since the start of the run.
  place: float  # In [0, 1), position in the fleet: chip ⌊place · N⌋ of N.
  repair_s: float  # Time until the slice is back.


def rate_per_s(chips: int, mtbi_days: float) -> float:
  """Interruptions of a fleet per second: N / MTBI; 0 if MTBI is inf."""
  return chips / (mtbi_days * 86400)


def draw(
  rate_per_s: float, until_s: float, repair: Repair, rng: random.Random
) -> tuple[Interruption, ...]:
  """Draws Poisson interruptions of a fleet in [0, until_s), in order of time.

  A longer run begins with the same interruptions as a shorter one.

  Args:
    rate_per_s: rate of the whole fleet, see `rate_per_s`; 0: none.
    repair: draws the time until a slice is back.
    rng: seeded by the caller; only this trace draws from it.
  """
  if not rate_per_s >= 0:
    raise ValueError(f'rate_per_s={rate_per_s}, must be at least 0')
  drawn, at_s = [], 0.0
  while rate_per_s > 0:
    at_s += rng.expovariate(rate_per_s)
    if at_s >= until_s:
      break
    drawn.append(Interruption(at_s, rng.random(), repair(rng)))
  return tuple(drawn)


def of_learner(
  interruptions: Iterable[Interruption], learner: int, learners: int
) -> tuple[Interruption, ...]:
  """Returns those that hit `learner` when M learners share the fleet evenly."""
  if not 0 <= learner < learners:
    raise ValueError(f'learner={learner}, must be in 0 … {learners - 1}')
  return tuple(i for i in interruptions if int(i.place * learners) == learner)


# Computes when a group of slices stands still, from its interruptions.
#
# The functions are pure, and the same for every system.


@dataclasses.dataclass(frozen=True)
class Stall:
  """A learner stands still in [begin_s, end_s)."""

  begin_s: float  # From here on nothing is computed.
  end_s: float  # It goes on; may lie after the end of the run.
  # 'down' and 'up', a reconfiguration with fewer or more slices; 'repair',
  # waiting for a slice and the reconfiguration with it.
  reason: str


def elastic(
  interruptions: Iterable[Interruption], pause_s: float, until_s: float
) -> tuple[Stall, ...]:
  """Returns the stops of a learner that goes on with fewer slices (Fig. 1).

  An interruption while it runs is a pause; the slice's return is another one if
  the learner runs then. A slice that breaks or returns during a pause is
  handled by the reconfiguration in progress and costs nothing, neither then
  nor, if it broke, on its return. Hence 1 − g = t·λ·g·(1 + g) (`systems`).

  Args:
    interruptions: of this learner, in order of time.
    pause_s: t, the duration of one reconfiguration.
    until_s: no stop begins at or after this.

  Returns:
    Disjoint stops in order of time.
  """
  stops: list[Stall] = []
  returns: list[float] = []
  runs_from_s = 0.0

  def pause(at_s: float, reason: str) -> bool:
    nonlocal runs_from_s
    if at_s < runs_from_s or at_s >= until_s:
      return False
    runs_from_s = at_s + pause_s
    stops.append(Stall(at_s, runs_from_s, reason))
    return True

  def bring_back(before_s: float):
    while returns and returns[0] <= before_s:
      pause(heapq.heappop(returns), 'up')

  for interruption in interruptions:
    bring_back(interruption.at_s)
    if pause(interruption.at_s, 'down'):
      heapq.heappush(returns, interruption.at_s + interruption.repair_s)
  bring_back(math.inf)
  return tuple(stops)


def waiting(
  interruptions: Iterable[Interruption], pause_s: float, until_s: float
) -> tuple[Stall, ...]:
  """Returns the stops of a learner that waits for the broken slice.

  It stands for the repair and one reconfiguration, R = repair_s + pause_s; what
  breaks meanwhile is repaired meanwhile. Hence g = 1/(1 + λR) (`systems`).

  Args:
    interruptions: of this learner, in order of time.
    pause_s: duration of the reconfiguration once the slice is back.
    until_s: no stop begins at or after this.

  Returns:
    Disjoint stops in order of time.
  """
  stops: list[Stall] = []
  runs_from_s = 0.0
  for interruption in interruptions:
    if runs_from_s <= interruption.at_s < until_s:
      runs_from_s = interruption.at_s + interruption.repair_s + pause_s
      stops.append(Stall(interruption.at_s, runs_from_s, 'repair'))
  return tuple(stops)


def capacities(
  interruptions: Iterable[Interruption],
  stops: Sequence[Stall],
  slice_share: float,
) -> tuple[tuple[float, float], ...]:
  """Returns an elastic learner's capacity while slices are away.

  A slice that broke during a pause has been replaced, and does not count.

  Args:
    interruptions: of this learner, in order of time.
    stops: the result of `elastic` for these.
    slice_share: share of one slice in the learner, in (0, 1].

  Returns:
    (time, share of its slices that are there from then on), in order of time;
    all are there at the start.
  """
  downs = {stop.begin_s for stop in stops if stop.reason == 'down'}
  changes = sorted(
    change
    for interruption in interruptions
    if interruption.at_s in downs
    for change in (
      (interruption.at_s, 1),
      (interruption.at_s + interruption.repair_s, -1),
    )
  )
  away, shares = 0, []
  for at_s, change in changes:
    away += change
    shares.append((at_s, max(0.0, 1 - away * slice_share)))
  return tuple(shares)


def running_s(
  stops: Iterable[Stall], shares: Iterable[tuple[float, float]], until_s: float
) -> tuple[float, float]:
  """Returns the useful and the whole time in which one group runs until then.

  Useful is the time that it runs, times the share of its slices that is there.

  Args:
    stops: disjoint.
    shares: as from `capacities`.
  """
  times_s, share_from = zip((0.0, 1.0), *shares)
  useful_s = [0.0]  # Before each of these times, if it never stopped.
  for i, share in enumerate(share_from[:-1]):
    useful_s.append(useful_s[-1] + share * (times_s[i + 1] - times_s[i]))

  def useful_until(at_s: float) -> float:
    i = bisect.bisect_right(times_s, at_s) - 1
    return useful_s[i] + share_from[i] * (at_s - times_s[i])

  useful, whole = useful_until(until_s), until_s
  for stop in stops:
    if stop.begin_s < until_s:
      end_s = min(stop.end_s, until_s)
      useful -= useful_until(end_s) - useful_until(stop.begin_s)
      whole -= end_s - stop.begin_s
  return useful, whole


def stops_from(stops: Iterable[Stall], from_s: float) -> tuple[Stall, ...]:
  """Returns the stops on a clock that starts at `from_s`."""
  return tuple(
    Stall(max(0.0, s.begin_s - from_s), s.end_s - from_s, s.reason)
    for s in stops
    if s.end_s > from_s
  )


def capacities_from(
  shares: Sequence[tuple[float, float]], from_s: float
) -> tuple[tuple[float, float], ...]:
  """Returns the capacities on a clock that starts at `from_s`."""
  before = [share for at_s, share in shares if at_s <= from_s][-1:]
  later = [(at_s - from_s, share) for at_s, share in shares if at_s > from_s]
  return (*((0.0, share) for share in before), *later)


@dataclasses.dataclass(frozen=True)
class Death:
  """A process is killed, and another replaces it."""

  process: int  # A learner's id, or `SYNCER`.
  at_s: float  # Time of the death.
  back_at_s: float  # When the next one says hello, or listens; inf: never.


@dataclasses.dataclass(frozen=True)
class FaultEvents:
  """All scheduled faults of one fleet.

  Attributes:
    suspensions: by learner, ascending, disjoint: it makes no steps, its process
      answers.
    capacities: by learner, (time, share of its slices that are there from then
      on), ascending.
    deaths: in any order; those of one process don't overlap.
  """

  suspensions: Mapping[int, tuple[Stall, ...]] = dataclasses.field(
    default_factory=dict
  )
  capacities: Mapping[int, tuple[tuple[float, float], ...]] = dataclasses.field(
    default_factory=dict
  )
  deaths: tuple[Death, ...] = ()
