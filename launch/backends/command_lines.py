# SPDX-License-Identifier: Apache-2.0
"""Command lines with the addresses that only the machines themselves know.

What is fixed is quoted for a shell; what a machine fills in ("$host") is not.
"""

import dataclasses
import shlex
from collections.abc import Sequence

from diloco.metrics.workdir import EVALUATOR
from launch.job import SHARD, JobSpec, Task
from launch.program import SYNCER, host_flags


@dataclasses.dataclass(frozen=True)
class Addresses:
  """Values that only a machine itself knows, as a back end writes them."""

  address: str  # Where its process is reached.
  syncer: str = ''  # 'host:port'; not for the syncer.
  index: str = ''  # Which host of a learner it is; for learners of several.
  coordinator: str = ''  # 'host:port' where these meet.


def addressed(whole: JobSpec, role: Task, known: Addresses) -> tuple[str, ...]:
  """The flags of a role that name addresses."""
  if role.kind == EVALUATOR:  # It reads a folder, and knows no peers.
    return ()
  # Its own address, and not 0.0.0.0: no more doors than the peers need.
  own = f'--config.transport.host={known.address}'
  if role.kind == SYNCER:
    return own, f'--bind={known.address}:{whole.port}'
  if role.kind == SHARD:
    return own, f'--lead={known.syncer}'
  hosts = host_flags(
    role.resources.accelerator.hosts, known.index, known.coordinator
  )
  return own, f'--syncer={known.syncer}', *hosts


def shell_command(
  program: Sequence[str], whole: JobSpec, role: Task, known: Addresses
) -> str:
  """Returns one shell command; what is `known` is text for within "…"."""
  fixed = shlex.join([*program, '-m', role.module, *role.arguments])
  filled = (f'"{flag}"' for flag in addressed(whole, role, known))
  return ' '.join([fixed, *filled])


def exports(whole: JobSpec) -> str:
  """Returns one line of `export` for each variable of the environment."""
  return '\n'.join(
    f'export {name}={shlex.quote(value)}' for name, value in whole.environment
  )
