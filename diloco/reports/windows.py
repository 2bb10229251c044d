# SPDX-License-Identifier: Apache-2.0
"""Many values as few: means in windows of equal width."""

import math
from collections.abc import Iterable

WINDOWS_MAX = 60  # Of a chart's width.
WINDOWS_MIN = 4

Point = tuple[float, float]


def fitting(values: int, each: int) -> int:
  """Returns a number of windows with about `each` values in each."""
  return min(WINDOWS_MAX, max(WINDOWS_MIN, values // each))


def means(
  values: Iterable[tuple[float, float, float]],
  until: float,
  windows: int,
) -> list[Point]:
  """Returns (x, weighted mean) of each non-empty window of [0, until].

  Args:
    values: (x, value, weight); those that are not finite are left out.
    until: end of the last window.
    windows: number of windows, of equal width.

  Returns:
    x is the weighted mean of the window's.
  """
  if until <= 0:
    return []
  sums = [[0.0, 0.0, 0.0] for _ in range(windows)]
  for x, value, weight in values:
    if not math.isfinite(value) or weight <= 0:
      continue
    window = sums[min(windows - 1, max(0, int(windows * x / until)))]
    window[0] += weight
    window[1] += weight * x
    window[2] += weight * value
  return [(x / many, y / many) for many, x, y in sums if many]
