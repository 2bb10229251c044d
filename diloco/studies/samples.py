# SPDX-License-Identifier: Apache-2.0
"""Several runs of one thing: their mean, and how far they are apart."""

import statistics
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
  return statistics.fmean(values)


def spread(values: Sequence[float]) -> float | None:
  """Standard deviation of the runs; None of a single one."""
  return statistics.stdev(values) if len(values) > 1 else None
