# SPDX-License-Identifier: Apache-2.0
"""Command lines with the addresses that only the machines themselves know.

What is fixed is quoted for a shell; what a machine fills in ("$host") is not.
"""

import dataclasses
import shlex
from collections.abc import Sequence

from diloco.metrics.workdir import EVALUATOR
from diloco.monitoring import monitor_flags
from launch.job import SHARD, JobSpec, Task
from launch.program import SYNCER, host_flags


@dataclasses.dataclass(frozen=True)
class Addresses:
  """Values that only a machine itself knows, as a back end writes them."""

  address: str  # Where its process is reached.
  syncer: str = ''  # 'host:port'; not for the syncer.
  index: str = ''  # Which host of a learner it is; for learners of several.
  coordinator: str = ''  # 'host:port' where these meet.
  learner: str = ''  # Its id, where one command line is for several.


def addressed(whole: JobSpec, role: Task, known: Addresses) -> tuple[str, ...]:
  """The flags of a role that name addresses."""
  metrics = tuple(_metrics(whole, role, known))
  if role.kind == EVALUATOR:  # It reads a folder, and knows no peers.
    return metrics
  # Its own address, and not 0.0.0.0: no more doors than the peers need.
  own = f'--config.transport.host={known.address}'
  if role.kind == SYNCER:
    return own, f'--bind={known.address}:{whole.port}', *metrics
  if role.kind == SHARD:
    return own, f'--lead={known.syncer}', *metrics
  hosts = host_flags(
    role.resources.accelerator.hosts, known.index, known.coordinator
  )
  return own, f'--syncer={known.syncer}', *hosts, *metrics


def _metrics(whole: JobSpec, role: Task, known: Addresses) -> list[str]:
  if not whole.metrics_port:
    return []
  port = whole.metrics_port_of(role)
  if known.learner:
    port = f'$(({port - role.learner} + {known.learner}))'
  return monitor_flags.arguments(known.address, port)


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
