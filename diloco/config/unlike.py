# SPDX-License-Identifier: Apache-2.0
"""The settings in which learners of one run differ: config.unlike_learners.

'1: data.batch=2, mesh.fsdp=2; 4-7: accelerator=v5p-8, mesh.fsdp=4' gives
learner 1 a batch and a mesh of its own, and learners 4 to 7 other machines. All
else is the run's. Launchers and the planner read it; a process gets what is its
own by flags.

Imports no jax.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from diloco.config import flags, run_config
from diloco.config.run_config import UNLIKE, RunConfig
from diloco.config.sections import ConfigError, nearest

# Keys of a run on how a learner makes its step, and options of `launch.main` on
# its machines; all with their types.
TYPES = {
  'data.batch': int,
  'inner.accumulate': int,
  'mesh.fsdp': int,
  'mesh.expert': int,
  'mesh.context': int,
  'mesh.tensor': int,
  'mesh.slices': int,
  'hosts': int,
  'accelerator': str,
  'gpus_per_host': int,
  'learner_cpus': int,
  'learner_memory_gib': int,
  'capacity': str,
  'reservation': str,
  'sbatch': str,
}
T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Setup:
  """How a learner is set up; equal for learners of one kind."""

  config: RunConfig  # As its processes have it.
  own: tuple[tuple[str, int | str], ...] = ()  # What is not the run's.

  @property
  def arguments(self) -> tuple[str, ...]:
    """The flags that make the run's configuration the learner's."""
    return tuple(flags.as_flags({k: v for k, v in self.own if '.' in k}))

  @property
  def machines(self) -> dict[str, int | str]:
    """Its own options of a launch."""
    return {k: v for k, v in self.own if '.' not in k}


def setups(config: RunConfig, learners: int) -> tuple[Setup, ...]:
  """Returns the setup of each learner.

  Args:
    learners: so many, by their ids.

  Raises:
    ConfigError: lists keys that may not differ, ids that the run does not have,
      and learners that can not be like that.
  """
  found, problems = {}, []
  for entry in filter(str.strip, config.unlike_learners.split(';')):
    match = re.fullmatch(r'((\d+)(?:-(\d+))?)\s*:(.+)', entry.strip())
    if not match:
      problems.append(f'{entry.strip()!r}: must be like 1: data.batch=2')
      continue
    first, last = int(match[2]), int(match[3] or match[2])
    numbers, who = range(first, last + 1), f'learner {match[1]}'
    if not numbers or last >= learners:
      problems.append(f'{who}: the run has learners 0 to {learners - 1}')
      continue
    problems += [f'{who}: has two entries'] * any(i in found for i in numbers)
    own, broken = _read(config, match[4])
    found |= dict.fromkeys(numbers, own)
    problems += [f'{who}: {each}' for each in broken]
  if problems:
    raise ConfigError([f'{UNLIKE}: {each}' for each in problems])
  return tuple(found.get(i, Setup(config)) for i in range(learners))


def _read(config: RunConfig, text: str) -> tuple[Setup, list[str]]:
  """Returns the setup of 'key=value, …', and what is wrong with it."""
  own, problems, fields = {}, [], run_config.unfold(dataclasses.asdict(config))
  # A value may have commas: 'sbatch=--partition=a,b'.
  for word in map(str.strip, re.split(r',(?=\s*[\w.]+\s*=)', text)):
    key, _, value = (part.strip() for part in word.partition('='))
    if key not in TYPES:
      problems.append(
        f'{word}: is the same for all learners{nearest(key, TYPES)}; what may '
        f'differ is {", ".join(TYPES)}'
      )
    elif TYPES[key] is int and not value.isdecimal():
      problems.append(f'{word}: must be a number')
    else:
      own[key] = TYPES[key](value)
      section, dot, name = key.partition('.')
      if dot:
        fields[section][name] = own[key]
  try:
    return Setup(run_config.build(fields), (*sorted(own.items()),)), problems
  except ConfigError as error:
    return Setup(config), [*problems, *error.problems]


def for_each_kind(
  config: RunConfig, learners: int, make: Callable[[Setup], T]
) -> list[tuple[list[int], str, T]]:
  """Returns for each kind its learners, these in words, and what is made of it.

  Args:
    learners: as of `setups`.
    make: may raise ConfigError.

  Raises:
    ConfigError: as `setups`, or all that `make` refuses, and of whom.
  """
  every, made, problems = setups(config, learners), [], []
  for setup in dict.fromkeys(every):
    ids = [i for i, each in enumerate(every) if each == setup]
    who = f'learner{"s" if ids[1:] else ""} {", ".join(_ranges(ids))}'
    try:
      made.append((ids, who, make(setup)))
    except ConfigError as error:
      prefix = f'{who}: ' if setup.own else ''
      problems += [f'{prefix}{each}' for each in error.problems]
  if problems:
    raise ConfigError(problems)
  return made


def _ranges(ids: list[int]) -> Iterator[str]:
  """Yields '0', '2-4' of 0, 2, 3, 4."""
  first = ids[0]
  for i, following in zip(ids, [*ids[1:], None]):
    if following != i + 1:
      yield f'{first}-{i}' if first < i else f'{i}'
      first = following


def tokens_per_step(config: RunConfig) -> int:
  """Returns the tokens of a step of all learners."""
  batches = (
    x.config.data.batch for x in setups(config, config.protocol.learners)
  )
  return sum(batches) * config.data.seq_len
