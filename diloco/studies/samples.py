# SPDX-License-Identifier: Apache-2.0
"""Several runs of one thing: their mean, and how far they are apart."""

import statistics
from collections.abc import Sequence


def said(runs: int) -> str:
  """The note that tells what mean and spread are of."""
  if runs == 1:
    return 'One run: no spread.'
  return f'Means over {runs} runs (seeds) ± their standard deviation.'


def mean(values: Sequence[float]) -> float:
  return statistics.fmean(values)


def spread(values: Sequence[float]) -> float | None:
  """Standard deviation of the runs; None of a single one."""
  return statistics.stdev(values) if len(values) > 1 else None
