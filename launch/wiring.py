# SPDX-License-Identifier: Apache-2.0
"""Command lines with the addresses that only the machines themselves know.

What is fixed is quoted for a shell; what a machine fills in ("$host") is not.
"""

import shlex
from collections.abc import Sequence

from launch.launch import SYNCER, Launch, Placed


def addressed(
  whole: Launch, role: Placed, host: str, syncer: str
) -> tuple[str, ...]:
  """The flags of a role that name addresses.

  Args:
    whole: for the port.
    role: of which process.
    host: where the process itself is reached, as the back end writes that.
    syncer: 'host:port' of the syncer, likewise; unused for the syncer.
  """
  # Its own address, and not 0.0.0.0: no more doors than the peers need.
  own = f'--config.transport.host={host}'
  if role.kind == SYNCER:
    return own, f'--bind={host}:{whole.port}'
  return own, f'--syncer={syncer}'


def shell_command(
  program: Sequence[str], whole: Launch, role: Placed, host: str, syncer: str
) -> str:
  """One shell command; `host` and `syncer` are texts for within "…"."""
  fixed = shlex.join([*program, '-m', role.module, *role.arguments])
  filled = (f'"{flag}"' for flag in addressed(whole, role, host, syncer))
  return ' '.join([fixed, *filled])


def exports(whole: Launch) -> str:
  """One line of `export` for each variable of the environment."""
  return '\n'.join(
    f'export {name}={shlex.quote(value)}' for name, value in whole.environment
  )
