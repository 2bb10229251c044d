# SPDX-License-Identifier: Apache-2.0
"""The configurations of a sweep, and finished runs that have another."""

import copy
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

from diloco.config import flags, parsing, run_config
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import Workdir
from diloco.sweeps import sweep
from diloco.sweeps.sweep import Variant

_OF_A_RUN = ('name', 'seed')  # May differ between equal runs.


def make_configs(base: dict, rows: Sequence[Variant]) -> dict[str, RunConfig]:
  """Returns each variant's configuration, by label.

  Args:
    base: the configuration of --config, as nested plain dicts.

  Raises:
    ConfigError: lists each problem with its variant's label.
  """
  made, problems = {}, []
  for variant in rows:
    try:
      made[variant.label] = run_config.build(_changed(base, variant.changes))
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
  of_processes: bool = False,
) -> None:
  """Rejects finished runs with another configuration, or of another kind.

  A run from before a key existed passes if its variant leaves that key alone.

  Args:
    of_processes: whether the sweep's runs are real ones, not the lab's.

  Raises:
    ConfigError: names the folders and what differs.
  """
  problems = [
    f'{run}: was made otherwise ({differs}): remove it, or use another '
    '--workdir'
    for variant in rows
    for seed in range(seeds)
    for run in [sweep.folder(workdir, variant.label, seed)]
    if sweep.read(workdir, variant.label, seed) is not None
    or is_over(Workdir(run))
    if (
      differs := _other_kind(run, of_processes)
      or _difference(made[variant.label], variant.changes, run)
    )
  ]
  if problems:
    raise ConfigError(problems)


def is_over(workdir: Workdir) -> bool:
  """Returns True for a run of processes that has come to its end."""
  return workdir.summary.exists() and workdir.evaluation.exists()


def arguments(variant: Variant, seed: int) -> list[str]:
  """Returns the flags that give a process the configuration of one run."""
  changes = [f'--config.{key}={_text(x)}' for key, x in variant.changes.items()]
  return [*flags.arguments(), *changes, f'--config.seed={seed}']


def _text(value) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)


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


def _other_kind(run: pathlib.Path, of_processes: bool) -> str:
  """Returns which kind of run a folder holds, '' if it is the one asked for."""
  if Workdir(run).pids.exists() == of_processes:
    return ''
  return 'in the lab' if of_processes else 'by processes'


def _difference(
  config: RunConfig, changes: Mapping[str, object], run: pathlib.Path
) -> str:
  """Returns how a run's stored configuration differs, '' if it does not."""
  path = Workdir(run).config
  here = parsing.flatten(_as_json(config))
  try:
    there = parsing.flatten(json.loads(path.read_text()))
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
