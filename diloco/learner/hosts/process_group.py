# SPDX-License-Identifier: Apache-2.0
"""The JAX process group of one learner, and the rendezvous of its hosts.

A learner is one failure unit: `jax.distributed` ends all of its processes when
one is gone, and the connections between its hosts do so at once. Two learners
are never in one group, and the syncer is in none.

JAX's coordination service does not authenticate processes. So the hosts first
meet: host 0, which leads, listens at the coordinator's address, each other host
connects, and both sides prove that they have the learner's secret. Only then
does host 0 start the service, at an address that it tells only to them. The
same connections carry its orders until the learner ends.
"""

import dataclasses
import queue
import secrets
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from diloco.config.sections import ConfigError
from diloco.learner.hosts.host_group import HostGroup
from diloco.protocol import host_messages
from diloco.transport import host_channel, sockets
from diloco.transport.host_channel import GroupLost, HostConnection

TOLD_BYTES = 128  # A secret, and an address.
MEET_S = 300.0  # Machines of a slice may come up minutes apart.
HEARTBEAT_S = 10  # After this, a silent host is taken for dead.
SHUTDOWN_S = 10  # How long hosts wait for each other at the end.
OnLost = Callable[[GroupLost], None]


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
  """The place of this process among a learner's processes.

  Attributes:
    hosts: number of processes.
    host: the launcher's number of this process, from 0.
    coordinator: host:port at which host 0 meets the others.
    own: address or name of this machine for its peers; see `listens_at`.
    secret: secret that only this learner's hosts have.
    service: host:port of JAX's service; '': host 0 serves.
  """

  hosts: int
  host: int
  coordinator: str
  own: str = '127.0.0.1'
  secret: bytes = dataclasses.field(default=b'', repr=False)
  service: str = ''

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
  def listens_at(self) -> str:
    """The IP literal at which host 0 listens for the other hosts.

    It is the coordinator's own address if that is a literal of this machine; a
    name may mean loopback on the machine that has it.

    Raises:
      HostUnknown: a name does not resolve.
    """
    host, _ = sockets.split(self.coordinator)
    if sockets.is_literal(host):
      return host
    if not sockets.is_loopback(self.own):
      return sockets.routable(self.own)
    return host_channel.own_address(sockets.resolve(host))

  def join(self, on_lost: OnLost) -> HostGroup | HostConnection:
    """Joins the process group; call it before any device is used.

    Args:
      on_lost: called on a thread if another host ends, until the result is
        given another. It must end the process: JAX may block for ever.

    Returns:
      The other hosts, on host 0; the connection to host 0, on another.

    Raises:
      ConfigError: the coordinator's address is not host 0's, or is taken.
      GroupLost: not all hosts came, or one does not have the secret.
      HostUnknown: a name does not resolve.
    """
    if self.hosts == 1:
      return HostGroup()

    def lost(error: GroupLost):
      on_lost(GroupLost(f'gone before the learner was whole: {error}'))

    if self.host == 0:
      peers, jax_at = self._convene(lost)
    else:
      peers, jax_at = rendezvous_join(
        sockets.split(self.coordinator), self.secret, self.host, lost
      )
    bind = jax_at
    if self.service and self.host == 0:  # JAX serves here, too, for nobody.
      bind = sockets.join(self.listens_at, sockets.free_port(self.listens_at))
    # It would take SIGTERM for itself, and the learner would not see it.
    jax.config.update('jax_enable_preemption_service', False)
    try:
      jax.distributed.initialize(
        jax_at,
        self.hosts,
        self.host,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=SHUTDOWN_S,
        coordinator_bind_address=bind,  # Default: all addresses.
      )
    except RuntimeError as error:
      first, *_ = str(error).splitlines()
      raise GroupLost(f'jax.distributed at {jax_at}: {first}') from error
    return peers

  def _convene(self, on_lost: OnLost) -> tuple[HostGroup, str]:
    """Waits on host 0 for the others, then tells them JAX's address."""
    host, port = self.listens_at, sockets.split(self.coordinator)[1]
    try:
      listener = host_channel.HostListener(host, self.secret, port)
    except OSError as error:
      at = sockets.join(host, port)
      raise ConfigError(
        [f'--coordinator: {at} can not be listened at ({error.strerror})']
      ) from error
    try:
      peers = HostGroup(listener.accept(self.hosts - 1, MEET_S), on_lost)
    finally:
      listener.close()
    if (here := peers.here()) != list(range(1, self.hosts)):
      raise GroupLost(f'hosts {here} came, one of each was awaited')
    jax_at = self.service or sockets.join(host, sockets.free_port(host))
    peers.tell(host_messages.JaxAt(jax_at))
    return peers, jax_at


def rendezvous_join(
  at: tuple[str, int], secret: bytes, host: int, on_lost: OnLost
) -> tuple[HostConnection, str]:
  """Connects another host to host 0; returns the connection, and JAX's address.

  Args:
    at: host and port of host 0.
    secret: the learner's secret.
    host: the launcher's number of this host.
    on_lost: see `ProcessGroup.join`.

  Raises:
    GroupLost: host 0 is not there in time, or has another secret.
  """
  raw = host_channel.connect(at, secret, absent_s=MEET_S)
  heard: queue.SimpleQueue = queue.SimpleQueue()
  leading = HostConnection(
    raw, host_messages.FROM_LEADING_HOST, heard.put, on_lost, 'host 0'
  )
  leading.send(host_messages.HostHere(host))
  try:
    return leading, heard.get(timeout=MEET_S).address
  except queue.Empty:
    raise GroupLost('host 0 does not say where JAX is') from None


def meet(own: str, on_lost: OnLost) -> HostGroup | HostConnection:
  """Connects the hosts of a learner whose processes JAX has brought together.

  That of JAX's index 0 leads. What the others need to reach it goes by a
  collective, so that each of them calls this at the same point.

  Args:
    own: IP literal of this machine for its peers.
    on_lost: called on a thread if another host ends.

  Returns:
    The other hosts, on the leading one; the connection to it, on another.

  Raises:
    GroupLost: not all hosts came.
  """
  if jax.process_count() == 1:
    return HostGroup()
  listener, told = None, b''
  if jax.process_index() == 0:
    secret = secrets.token_hex(16)
    listener = host_channel.HostListener(own, secret.encode())
    told = f'{secret} {sockets.join(*listener.address)}'.encode()
  told = np.frombuffer(told.ljust(TOLD_BYTES), np.uint8)
  told = bytes(multihost_utils.broadcast_one_to_all(told)).decode()
  if listener is not None:
    try:
      others = listener.accept(jax.process_count() - 1, MEET_S)
    finally:
      listener.close()
    return HostGroup(others, on_lost)
  secret, at = told.split()
  raw = host_channel.connect(
    sockets.split(at), secret.encode(), absent_s=MEET_S
  )
  return HostConnection(
    raw, host_messages.FROM_LEADING_HOST, lambda _: None, on_lost, 'host 0'
  )


def _wrong_coordinator(coordinator: str) -> list[str]:
  try:
    host, port = sockets.split(coordinator)
  except sockets.BadAddress as error:
    return [f'--coordinator={coordinator}: {error}']
  if ':' in host:
    return [f'--coordinator={coordinator}: hosts meet by IPv4 only']
  if not port:
    return [f'--coordinator={coordinator}: port 0 can not be connected to']
  return []
