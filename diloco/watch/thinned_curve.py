# SPDX-License-Identifier: Apache-2.0
"""Values over time in bounded memory: means over ever larger groups."""

POINTS_MAX = 400


class ThinnedCurve:
  """Points of a curve, thinned as it grows.

  Each point is the mean of equally many values. When there are too many points,
  pairs of them are merged.

  Args:
    each: values of a point at first.
    points_max: more than so many are merged to half as many; even.
  """

  def __init__(self, each: int = 1, points_max: int = POINTS_MAX):
    self._each = each
    self._points_max = points_max
    self._points: list[tuple[float, ...]] = []
    self._open: list[tuple[float, ...]] = []  # Fewer than `each`.

  def add(self, *point: float) -> None:
    """Adds a value: its time, and what was measured then."""
    self._open.append(point)
    if len(self._open) < self._each:
      return
    self._points.append(_mean(self._open))
    self._open = []
    if len(self._points) >= self._points_max:
      pairs = zip(self._points[::2], self._points[1::2])
      self._points = [_mean(pair) for pair in pairs]
      self._each *= 2

  def points(self) -> list[tuple[float, ...]]:
    """Returns all points; the last may be the mean of fewer values."""
    return [*self._points, _mean(self._open)] if self._open else self._points


def _mean(points) -> tuple[float, ...]:
  return tuple(sum(values) / len(points) for values in zip(*points))
