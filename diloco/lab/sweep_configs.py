# SPDX-License-Identifier: Apache-2.0
"""The configurations of a sweep, checked before any of its runs begins."""

import copy
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from diloco import config as configs
from diloco import config_reading
from diloco.config import RunConfig
from diloco.config_values import ConfigError
from diloco.lab import sweep
from diloco.lab.sweep import Variant
from diloco.metrics.workdir import Workdir

_OF_A_RUN = ('name', 'seed')  # May differ between runs that count as the same.


def make(base: Mapping, rows: Sequence[Variant]) -> dict[str, RunConfig]:
  """Each variant's configuration, by label.

  Args:
    base: nested, as --config gave it.
    rows: change flat keys of it.

  Raises:
    ConfigError: of all variants, each problem with the variant's label.
  """
  made, problems = {}, []
  for variant in rows:
    try:
      made[variant.label] = configs.build(_changed(base, variant.changes))
    except ConfigError as error:
      problems += [f'sweep: {variant.label!r}: {p}' for p in error.problems]
  if problems:
    raise ConfigError(problems)
  return made


def check(
  made: Mapping[str, RunConfig], seeds: int, workdir: pathlib.Path
) -> None:
  """Refuses to take a finished run for one that is configured otherwise.

  Args:
    made: configurations by label.
    seeds: of each variant.
    workdir: of the sweep.

  Raises:
    ConfigError: names the folders and what differs.
  """
  problems = [
    f'{run}: was made otherwise ({differs}): remove it, or use another '
    '--workdir'
    for label, config in made.items()
    for seed in range(seeds)
    if sweep.read(workdir, label, seed) is not None
    for run in [sweep.folder(workdir, label, seed)]
    if (differs := _difference(config, run))
  ]
  if problems:
    raise ConfigError(problems)


def _changed(base: Mapping, changes: Mapping[str, object]) -> dict:
  """A copy with other values; keys that are unknown are found later."""
  nested = copy.deepcopy(dict(base))
  for key, value in changes.items():
    *sections, last = key.split('.')
    inner = nested
    for section in sections:
      inner = inner.setdefault(section, {})
    inner[last] = value
  return nested


def _difference(config: RunConfig, run: pathlib.Path) -> str:
  """What differs from the configuration in the folder of a run; or ''."""
  path = Workdir(run).config
  try:
    other = configs.restore(json.loads(path.read_text()))
  except (OSError, ValueError) as error:  # ConfigError is a ValueError.
    return f'{path.name}: {error}'
  return '; '.join(_differing_keys(config, other))


def _differing_keys(here: RunConfig, there: RunConfig) -> Iterator[str]:
  mine, theirs = (
    config_reading.flatten(dataclasses.asdict(each)) for each in (here, there)
  )
  for key in sorted(mine):
    if key not in _OF_A_RUN and mine[key] != theirs[key]:
      yield f'{key}={theirs[key]} there, {mine[key]} here'
