# SPDX-License-Identifier: Apache-2.0
"""How a difference moves with a number, such as the horizon: charts of it."""

import math
from collections.abc import Iterator, Sequence

from diloco.lab.sweep import Comparison
from diloco.pages.parts import Chart, Line

LOG_FROM = 8.0  # Where the largest x is so many times the least.


def charts(
  compared: Sequence[Comparison], label: str, suffix: str
) -> Iterator[Chart]:
  """One chart of each axis that variants stand at (`Variant.at`).

  Args:
    compared: the variants of a sweep, with their differences.
    label: of the sweep.
    suffix: of the charts' names, so that no two sweeps have the same.
  """
  placed = [
    each
    for each in compared
    if each.variant.at is not None and each.difference is not None
  ]
  for number, axis in enumerate(
    dict.fromkeys(each.variant.at[0] for each in placed)
  ):
    here = [each for each in placed if each.variant.at[0] == axis]
    xs = [each.variant.at[2] for each in here]
    yield Chart(
      f'sweep-trend{suffix}-{number}',
      f'{label}: difference against {axis}',
      axis,
      'difference of the loss, % (paired by seed, 95 % interval)',
      tuple(
        _line(name, group, [e for e in here if e.variant.at[1] == name])
        for group, name in enumerate(
          dict.fromkeys(each.variant.at[1] for each in here)
        )
      ),
      log_x=min(xs) > 0 and max(xs) >= LOG_FROM * min(xs),
      notes=('Below zero is better. A point without a bar is of one seed.',),
    )


def _line(name: str, group: int, here: Sequence[Comparison]) -> Line:
  here = sorted(here, key=lambda each: each.variant.at[2])
  half_widths = [100 * each.half_width for each in here]
  return Line(
    name,
    'simulated',
    tuple(float(each.variant.at[2]) for each in here),
    tuple(100 * each.difference for each in here),
    tuple(0.0 if math.isnan(half) else half for half in half_widths),
    group,
  )
