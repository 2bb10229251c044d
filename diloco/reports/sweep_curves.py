# SPDX-License-Identifier: Apache-2.0
"""Curves of a variant over its seeds: mean losses, differences to another."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from diloco.lab import sweep
from diloco.lab.sweep import Result

LEFT_OUT = 0.1  # Of the tokens: the beginning, where losses fall at once.


@dataclasses.dataclass(frozen=True)
class Curve:
  """Means over seeds and their standard deviations, against tokens."""

  tokens: tuple[float, ...]
  means: tuple[float, ...]
  spreads: tuple[float, ...]


def mean(results: Sequence[Result]) -> Curve:
  """Returns the mean of the losses, as far as all seeds have them.

  Seeds are averaged point by point: they were evaluated at the same global
  steps, which are not quite the same numbers of tokens.
  """
  return _curve(
    [[(tokens, loss) for _, tokens, loss in each.curve] for each in results]
  )


def gap(mine: Mapping[int, Result], theirs: Mapping[int, Result]) -> Curve:
  """Relative differences of losses at equal tokens, in percent, by seed.

  Args:
    mine: results by seed.
    theirs: of the variant that they are compared with.

  Returns:
    A curve without points where no seed has both.
  """
  seeds = sorted(mine.keys() & theirs.keys())
  return _curve([_gap(mine[seed], theirs[seed]) for seed in seeds])


def _gap(mine: Result, theirs: Result) -> list[tuple[float, float]]:
  if not mine.curve or not theirs.curve:
    return []
  _, xs, ys = zip(*theirs.curve)
  from_tokens = max(LEFT_OUT * mine.curve[-1][1], xs[0])
  return [
    (tokens, 100.0 * (loss / float(np.interp(tokens, xs, ys)) - 1.0))
    for _, tokens, loss in mine.curve
    if tokens >= from_tokens
  ]


def _curve(of_seeds: Sequence[Sequence[tuple[float, float]]]) -> Curve:
  """Place by place from the end: all seeds have that one.

  Where one has diverged, nothing is shown.
  """
  shortest = min(map(len, of_seeds), default=0)
  places = [
    place
    for place in zip(*(each[len(each) - shortest :] for each in of_seeds))
    if all(math.isfinite(y) for _, y in place)
  ]
  return Curve(
    tuple(statistics.fmean(tokens for tokens, _ in each) for each in places),
    tuple(statistics.fmean(y for _, y in each) for each in places),
    tuple(
      sweep.spread([y for _, y in each]) if len(each) > 1 else 0.0
      for each in places
    ),
  )
