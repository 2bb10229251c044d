# SPDX-License-Identifier: Apache-2.0
"""Learners of several hosts: how many, which devices, and who is which.

The hosts of a learner are one computation of JAX. They meet at a coordinator,
which the first of them is; only it speaks with the syncer.
"""

import dataclasses

from diloco.config import RunConfig
from diloco.config_values import ConfigError

XLA_FLAGS = 'XLA_FLAGS'
FORCED = '--xla_force_host_platform_device_count'


def host_flags(hosts: int, host: int | str, coordinator: str) -> list[str]:
  """What one host of a learner is told; nothing where it is the only one.

  Args:
    hosts: of the learner.
    host: its number, from 0, or the text that becomes it.
    coordinator: 'host:port' where they meet, likewise.
  """
  if hosts == 1:
    return []
  return [
    f'--hosts={hosts}',
    f'--host={host}',
    f'--coordinator={coordinator}',
  ]


@dataclasses.dataclass(frozen=True)
class Processes:
  """What one learner consists of on this machine."""

  hosts: int = 1
  environment: tuple[tuple[str, str], ...] = ()  # Added to each one's.


def on_this_machine(
  config: RunConfig, asked: str, cpu_devices: bool, xla_flags: str
) -> tuple[Processes, ...]:
  """The processes of each learner of a local run.

  Args:
    config: the run; each learner has the devices of its mesh.
    asked: '2', for all learners, or '2,1', one number for each.
    cpu_devices: whether these devices are to be made out of CPU cores.
    xla_flags: what XLA_FLAGS holds already; the last of equal flags counts.

  Raises:
    ConfigError: no such numbers, or devices that they do not share evenly.
  """
  devices = config.mesh.devices
  found = []
  for learner, hosts in enumerate(_of_each(asked, config.protocol.learners)):
    if devices % hosts:
      raise ConfigError(
        [
          f'--hosts={asked}: the {hosts} of learner {learner} do not share '
          f'the devices of config.mesh evenly, which has {devices}'
        ]
      )
    forced = f'{xla_flags} {FORCED}={devices // hosts}'.strip()
    environment = ((XLA_FLAGS, forced),) if cpu_devices else ()
    found.append(Processes(hosts, environment))
  return tuple(found)


def hosts_of_all(asked: str) -> int:
  """Of every learner, where none can have a number of its own.

  Raises:
    ConfigError: it is not one number from 1.
  """
  numbers = _numbers(asked)
  if len(numbers) > 1:
    raise ConfigError(
      [f'--hosts={asked}: one number for all, but for --to=local']
    )
  return numbers[0]


def _of_each(asked: str, learners: int) -> tuple[int, ...]:
  numbers = _numbers(asked)
  if len(numbers) == 1:
    return numbers * learners
  if len(numbers) != learners:
    raise ConfigError(
      [
        f'--hosts={asked}: has {len(numbers)} numbers, and there are '
        f'{learners} learners'
      ]
    )
  return numbers


def _numbers(asked: str) -> tuple[int, ...]:
  words = asked.split(',')
  if not all(word.isdecimal() and int(word) for word in words):
    raise ConfigError(
      [f'--hosts={asked}: must be a number from 1, or such as 2,1']
    )
  return tuple(map(int, words))
