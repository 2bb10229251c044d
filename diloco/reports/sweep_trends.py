# SPDX-License-Identifier: Apache-2.0
"""Charts of how a difference changes with a number, such as the horizon."""

import math
from collections.abc import Iterator, Sequence

from diloco.lab.sweep import Comparison
from diloco.pages.parts import Chart, Line

LOG_FROM = 8.0  # Where the largest x is so many times the least.


def charts(
  compared: Sequence[Comparison], label: str, suffix: str
) -> Iterator[Chart]:
  """Yields one chart for each axis on which variants have places
  (`Variant.at`).

  Args:
    compared: the variants of a sweep, with their differences.
    label: label of the sweep.
    suffix: suffix of the charts' names, unique among sweeps.
  """
  axes: dict[str, dict[str, list[tuple[float, Comparison]]]] = {}
  for each in compared:
    if each.difference is not None:
      for axis, line, x in each.variant.at:
        axes.setdefault(axis, {}).setdefault(line, []).append((x, each))
  for number, (axis, lines) in enumerate(axes.items()):
    xs = [x for points in lines.values() for x, _ in points]
    yield Chart(
      f'sweep-trend{suffix}-{number}',
      f'{label}: difference against {axis}',
      axis,
      'difference of the loss, % (paired by seed, 95 % interval)',
      tuple(
        _line(name, group, points)
        for group, (name, points) in enumerate(lines.items())
      ),
      log_x=min(xs) > 0 and max(xs) >= LOG_FROM * min(xs),
      notes=('Below zero is better. A point without a bar is of one seed.',),
    )


def _line(
  name: str, group: int, points: Sequence[tuple[float, Comparison]]
) -> Line:
  points = sorted(points, key=lambda point: point[0])
  half_widths = [100 * each.half_width for _, each in points]
  return Line(
    name,
    'simulated',
    tuple(float(x) for x, _ in points),
    tuple(100 * each.difference for _, each in points),
    tuple(0.0 if math.isnan(half) else half for half in half_widths),
    group,
  )
