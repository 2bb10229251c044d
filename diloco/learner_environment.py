# SPDX-License-Identifier: Apache-2.0
"""Checks and sets a learner's environment variables, before jax reads them.

A learner trains on an accelerator and exchanges through jax's CPU client, so it
needs both. It is a JAX process group of its own, never part of a larger one.
"""

import math
from collections.abc import Iterator, Mapping

from diloco.config_values import ConfigError

PLATFORMS = 'JAX_PLATFORMS'
# By which a launcher lets the hosts of one learner know each other; made anew
# at each start, beside the token of the run.
GROUP_SECRET = 'DILOCO_GROUP_SECRET'
CPU = 'cpu'
WORLD_OF_SLICES = 'MEGASCALE_'  # libtpu joins slices that have these.
# Shares of a GPU's memory that jax may take; the older name, and the newer.
FRACTIONS = ('XLA_PYTHON_CLIENT_MEM_FRACTION', 'XLA_CLIENT_MEM_FRACTION')
PREALLOCATE = 'XLA_PYTHON_CLIENT_PREALLOCATE'
TRUTHS = ('true', 'false', '1', '0')


def check(environment: Mapping[str, str]) -> None:
  """Refuses what a learner could not train with, or not alone.

  Raises:
    ConfigError: names each variable, and what would be right.
  """
  problems = [
    *_platforms(environment.get(PLATFORMS, '')),
    *_world(environment),
    *_memory(environment),
  ]
  if problems:
    raise ConfigError(problems)


def check_backend(environment: Mapping[str, str], backend: str) -> None:
  """Refuses the CPU where an accelerator was asked for: jax says nothing.

  Args:
    environment: the process's.
    backend: `jax.default_backend()`.

  Raises:
    ConfigError: what was asked for first is not installed.
  """
  value = environment.get(PLATFORMS, '')
  first = value.partition(',')[0]
  if backend == CPU and first not in ('', CPU):
    raise ConfigError(
      [
        f'{PLATFORMS}={value}: jax has no {first!r} here and would train on '
        f"the CPU; install the package's extra for it (such as cuda12), or "
        f'make it {PLATFORMS}={CPU}'
      ]
    )


def _platforms(value: str) -> Iterator[str]:
  """Empty or not set: jax takes what there is, and the CPU's client too."""
  names = [name for name in value.split(',') if name]
  if not names or names == [CPU]:
    return
  others = [name for name in names if name != CPU]
  right = f'{PLATFORMS}={",".join([*others, CPU])}'
  if CPU not in names:
    yield (
      f'{PLATFORMS}={value}: a learner exchanges through the CPU client too; '
      f'make it {right}'
    )
  elif names[0] == CPU:
    yield (
      f'{PLATFORMS}={value}: a learner trains on the first, the CPU; make it '
      f'{right}, or {PLATFORMS}={CPU}'
    )


def _world(environment: Mapping[str, str]) -> Iterator[str]:
  for name in sorted(environment):
    if name.startswith(WORLD_OF_SLICES):
      yield (
        f'{name}: joins slices to one JAX world, and a learner is one by '
        'itself, of one slice: unset it, and start a learner for each slice'
      )


def _memory(environment: Mapping[str, str]) -> Iterator[str]:
  for name in FRACTIONS:
    value = environment.get(name)
    if value is not None and not 0 < _number(value) <= 1:
      yield f'{name}={value}: must be a share of a GPU, above 0 and at most 1'
  value = environment.get(PREALLOCATE)
  if value is not None and value.lower() not in TRUTHS:
    yield f'{PREALLOCATE}={value}: must be one of {", ".join(TRUTHS)}'


def _number(text: str) -> float:
  try:
    return float(text)
  except ValueError:
    return math.nan
