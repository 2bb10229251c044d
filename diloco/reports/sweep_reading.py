# SPDX-License-Identifier: Apache-2.0
"""Reads the results of a sweep of the lab, whole or still being made."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping

from diloco.lab import sweep
from diloco.lab.sweep import Result, Variant
from diloco.reports.setup import NoReport

SEED = re.compile(r'seed-(\d+)')


@dataclasses.dataclass(frozen=True)
class RecordedSweep:
  """What was found of a sweep.

  Attributes:
    label: distinguishes it from others on the page.
    variants: in the order of the sweep, as far as known.
    found: results by variant's label and seed.
    missing: (label, seed) of runs that were begun and have no result.
    gaps: sentences on what is missing.
  """

  label: str
  folder: pathlib.Path
  variants: tuple[Variant, ...]
  found: Mapping[str, Mapping[int, Result]]
  missing: tuple[tuple[str, int], ...]
  gaps: tuple[str, ...]


def is_sweep(folder: pathlib.Path) -> bool:
  """Returns True if the lab wrote the folder: a sweep, or one run."""
  return (folder / sweep.RESULT).exists() or bool(_seeds(folder))


def read(folder: pathlib.Path, label: str) -> RecordedSweep:
  """A folder that the lab wrote into.

  Raises:
    NoReport: a file is not what the lab writes.
  """
  if (folder / sweep.RESULT).exists():
    alone = Variant(folder.name, {})
    result = _result(folder)
    return RecordedSweep(
      label, folder, (alone,), {alone.label: {0: result}}, (), ()
    )
  gaps = []
  seeds = _seeds(folder)
  variants = _variants(folder)
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
        found.setdefault(variant.label, {})[seed] = _result(path)
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


def _variants(folder: pathlib.Path) -> list[Variant] | None:
  try:
    return sweep.read_variants(folder)
  except ValueError as error:
    raise NoReport(str(error)) from None


def _result(path: pathlib.Path) -> Result:
  try:
    return sweep.read_from(path)
  except ValueError as error:
    raise NoReport(str(error)) from None
