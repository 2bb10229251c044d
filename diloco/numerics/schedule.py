# SPDX-License-Identifier: Apache-2.0
"""Inner learning rate as a function of the run's progress, in plain Python.

The step is the run's global one and need not be whole: learners that are slow
or late anneal with the rest. That is our choice, as the paper names no rule.
"""

import dataclasses
import math
from collections.abc import Callable

DECAY_FRACTION = 0.2  # Of the run, in which a late fall takes place.


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The fall of the learning rate after its warm-up.

  Attributes:
    height: maps progress of the fall, in [0, 1], to what is left of it: 1 is
      the peak, 0 the final rate.
    is_late: True if it falls in the last steps of the run only.
  """

  height: Callable[[float], float]
  is_late: bool = False


SCHEDULES = {
  'constant': Schedule(lambda progress: 1.0),
  'cosine': Schedule(lambda progress: (1 + math.cos(math.pi * progress)) / 2),
  'wsd': Schedule(lambda progress: 1 - progress, is_late=True),
}

# What a schedule follows, from t and the learner's own steps.
PROGRESS = {
  'global': lambda global_step, own_steps: global_step,
  'own': lambda global_step, own_steps: own_steps,
}


def make_schedule(
  name: str,
  lr: float,
  warmup_steps: int,
  total_steps: int,
  final_fraction: float = 0.0,
) -> Callable[[float], float]:
  """Returns the learning rate as a function of the global step t ≥ 0.

  All schedules rise linearly, lr·(t + 1) / warmup_steps, up to lr. Then
  'constant' stays there; 'cosine' falls to lr·final_fraction at total_steps;
  'wsd' (warm-up, stable, decay) stays and falls linearly to it in the last
  steps, `DECAY_FRACTION` of all. Beyond total_steps nothing changes.

  Args:
    lr: the peak.
    warmup_steps: steps until the peak, fewer than total_steps; 0 starts there.
    final_fraction: of lr, at the end.
  """
  schedule = SCHEDULES[name]
  begin = warmup_steps
  if schedule.is_late:
    begin = (1 - DECAY_FRACTION) * total_steps

  def rate(step: float) -> float:
    if step + 1 < warmup_steps:
      return lr * (step + 1) / warmup_steps
    progress = min(max(step - begin, 0) / (total_steps - begin), 1)
    height = schedule.height(progress)
    return lr * (final_fraction + (1 - final_fraction) * height)

  return rate
