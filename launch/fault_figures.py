# SPDX-License-Identifier: Apache-2.0
"""What a learner's steps tell of a span of time: stalls, pace, goodput."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from diloco.metrics.goodput import StepRecord, stepping
from launch.live_run import Step


@dataclasses.dataclass(frozen=True)
class Figures:
  """One learner over one span of time."""

  steps: int
  steps_per_s: float
  goodput: float  # Of the span; it does not die, so all its steps count.
  stall_max_s: float  # As the learner reports it, step by step.
  stall_p99_s: float
  excess_max_s: float  # Longest time between two steps, beyond the floor.


def figures(
  steps: Sequence[Step], start_s: float, end_s: float, floor_s: float
) -> Figures:
  """Of one learner.

  Args:
    steps: all of them, in order, also outside of the span.
    start_s: seconds since the epoch, as `Step.time_s`.
    end_s: later than that.
    floor_s: what a step takes at least.
  """
  assert end_s > start_s, f'an empty span: {start_s=} {end_s=}'
  inside = [s for s in steps if start_s <= s.time_s <= end_s]
  stalls_s = sorted(s.stall_s for s in inside)
  records = [
    StepRecord(0, s.time_s, s.step_s, min(s.stall_s, s.step_s)) for s in steps
  ]
  return Figures(
    steps=len(inside),
    steps_per_s=len(inside) / (end_s - start_s),
    goodput=stepping(records, 1, start_s, end_s),
    stall_max_s=stalls_s[-1] if stalls_s else end_s - start_s,
    stall_p99_s=_percentile(stalls_s, 99) if stalls_s else end_s - start_s,
    excess_max_s=_longest_gap_s(steps, start_s, end_s) - floor_s,
  )


def _longest_gap_s(
  steps: Sequence[Step], start_s: float, end_s: float
) -> float:
  """Between two steps, of which one at least or all the time is inside.

  By the times at which they were written, whatever the learner says of stalls.
  A gap that is open at the end of what is known counts up to `end_s`.
  """
  times_s = [s.time_s for s in steps]
  before = [t for t in times_s if t < start_s][-1:] or [start_s]
  after = [t for t in times_s if t > end_s][:1] or [end_s]
  inside = [t for t in times_s if start_s <= t <= end_s]
  marks = [*before, *inside, *after]
  return max(b - a for a, b in itertools.pairwise(marks))


def _percentile(ascending: Sequence[float], percent: float) -> float:
  """The smallest value that `percent` of them do not exceed."""
  rank = math.ceil(len(ascending) * percent / 100)
  return ascending[max(rank, 1) - 1]
