# SPDX-License-Identifier: Apache-2.0
"""Reads the results of a sweep, and makes curves of them."""

import dataclasses
import math
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from diloco.sweeps import sweep
from diloco.sweeps.sweep import SeedResult, Variant

SEED = re.compile(r'seed-(\d+)')
CurvePlace = tuple[int, float, float]  # Global step, tokens, y.
SAME_STEP = 0.01  # Of a run's steps: no further apart, it is one place.
LEFT_OUT = 0.1  # Of the tokens: the beginning, where losses fall at once.


@dataclasses.dataclass(frozen=True)
class RecordedSweep:
  """The results found of a sweep."""

  label: str  # Distinguishes it from others on the page.
  folder: pathlib.Path
  variants: tuple[Variant, ...]  # In the order of the sweep, as far as known.
  # Results by variant's label and seed.
  found: Mapping[str, Mapping[int, SeedResult]]
  # (label, seed) of runs that were begun and have no result.
  missing: tuple[tuple[str, int], ...]
  gaps: tuple[str, ...]  # Sentences on what is missing.


def is_sweep(folder: pathlib.Path) -> bool:
  """Returns True for the folder of a sweep, or of one run of the lab."""
  return (folder / sweep.RESULT).exists() or bool(_seeds(folder))


def read(folder: pathlib.Path, label: str) -> RecordedSweep:
  """A folder of a sweep, of real runs or the lab's, or of one of its runs.

  Raises:
    BadResult: a file is not what a sweep writes.
  """
  if (folder / sweep.RESULT).exists():
    alone = Variant(folder.name, {})
    result = sweep.read_from(folder)
    return RecordedSweep(
      label, folder, (alone,), {alone.label: {0: result}}, (), ()
    )
  gaps = []
  seeds = _seeds(folder)
  variants = sweep.read_variants(folder)
  if variants is None:
    gaps.append(
      f'{folder / sweep.VARIANTS} is missing: it is not known what was to be '
      'compared with what. The command that made the sweep writes it, and '
      'makes no finished run again.'
    )
    variants = [Variant(name, {}) for name in sorted(seeds)]
  known = {sweep.folder(folder, v.label, 0).parent.name for v in variants}
  variants += [Variant(n, {}) for n in sorted(seeds) if n not in known]
  found, missing = {}, []
  for variant in variants:
    name = sweep.folder(folder, variant.label, 0).parent.name
    for seed, path in seeds.get(name, {}).items():
      if (path / sweep.RESULT).exists():
        found.setdefault(variant.label, {})[seed] = sweep.read_from(path)
      else:
        missing.append((variant.label, seed))
  return RecordedSweep(
    label, folder, tuple(variants), found, tuple(missing), tuple(gaps)
  )


def _seeds(folder: pathlib.Path) -> dict[str, dict[int, pathlib.Path]]:
  """Folders of runs by the name of the variant's folder and seed."""
  found: dict[str, dict[int, pathlib.Path]] = {}
  for path in folder.glob('*/seed-*'):
    if (match := SEED.fullmatch(path.name)) and path.is_dir():
      found.setdefault(path.parent.name, {})[int(match[1])] = path
  return {name: dict(sorted(each.items())) for name, each in found.items()}


@dataclasses.dataclass(frozen=True)
class SweepCurve:
  """Means over seeds and their standard deviations, against tokens."""

  tokens: tuple[float, ...]
  means: tuple[float, ...]
  spreads: tuple[float, ...]


def mean(results: Sequence[SeedResult]) -> SweepCurve:
  """Returns the mean of the losses, as far as all seeds have them.

  The lab evaluates all seeds at the same global steps, which are not quite the
  same numbers of tokens: they are averaged point by point. Real runs are
  evaluated whenever the evaluator is free: their losses are interpolated.
  """
  return _curve([each.curve for each in results])


def gap(
  mine: Mapping[int, SeedResult], theirs: Mapping[int, SeedResult]
) -> SweepCurve:
  """Relative differences of losses at equal tokens, in percent, by seed.

  Args:
    mine: results by seed.
    theirs: of the variant that they are compared with.

  Returns:
    A curve without points where no seed has both.
  """
  seeds = sorted(mine.keys() & theirs.keys())
  return _curve([_gap(mine[seed], theirs[seed]) for seed in seeds])


def _gap(mine: SeedResult, theirs: SeedResult) -> list[CurvePlace]:
  if not mine.curve or not theirs.curve:
    return []
  _, xs, ys = zip(*theirs.curve)
  from_tokens = max(LEFT_OUT * mine.curve[-1][1], xs[0])
  return [
    (step, tokens, 100.0 * (loss / float(np.interp(tokens, xs, ys)) - 1.0))
    for step, tokens, loss in mine.curve
    if tokens >= from_tokens
  ]


def _curve(of_seeds: Sequence[Sequence[CurvePlace]]) -> SweepCurve:
  """Goes place by place from the end: all seeds have that one.

  Where one has diverged, nothing is shown.
  """
  shortest = min(map(len, of_seeds), default=0)
  ends = [each[len(each) - shortest :] for each in of_seeds]
  if not _are_at_equal_steps(ends):
    ends = _at_equal_tokens(of_seeds)
  places = [
    [(tokens, y) for _, tokens, y in place]
    for place in zip(*ends)
    if all(math.isfinite(y) for _, _, y in place)
  ]
  return SweepCurve(
    tuple(statistics.fmean(tokens for tokens, _ in each) for each in places),
    tuple(statistics.fmean(y for _, y in each) for each in places),
    tuple(
      sweep.spread([y for _, y in each]) if len(each) > 1 else 0.0
      for each in places
    ),
  )


def _are_at_equal_steps(of_seeds: Sequence[Sequence[CurvePlace]]) -> bool:
  """Returns False if the places of one seed are not those of another.

  The last ones are the ends of the runs.
  """
  for place in list(zip(*of_seeds))[:-1]:
    steps = [step for step, _, _ in place]
    last = max(each[-1][0] for each in of_seeds)
    if max(steps) - min(steps) > SAME_STEP * last:
      return False
  return True


def _at_equal_tokens(
  of_seeds: Sequence[Sequence[CurvePlace]],
) -> list[list[CurvePlace]]:
  """Returns all seeds at as many tokens, and then their ends.

  There are as many places as the seed with the fewest has, at most.
  """
  first = max(each[0][1] for each in of_seeds)
  last = min(each[-1][1] for each in of_seeds)
  fewest = min(of_seeds, key=len)
  at = sorted({max(tokens, first) for _, tokens, _ in fewest if tokens < last})
  found = []
  for each in of_seeds:
    _, xs, ys = zip(*each)
    values = np.interp(at, xs, ys)
    found.append([(0, x, float(y)) for x, y in zip(at, values)] + [each[-1]])
  return found
