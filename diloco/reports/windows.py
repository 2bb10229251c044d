# SPDX-License-Identifier: Apache-2.0
"""Many values as few: means in windows of equal width."""

import math
from collections.abc import Iterable

WINDOWS_MAX = 60  # Of a chart's width.
WINDOWS_MIN = 4

Point = tuple[float, float]


def fitting(values: int, each: int) -> int:
  """How many windows there are to be, with about so many values in each."""
  return min(WINDOWS_MAX, max(WINDOWS_MIN, values // each))


def means(
  values: Iterable[tuple[float, float, float]],
  until: float,
  windows: int,
) -> list[Point]:
  """(x, weighted mean) of each window of [0, until] in which there are some.

  Args:
    values: (x, value, weight); those that are not finite are left out.
    until: end of the last window.
    windows: how many, of equal width.

  Returns:
    x is the weighted mean of theirs.
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
