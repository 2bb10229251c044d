# SPDX-License-Identifier: Apache-2.0
"""The JAX process group of one learner of several hosts.

A learner is one failure unit: `jax.distributed` ends all of its processes when
one is gone, and the connections of `transport.group` do so at once. Two
learners are never in one group, and the syncer is in none.

JAX's coordination service does not authenticate processes. So the hosts first
meet and prove to each other that they have the learner's secret; only then does
host 0 start the service, at an address that it tells only to them.
"""

import dataclasses
import json

import jax
import numpy as np
from jax.experimental import multihost_utils

from diloco.config_values import ConfigError
from diloco.runtime.meeting import Meeting, OnLost, attend, convene
from diloco.transport import addresses, group

HEARTBEAT_S = 10  # After this, a silent host is taken for dead.
SHUTDOWN_S = 10  # How long hosts wait for each other at the end.
GREETING_BYTES = 512  # Address of the leading host.


@dataclasses.dataclass(frozen=True)
class World:
  """The place of this process among a learner's processes.

  Attributes:
    hosts: number of processes.
    host: the launcher's number of this process, from 0.
    coordinator: host:port at which host 0 meets the others.
    own: address or name of this machine for its peers; see `listens_at`.
    secret: secret that only this learner's hosts have.
  """

  hosts: int
  host: int
  coordinator: str
  own: str = '127.0.0.1'
  secret: bytes = dataclasses.field(default=b'', repr=False)

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
      problems += _wrong_coordinator(self.coordinator)
    if problems:
      raise ConfigError(problems)

  @property
  def index(self) -> int:
    """Index of this process among the hosts, once it has joined.

    On TPUs the runtime numbers processes by the location of their chips,
    independently of the launcher's numbers.
    """
    return jax.process_index() if self.hosts > 1 else 0

  @property
  def leads(self) -> bool:
    """True if this process speaks with the syncer; valid once it has joined."""
    return self.index == 0

  @property
  def listens_at(self) -> str:
    """The IP literal at which this process listens for the other hosts.

    It is the coordinator's own address if that is a literal of this machine; a
    name may mean loopback on the machine that has it.

    Raises:
      HostUnknown: a name does not resolve.
    """
    host, _ = addresses.split(self.coordinator)
    if addresses.is_literal(host) and (
      self.host == 0 or addresses.is_loopback(host)
    ):
      return host
    if not addresses.is_loopback(self.own):
      return addresses.routable(self.own)
    return group.own_address(addresses.resolve(host))

  def join(self, on_lost: OnLost) -> Meeting | None:
    """Joins the process group; call it before any device is used.

    Args:
      on_lost: called on a thread, once, if another host ends before the meeting
        is closed. It must end the process: JAX may block for ever.

    Returns:
      The meeting, to be closed once this host is connected to the others.

    Raises:
      GroupLost: not all hosts came, or one does not have the secret.
      HostUnknown: a name does not resolve.
    """
    if self.hosts == 1:
      return None
    if self.host == 0:
      met = convene(
        self.listens_at,
        addresses.split(self.coordinator)[1],
        self.secret,
        self.hosts - 1,
        on_lost,
      )
    else:
      at = addresses.split(self.coordinator)
      met = attend(at, self.secret, self.host, on_lost)
    # It would take SIGTERM for itself, and the learner would not see it.
    jax.config.update('jax_enable_preemption_service', False)
    try:
      jax.distributed.initialize(
        met.jax_at,
        self.hosts,
        self.host,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=SHUTDOWN_S,
        coordinator_bind_address=met.jax_at,  # Default: all addresses.
      )
    except RuntimeError as error:
      first, *_ = str(error).splitlines()
      raise group.GroupLost(f'jax.distributed at {met.jax_at}: {first}') from (
        error
      )
    return met

  def listen(self) -> group.Listener:
    """Listens on the leading host and tells the others where; does not
    block.
    """
    listener = group.Listener(self.listens_at, self.secret)
    _spread(list(listener.address))
    return listener

  def connect(self):
    """Connects another host to the leading host."""
    host, port = _spread(None)
    return group.connect((host, port), self.secret)


def _wrong_coordinator(coordinator: str) -> list[str]:
  try:
    host, port = addresses.split(coordinator)
  except addresses.BadAddress as error:
    return [f'--coordinator={coordinator}: {error}']
  if ':' in host:
    return [f'--coordinator={coordinator}: hosts meet by IPv4 only']
  if not port:
    return [f'--coordinator={coordinator}: port 0 can not be connected to']
  return []


def _spread(greeting: list | None) -> list:
  """Broadcasts from the leading host; all hosts must call it.

  It uses the devices' own collectives: no secret may be sent here.
  """
  text = json.dumps(greeting).encode().ljust(GREETING_BYTES)
  sent = np.frombuffer(text, np.uint8)
  heard = multihost_utils.broadcast_one_to_all(sent)
  return json.loads(np.asarray(heard).tobytes())
