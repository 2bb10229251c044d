# SPDX-License-Identifier: Apache-2.0
"""Inner learning rate as a function of the run's progress, in plain Python.

The step is the run's global one and need not be whole: learners that are slow
or late anneal with the rest. That is our choice, as the paper names no rule.
"""

import math
from collections.abc import Callable

NAMES = ('constant', 'cosine', 'wsd')


def make_schedule(
  name: str,
  lr: float,
  warmup_steps: int,
  total_steps: int,
  final_fraction: float = 0.0,
  decay_fraction: float = 0.2,
) -> Callable[[float], float]:
  """Returns the learning rate as a function of the global step t ≥ 0.

  All schedules rise linearly, lr·(t + 1) / warmup_steps, up to lr. Then
  'constant' stays there; 'cosine' falls to lr·final_fraction at total_steps;
  'wsd' (warm-up, stable, decay) stays and falls linearly to it in the last
  steps. Beyond total_steps nothing changes.

  Args:
    name: one of `NAMES`.
    lr: the peak.
    warmup_steps: steps until the peak; 0 starts at the peak.
    total_steps: length of the run.
    final_fraction: of lr, at the end.
    decay_fraction: share of total_steps in which 'wsd' falls.

  Raises:
    ValueError: an argument is out of range.
  """
  if name not in NAMES:
    raise ValueError(f'schedule {name!r}, must be one of {NAMES}')
  if not 0 < lr < math.inf:
    raise ValueError(f'lr={lr}, must be finite and > 0')
  if not 0 <= warmup_steps < total_steps:
    raise ValueError(
      f'warmup_steps={warmup_steps}, must be at least 0 and less than '
      f'total_steps={total_steps}'
    )
  for label, value in (
    ('final_fraction', final_fraction),
    ('decay_fraction', decay_fraction),
  ):
    if not 0 <= value <= 1:
      raise ValueError(f'{label}={value}, must be in [0, 1]')
  if name == 'wsd' and not 0 < decay_fraction * total_steps <= (
    total_steps - warmup_steps
  ):
    raise ValueError(
      f'decay_fraction={decay_fraction} of total_steps={total_steps} must be '
      f'more than 0 and fit after warmup_steps={warmup_steps}'
    )

  def rate(step: float) -> float:
    if step < 0:
      raise ValueError(f'step={step}, must be at least 0')
    if step + 1 < warmup_steps:
      return lr * (step + 1) / warmup_steps
    match name:
      case 'constant':
        return lr
      case 'cosine':
        begin = warmup_steps
      case 'wsd':
        begin = (1 - decay_fraction) * total_steps
    progress = min(max(step - begin, 0) / (total_steps - begin), 1)
    height = 1 - progress
    if name == 'cosine':
      height = (1 + math.cos(math.pi * progress)) / 2
    return lr * (final_fraction + (1 - final_fraction) * height)

  return rate
