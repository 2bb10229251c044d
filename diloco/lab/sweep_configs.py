# SPDX-License-Identifier: Apache-2.0
"""The configurations of a sweep, checked before any of its runs starts."""

import copy
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

from diloco import config as configs
from diloco import config_reading
from diloco.config import RunConfig
from diloco.config_values import ConfigError
from diloco.lab import sweep
from diloco.lab.sweep import Variant
from diloco.metrics.workdir import Workdir

_OF_A_RUN = ('name', 'seed')  # May differ between equal runs.


def make(base: dict, rows: Sequence[Variant]) -> dict[str, RunConfig]:
  """Returns each variant's configuration, by label.

  Args:
    base: the configuration of --config, as nested plain dicts.
    rows: variants, which change flat keys of it.

  Raises:
    ConfigError: lists each problem with its variant's label.
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
  made: Mapping[str, RunConfig],
  rows: Sequence[Variant],
  seeds: int,
  workdir: pathlib.Path,
) -> None:
  """Rejects finished runs with another configuration.

  A run from before a key existed passes if its variant leaves that key alone.

  Args:
    made: configurations by label.
    rows: the variants.
    seeds: seeds of each variant.
    workdir: folder of the sweep.

  Raises:
    ConfigError: names the folders and what differs.
  """
  problems = [
    f'{run}: was made otherwise ({differs}): remove it, or use another '
    '--workdir'
    for variant in rows
    for seed in range(seeds)
    if sweep.read(workdir, variant.label, seed) is not None
    for run in [sweep.folder(workdir, variant.label, seed)]
    if (differs := _difference(made[variant.label], variant.changes, run))
  ]
  if problems:
    raise ConfigError(problems)


def _changed(base: dict, changes: Mapping[str, object]) -> dict:
  """Returns a copy with other values; unknown keys are found later."""
  nested = copy.deepcopy(base)
  for key, value in changes.items():
    *sections, last = key.split('.')
    inner = nested
    for section in sections:
      inner = inner.setdefault(section, {})
    inner[last] = value
  return nested


def _difference(
  config: RunConfig, changes: Mapping[str, object], run: pathlib.Path
) -> str:
  """Returns how a run's stored configuration differs, '' if it does not."""
  path = Workdir(run).config
  here = config_reading.flatten(_as_json(config))
  try:
    there = config_reading.flatten(json.loads(path.read_text()))
  except (OSError, ValueError, AttributeError) as error:
    return f'{path.name}: {error}'
  absent = here.keys() - there.keys() - changes.keys()
  return '; '.join(
    f'{key}={there.get(key)} there, {here.get(key)} here'
    for key in sorted(here.keys() | there.keys())
    if key not in absent
    and key not in _OF_A_RUN
    and here.get(key) != there.get(key)
  )


def _as_json(config: RunConfig) -> dict:
  """Returns the configuration as stored in a file: lists for tuples."""
  return json.loads(json.dumps(dataclasses.asdict(config)))
