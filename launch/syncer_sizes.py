# SPDX-License-Identifier: Apache-2.0
"""Sizes of the syncer's machine, and of those of its shards, by the planner."""

from collections.abc import Iterator

from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.sizing import syncer_machine
from diloco.sizing.syncer_machine import SyncerMachine

# Of a model whose size only jax could tell.
UNPLANNED = 4, 16, 50


def planned(config: RunConfig) -> tuple[int, int, int]:
  """Returns CPUs, GiB of memory and GiB of disk.

  Raises:
    ConfigError: the model can not be cut as configured.
  """
  found = _machine(config)
  if found is None:
    return UNPLANNED
  return found.cpus, found.memory_gib, found.disk_gib


def notes(config: RunConfig, memory_gib: int, disk_gib: int) -> Iterator[str]:
  """Yields a line for what is below the planner's figure, or has none."""
  found = _machine(config)
  if found is None:
    yield (
      f'config.model.kind={config.model.kind}: how large it is, is not known '
      f'here; the syncer gets {memory_gib} GiB of memory and {disk_gib} GiB of '
      'disk, see --syncer_memory_gib, --storage_gib and python -m diloco.plan '
      '--config=…'
    )
    return
  for flag, got, needed in (
    ('syncer_memory_gib', memory_gib, found.memory_gib),
    ('storage_gib', disk_gib, found.disk_gib),
  ):
    if got < needed:
      said = f'the syncer takes {needed} GiB, as diloco.plan says'
      yield f'--{flag}={got}: {said}'


def _machine(config: RunConfig) -> SyncerMachine | None:
  try:
    return syncer_machine.of_config(config)
  except ValueError as error:
    raise ConfigError([str(error)]) from None
