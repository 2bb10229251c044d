# SPDX-License-Identifier: Apache-2.0
"""The JAX world of one learner of several hosts.

A learner is one failure unit: `jax.distributed` ends every process of it when
one is gone, and so do the connections of `transport.group`, at once. Two
learners are never in one world, and the syncer is in none.
"""

import dataclasses
import json
import secrets

import jax
import numpy as np
from jax.experimental import multihost_utils

from diloco.config_values import ConfigError
from diloco.transport import addresses, group

HEARTBEAT_S = 10  # After which a silent host is taken for dead.
SHUTDOWN_S = 10  # How long hosts wait for each other at the end.
GREETING_BYTES = 512  # Address and secret of the leading host.


@dataclasses.dataclass(frozen=True)
class World:
  """Which of a learner's processes this one is.

  Attributes:
    hosts: how many there are.
    host: what the launcher calls this one, from 0.
    coordinator: host:port at which host 0 has the coordination service.
  """

  hosts: int
  host: int
  coordinator: str

  def __post_init__(self):
    problems = []
    if self.hosts < 1:
      problems.append(f'--hosts={self.hosts}: must be at least 1')
    elif not 0 <= self.host < self.hosts:
      problems.append(
        f'--host={self.host}: must be in 0 … {self.hosts - 1}, as --hosts='
        f'{self.hosts}'
      )
    if self.hosts > 1 and not self.coordinator:
      problems.append(
        f'--coordinator: is missing; with --hosts={self.hosts} it is the '
        'host:port of host 0'
      )
    if self.coordinator:
      try:
        addresses.split(self.coordinator)
      except addresses.BadAddress as error:
        problems.append(f'--coordinator={self.coordinator}: {error}')
    if problems:
      raise ConfigError(problems)

  @property
  def index(self) -> int:
    """This process among the hosts, once it has joined.

    On TPUs the runtime numbers processes by where their chips are, whatever
    the launcher called them.
    """
    return jax.process_index() if self.hosts > 1 else 0

  @property
  def leads(self) -> bool:
    """Whether it speaks with the syncer, once it has joined."""
    return self.index == 0

  def join(self) -> None:
    """Becomes part of the world; before any device is asked for."""
    if self.hosts > 1:
      # It would take SIGTERM for itself, and leave the learner without.
      jax.config.update('jax_enable_preemption_service', False)
      jax.distributed.initialize(
        self.coordinator,
        self.hosts,
        self.host,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=SHUTDOWN_S,
      )

  def listen(self) -> group.Listener:
    """On the leading host: tells the others where, and waits for nobody."""
    secret = secrets.token_hex(16)
    own = group.own_address(addresses.split(self.coordinator)[0])
    listener = group.Listener(own, secret.encode())
    _spread([*listener.address, secret])
    return listener

  def connect(self):
    """On the others: a connection to the leading host."""
    host, port, secret = _spread(None)
    return group.connect((host, port), secret.encode())


def _spread(greeting: list | None) -> list:
  """What the leading host says, at every host; all of them call it.

  By the devices' own collectives: whoever is in this world may know.
  """
  text = json.dumps(greeting).encode().ljust(GREETING_BYTES)
  sent = np.frombuffer(text, np.uint8)
  heard = multihost_utils.broadcast_one_to_all(sent)
  return json.loads(np.asarray(heard).tobytes())
