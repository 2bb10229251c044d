# SPDX-License-Identifier: Apache-2.0
"""Goodput and uptime of a run from the steps that its learners finished."""

import dataclasses
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True)
class StepRecord:
  """One finished inner step of one learner."""

  learner: int
  end_s: float  # When it ended, on one clock for all learners.
  step_s: float
  stall_s: float  # Of step_s, waiting for the exchange.

  def productive_s(self, start_s: float, end_s: float) -> float:
    """Its share of [start_s, end_s], without the same share of its stall."""
    inside_s = min(self.end_s, end_s) - max(self.end_s - self.step_s, start_s)
    if self.step_s <= 0 or inside_s <= 0:
      return 0.0
    return inside_s * max(0.0, 1 - self.stall_s / self.step_s)


def goodput(
  steps: Iterable[StepRecord], learners: int, start_s: float, end_s: float
) -> float:
  """Share of the allocated learner time that went into training.

  Σ (step_s − stall_s) / allocated time; of a step across an end of
  [start_s, end_s] the share inside counts. Learners 0 … M − 1 are allocated for
  the whole time, any other from the beginning of its first step.

  Args:
    steps: in any order.
    learners: M, allocated for the whole time, dead or alive.
    start_s: when the allocation began.
    end_s: when it ended; later than start_s.
  """
  assert end_s > start_s, f'an empty run: {start_s=} {end_s=}'
  steps = list(steps)
  productive_s = sum(step.productive_s(start_s, end_s) for step in steps)
  joined_s = _joined_s(steps, learners)
  return productive_s / _allocated_s(learners, joined_s, start_s, end_s)


def _joined_s(steps: Iterable[StepRecord], learners: int) -> dict[int, float]:
  """When those that the run was not planned with began, by learner."""
  found: dict[int, float] = {}
  for step in steps:
    if step.learner >= learners:
      began_s = step.end_s - step.step_s
      found[step.learner] = min(found.get(step.learner, began_s), began_s)
  return found


def _allocated_s(
  learners: int, joined_s: Mapping[int, float], start_s: float, end_s: float
) -> float:
  """Learner time in [start_s, end_s]."""
  joined = (end_s - max(start_s, each) for each in joined_s.values())
  return learners * (end_s - start_s) + sum(max(0.0, x) for x in joined)


def uptime(steps: Iterable[StepRecord], start_s: float, end_s: float) -> float:
  """Share of [start_s, end_s] in which at least one learner was stepping.

  The measure of the union of all [end_s − step_s, end_s] of the steps.
  """
  assert end_s > start_s, f'an empty run: {start_s=} {end_s=}'
  spans = sorted((s.end_s - s.step_s, s.end_s) for s in steps)
  up_s, covered_s = 0.0, start_s
  for begin_s, finish_s in spans:
    begin_s, finish_s = max(begin_s, covered_s), min(finish_s, end_s)
    if finish_s > begin_s:
      up_s += finish_s - begin_s
      covered_s = finish_s
  return up_s / (end_s - start_s)


class RunningGoodput:
  """Goodput and uptime so far, in memory that does not grow with time.

  For uptime, a step counts no further back than `slack_s` before the latest
  `at`; for goodput it counts in full. Call `at` now and then: it forgets the
  steps that are settled.
  """

  def __init__(self, learners: int, start_s: float, slack_s: float = 60.0):
    self._learners = learners
    self._start_s = start_s
    self._slack_s = slack_s
    self._productive_s = 0.0
    self._settled_s = start_s  # Uptime is final before this time,
    self._up_s = 0.0  # and this much of it was up.
    self._open: list[StepRecord] = []
    self._joined_s: dict[int, float] = {}

  def add(self, step: StepRecord) -> None:
    """Counts one step."""
    self._productive_s += step.productive_s(self._start_s, step.end_s)
    self._open.append(step)
    for learner, began_s in _joined_s((step,), self._learners).items():
      self._joined_s.setdefault(learner, began_s)

  def at(self, now_s: float) -> tuple[float, float]:
    """(goodput, uptime) from the start until `now_s`; (0, 0) at the start."""
    if now_s <= self._start_s:
      return 0.0, 0.0
    now_s = max(now_s, self._settled_s)
    self._settle(now_s - self._slack_s)
    wall_s = now_s - self._start_s
    open_s = now_s - self._settled_s
    up_s = self._up_s
    if open_s > 0:
      up_s += open_s * uptime(self._open, self._settled_s, now_s)
    allocated_s = _allocated_s(
      self._learners, self._joined_s, self._start_s, now_s
    )
    return self._productive_s / allocated_s, up_s / wall_s

  def _settle(self, until_s: float) -> None:
    if until_s <= self._settled_s:
      return
    span_s = until_s - self._settled_s
    self._up_s += span_s * uptime(self._open, self._settled_s, until_s)
    self._settled_s = until_s
    self._open = [step for step in self._open if step.end_s > until_s]
