# SPDX-License-Identifier: Apache-2.0
"""Simulates one first-in-first-out link, and how long steps wait for it.

An inner step takes T: a third of it forward, the rest backward. What it
releases queues on the link, start = max(release, link free), finish = start +
bits / bandwidth, and the step is stretched by the time that the last finish is
behind the deadline. Compute utilisation is ΣT / (ΣT + Σstall).

Traffic is periodic, so it is given as the steps of one cycle. Units: Gbit,
Gbit/s and seconds. Latency is 0.

The model is that of a simulator which the paper's first author has on a public
page. That the paper's own bandwidths (Fig. 13, Table 13) come from such a link
is our inference.
"""

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Step:
  """What one inner step puts on the link.

  Attributes:
    releases: (seconds after the step's start, Gbit), in the link's order.
    deadline_s: time after the step's start by which all must be through.
  """

  releases: tuple[tuple[float, float], ...] = ()
  deadline_s: float = math.inf


Cycle = tuple[Step, ...]


def data_parallel(gbit: float, step_s: float, buckets: int) -> Cycle:
  """Returns a cycle in which every step sends equal buckets during backward.

  Bucket k of K is ready at T/3 + (k+1)/K · 2T/3; all are due at the end.

  Args:
    gbit: Gbit that one step puts on the link.
    step_s: T.
    buckets: K.
  """
  backward_s = 2 * step_s / 3
  releases = tuple(
    (step_s / 3 + (k + 1) / buckets * backward_s, gbit / buckets)
    for k in range(buckets)
  )
  return (Step(releases, step_s),)


def diloco(gbit: float, step_s: float, buckets: int, every: int) -> Cycle:
  """Returns DiLoCo's cycle: every H-th step sends what data-parallel sends.

  Args:
    gbit: Gbit that one sync puts on the link.
    step_s: T.
    buckets: K.
    every: H, in steps.
  """
  return (Step(),) * (every - 1) + data_parallel(gbit, step_s, buckets)


def streaming(
  fragments: Sequence[float], step_s: float, every: int, overlap: int
) -> Cycle:
  """Returns a cycle that sends a fragment at every (H/P)-th step.

  Each is due after τ + 1 steps.

  Args:
    fragments: Gbit that each puts on the link, in the order of their rounds.
    step_s: T.
    every: H, in steps; a multiple of the number of fragments.
    overlap: τ, in steps.

  Raises:
    ValueError: P does not divide H.
  """
  spacing, rest = divmod(every, len(fragments))
  if rest or not spacing:
    raise ValueError(f'P={len(fragments)} fragments do not divide H={every}')
  idle = (Step(),) * (spacing - 1)
  deadline_s = (overlap + 1) * step_s
  return tuple(
    step
    for gbit in fragments
    for step in (Step(((0.0, gbit),), deadline_s), *idle)
  )


def utilisation(cycle: Cycle, step_s: float, gbps: float, steps: int) -> float:
  """Returns ΣT / (ΣT + Σstall) over `steps` steps, simulated event by event.

  Once a cycle leaves the link as it found it, all later ones do, and are
  skipped: the result is the same.

  Args:
    cycle: the steps that repeat.
    step_s: T.
    gbps: rate of the link; above 0.
    steps: number of steps to simulate.
  """
  if not (gbps > 0 and steps > 0):
    raise ValueError(f'gbps={gbps}, steps={steps}: both must be above 0')
  whole, rest = divmod(steps, len(cycle))
  busy_s = stall_s = 0.0
  while whole:
    before_s = busy_s
    stalled_s, busy_s = _through(cycle, step_s, gbps, busy_s)
    alike = whole if busy_s == before_s else 1
    stall_s += alike * stalled_s
    whole -= alike
  stall_s += _through(cycle[:rest], step_s, gbps, busy_s)[0]
  return steps * step_s / (steps * step_s + stall_s)


def _through(
  steps: Sequence[Step], step_s: float, gbps: float, busy_s: float
) -> tuple[float, float]:
  """Returns the stall of these steps, and how long the link is busy after them.

  Args:
    steps: one after another.
    step_s: T.
    gbps: rate of the link.
    busy_s: how long it is busy, from the start of the first step.
  """
  stall_s = 0.0
  for step in steps:
    for release_s, gbit in step.releases:
      busy_s = max(busy_s, release_s) + gbit / gbps
    stall_s += max(0.0, busy_s - step.deadline_s)
    # A stall ends when the link is free: the next step finds the rest of it.
    busy_s = max(0.0, min(busy_s, step.deadline_s) - step_s)
  return stall_s, busy_s
