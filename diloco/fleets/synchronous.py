# SPDX-License-Identifier: Apache-2.0
"""Systems that run as one program over all slices, and so wait for each other.

Data-parallel is one group of slices that waits for no other. The synchronous
DiLoCos are M groups: the exchange is part of the program, and a group too far
ahead of the slowest stands still. Time is continuous; a stop in the middle of a
step suspends it.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from diloco.fleets.failures import Stall
from diloco.fleets.speeds import Speeds
from diloco.metrics import goodput as metrics_goodput
from diloco.metrics.goodput import LearnerWork

Capacity = Sequence[tuple[float, float]]  # (time, share from then on).


@dataclasses.dataclass(frozen=True)
class GroupExchange:
  """The exchange that the groups wait for.

  A group begins step n only when every group has finished the first b steps, b
  = s · ⌊(n − τ) / s⌋, and the exchange that followed is through.
  """

  spacing_steps: int  # s: H of synchronous DiLoCo, H/P of streaming DiLoCo.
  overlap_steps: int = 0  # τ, steps made meanwhile; 0 for synchronous DiLoCo.
  # From the slowest group's arrival until all have the result; network
  # time, which no stop of a group delays.
  exchange_s: float = 0.0

  def barrier(self, step: int) -> int:
    """Returns b, the steps that all must have finished before `step` begins."""
    boundaries = (step - self.overlap_steps) // self.spacing_steps
    return max(0, self.spacing_steps * boundaries)


@dataclasses.dataclass(frozen=True)
class Group:
  """A group's time, split into stepping, waiting and standing."""

  steps: int  # Steps finished by the end of the run.
  stepping_s: float  # Time in steps, with the one in progress at the end.
  # `stepping_s` times the share of the slices that was present.
  useful_s: float
  # Time of waiting for other groups or the exchange, while able to run.
  waiting_s: float
  standing_s: float  # Time in its own stops.
  spans: tuple[tuple[float, float], ...]  # The times of stepping, in order.


@dataclasses.dataclass(frozen=True)
class SynchronousResult:
  """A run of one program in [0, until_s)."""

  until_s: float
  groups: tuple[Group, ...]
  uptime: float  # Share of the time in which at least one group stepped.

  @property
  def goodput(self) -> float:
    """Goodput by `metrics.goodput`, of slices; no step is lost."""
    works = [
      LearnerWork(m, joined_s=0.0, process=0, made_s=group.useful_s)
      for m, group in enumerate(self.groups)
    ]
    return metrics_goodput.share(works, len(works), 0.0, self.until_s)


def run(
  stops: Sequence[Sequence[Stall]],
  speeds: Sequence[Speeds],
  until_s: float,
  exchange: GroupExchange | None = None,
  capacities: Sequence[Capacity] = (),
) -> SynchronousResult:
  """Runs M groups of slices from 0 to `until_s`.

  Args:
    stops: of each group, disjoint and in order of time.
    exchange: the exchange that groups wait for; None: no group waits.
    capacities: share of its slices that each group has, as from
      `failures.capacities`; (): all of them, always.
  """
  assert len(stops) == len(speeds) > 0, f'{len(stops)=} {len(speeds)=}'
  if not 0 < until_s < math.inf:
    raise ValueError(f'until_s={until_s}, must be finite and above 0')
  groups = [_Running(own, pace, until_s) for own, pace in zip(stops, speeds)]
  # When the exchange after the first b steps is through, for each b that a
  # group may still wait for.
  through_s = {0: 0.0}
  step = 0
  while any(group.now_s < until_s for group in groups):
    from_s = 0.0
    if exchange:
      barrier = exchange.barrier(step)
      from_s = through_s[barrier]
      for old in [b for b in through_s if b < barrier]:
        del through_s[old]
    for group in groups:
      group.step(from_s)
    step += 1
    if exchange and step % exchange.spacing_steps == 0:
      slowest_s = max(group.now_s for group in groups)
      through_s[step] = slowest_s + exchange.exchange_s
  capacities = capacities or [()] * len(groups)
  done = tuple(
    group.done(capacity) for group, capacity in zip(groups, capacities)
  )
  stepped = metrics_goodput.joined(
    span for group in done for span in group.spans
  )
  up_s = sum(end_s - begin_s for begin_s, end_s in stepped)
  return SynchronousResult(until_s, done, up_s / until_s)


class _Running:
  """One group as it goes through its steps and stops."""

  def __init__(self, stops: Sequence[Stall], speeds: Speeds, until_s: float):
    self.now_s = 0.0
    self._coming = iter(stops)
    self._stop = next(self._coming, None)
    self._speeds = speeds
    self._until_s = until_s
    self._steps = 0
    self._waiting_s = 0.0
    self._standing_s = 0.0
    self._spans: list[list[float]] = []

  def step(self, from_s: float):
    """Makes one step, begun not before `from_s`, unless the time is over."""
    self._wait(from_s)
    if self.now_s >= self._until_s:
      return
    left_s = self._speeds.next_s(self.now_s)
    while self.now_s < self._until_s:
      end_s = self.now_s + left_s
      if self._stop is None or end_s <= self._stop.begin_s:
        self._stepped(self.now_s, end_s)
        self.now_s = end_s
        self._steps += end_s <= self._until_s
        break
      if self._stop.begin_s > self.now_s:
        self._stepped(self.now_s, self._stop.begin_s)
        left_s -= self._stop.begin_s - self.now_s
        self.now_s = self._stop.begin_s
      self._stand()

  def done(self, capacity: Capacity) -> Group:
    spans = tuple((begin_s, end_s) for begin_s, end_s in self._spans)
    return Group(
      steps=self._steps,
      stepping_s=sum(end_s - begin_s for begin_s, end_s in spans),
      useful_s=_useful_s(spans, capacity),
      waiting_s=self._waiting_s,
      standing_s=self._standing_s,
      spans=spans,
    )

  def _wait(self, from_s: float):
    """Waits until `from_s`, and until no stop is in progress."""
    while self._stop is not None and self._stop.begin_s <= max(
      from_s, self.now_s
    ):
      self._wait_until(self._stop.begin_s)
      self._stand()
    self._wait_until(from_s)

  def _wait_until(self, at_s: float):
    if at_s > self.now_s:
      self._waiting_s += self._inside_s(self.now_s, at_s)
      self.now_s = at_s

  def _stand(self):
    self._standing_s += self._inside_s(self.now_s, self._stop.end_s)
    self.now_s = max(self.now_s, self._stop.end_s)
    self._stop = next(self._coming, None)

  def _stepped(self, begin_s: float, end_s: float):
    begin_s, end_s = min(begin_s, self._until_s), min(end_s, self._until_s)
    if self._spans and self._spans[-1][1] == begin_s:
      self._spans[-1][1] = end_s
    elif end_s > begin_s:
      self._spans.append([begin_s, end_s])

  def _inside_s(self, begin_s: float, end_s: float) -> float:
    return max(0.0, min(end_s, self._until_s) - begin_s)


def _useful_s(
  spans: Sequence[tuple[float, float]], capacity: Capacity
) -> float:
  """Returns Σ of the spans' lengths, times the share of slices present."""
  pieces = itertools.pairwise([(0.0, 1.0), *capacity, (math.inf, 0.0)])
  total_s, index = 0.0, 0
  for (from_s, share), (to_s, _) in pieces:
    while index < len(spans) and spans[index][0] < to_s:
      begin_s, end_s = spans[index]
      total_s += share * (min(end_s, to_s) - max(begin_s, from_s))
      if end_s > to_s:
        break  # The rest of it belongs to the next piece.
      index += 1
  return total_s
