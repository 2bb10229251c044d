# SPDX-License-Identifier: Apache-2.0
"""Command lines with the addresses that only the machines themselves know.

What is fixed is quoted for a shell; what a machine fills in ("$host") is not.
"""

import dataclasses
import shlex
from collections.abc import Sequence

from launch.hosts import host_flags
from launch.launch import SYNCER, Launch, Placed

COORDINATOR_PORT = 8476  # Of a learner's first host; also JAX's own choice.


@dataclasses.dataclass(frozen=True)
class Known:
  """What only a machine itself knows, in the way a back end writes that."""

  address: str  # Where its process is reached.
  syncer: str = ''  # 'host:port'; not for the syncer.
  index: str = ''  # Which host of a learner it is; for learners of several.
  coordinator: str = ''  # 'host:port' where these meet.


def addressed(whole: Launch, role: Placed, known: Known) -> tuple[str, ...]:
  """The flags of a role that name addresses.

  Args:
    whole: for the port.
    role: of which process.
    known: to its machine.
  """
  # Its own address, and not 0.0.0.0: no more doors than the peers need.
  own = f'--config.transport.host={known.address}'
  if role.kind == SYNCER:
    return own, f'--bind={known.address}:{whole.port}'
  hosts = host_flags(
    role.resources.accelerator.hosts, known.index, known.coordinator
  )
  return own, f'--syncer={known.syncer}', *hosts


def shell_command(
  program: Sequence[str], whole: Launch, role: Placed, known: Known
) -> str:
  """One shell command; what is `known` are texts for within "…"."""
  fixed = shlex.join([*program, '-m', role.module, *role.arguments])
  filled = (f'"{flag}"' for flag in addressed(whole, role, known))
  return ' '.join([fixed, *filled])


def exports(whole: Launch) -> str:
  """One line of `export` for each variable of the environment."""
  return '\n'.join(
    f'export {name}={shlex.quote(value)}' for name, value in whole.environment
  )
