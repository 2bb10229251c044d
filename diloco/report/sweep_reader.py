# SPDX-License-Identifier: Apache-2.0
"""Reads the results of a sweep, and makes curves of them."""

import dataclasses
import math
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from diloco.lab import sweep
from diloco.lab.sweep import SeedResult, Variant

SEED = re.compile(r'seed-(\d+)')
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
  """Returns True if the lab wrote the folder: a sweep, or one run."""
  return (folder / sweep.RESULT).exists() or bool(_seeds(folder))


def read(folder: pathlib.Path, label: str) -> RecordedSweep:
  """A folder that the lab wrote into.

  Raises:
    BadResult: a file is not what the lab writes.
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

  Seeds are averaged point by point: they were evaluated at the same global
  steps, which are not quite the same numbers of tokens.
  """
  return _curve(
    [[(tokens, loss) for _, tokens, loss in each.curve] for each in results]
  )


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


def _gap(mine: SeedResult, theirs: SeedResult) -> list[tuple[float, float]]:
  if not mine.curve or not theirs.curve:
    return []
  _, xs, ys = zip(*theirs.curve)
  from_tokens = max(LEFT_OUT * mine.curve[-1][1], xs[0])
  return [
    (tokens, 100.0 * (loss / float(np.interp(tokens, xs, ys)) - 1.0))
    for _, tokens, loss in mine.curve
    if tokens >= from_tokens
  ]


def _curve(of_seeds: Sequence[Sequence[tuple[float, float]]]) -> SweepCurve:
  """Place by place from the end: all seeds have that one.

  Where one has diverged, nothing is shown.
  """
  shortest = min(map(len, of_seeds), default=0)
  places = [
    place
    for place in zip(*(each[len(each) - shortest :] for each in of_seeds))
    if all(math.isfinite(y) for _, y in place)
  ]
  return SweepCurve(
    tuple(statistics.fmean(tokens for tokens, _ in each) for each in places),
    tuple(statistics.fmean(y for _, y in each) for each in places),
    tuple(
      sweep.spread([y for _, y in each]) if len(each) > 1 else 0.0
      for each in places
    ),
  )
