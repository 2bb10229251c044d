# SPDX-License-Identifier: Apache-2.0
"""The JAX process group of one learner, and the rendezvous of its hosts.

A learner is one failure unit: `jax.distributed` ends all of its processes when
one is gone, and the connections of `transport.group` do so at once. Two
learners are never in one group, and the syncer is in none.

JAX's coordination service does not authenticate processes. So the hosts first
meet and prove to each other that they have the learner's secret; only then does
host 0 start the service, at an address that it tells only to them.
"""

import dataclasses
import json
import multiprocessing.connection
import queue
import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from diloco.config.sections import ConfigError
from diloco.protocol import host_messages
from diloco.transport import host_channel, sockets

MEET_S = 300.0  # Machines of a slice may come up minutes apart.
CLOSE_S = 3.0

OnLost = Callable[[host_channel.GroupLost], None]
HEARTBEAT_S = 10  # After this, a silent host is taken for dead.
SHUTDOWN_S = 10  # How long hosts wait for each other at the end.
GREETING_BYTES = 512  # Address of the leading host.


# The rendezvous of a learner's hosts, before JAX connects them.
#
# Host 0 listens at the coordinator's address; each other host connects, and
# each side proves that it has the learner's secret before anything else is
# sent. The connections stay open until every host has those that it trains
# with: a host that ends in between is noticed by the others, even while JAX
# blocks.


class Rendezvous:
  """This host's connections to the hosts it has met.

  Args:
    peers: open connections.
    name: name of a peer, for error messages.
    allowed: the kinds of messages that peers may send.
    on_lost: called once if a peer ends before it is connected.
  """

  def __init__(
    self,
    peers: Sequence[multiprocessing.connection.Connection],
    name: str,
    allowed: tuple[type, ...],
    on_lost: OnLost,
  ):
    self.jax_at = ''  # 'IP literal:port' of the coordination service.
    self.heard: queue.SimpleQueue = queue.SimpleQueue()
    self._on_lost = on_lost
    self._lock = threading.Lock()
    self._connected: set[int] = set()  # Peers that may end.
    self._began = False  # Until then a loss is reported through `heard`.
    self._connections = [
      host_channel.HostConnection(
        raw,
        allowed,
        lambda message, peer=peer: self._hear(peer, message),
        lambda error, peer=peer: self._lost(peer, error),
        name,
      )
      for peer, raw in enumerate(peers)
    ]

  def tell(self, message) -> None:
    """Sends a message to all peers."""
    for connection in self._connections:
      connection.send(message)

  def expect(self, count: int) -> list:
    """Waits for, and returns, the next messages.

    Raises:
      GroupLost: a peer is gone, or silent for too long.
    """
    said = []
    while len(said) < count:
      try:
        each = self.heard.get(timeout=host_channel.CONNECT_S)
      except queue.Empty:
        raise host_channel.GroupLost('a host that came says nothing') from None
      if isinstance(each, host_channel.GroupLost):
        raise each
      said.append(each)
    return said

  def begin(self, jax_at: str) -> None:
    """Reports losses to `on_lost` from here on, including an earlier one."""
    self.jax_at = jax_at
    with self._lock:
      self._began = True
      lost = None if self.heard.empty() else self.heard.get()
    if isinstance(lost, host_channel.GroupLost):
      self._on_lost(lost)

  def close(self) -> None:
    """Ends the rendezvous; from here on a peer may leave unnoticed."""
    with self._lock:
      self._on_lost = lambda error: None
    self.tell(host_messages.AllConnected())
    for connection in self._connections:
      connection.close(CLOSE_S)

  def _hear(self, peer: int, message):
    if isinstance(message, host_messages.AllConnected):
      with self._lock:
        self._connected.add(peer)
      return
    self.heard.put(message)

  def _lost(self, peer: int, error: host_channel.GroupLost):
    with self._lock:
      if peer in self._connected:
        return
      on_lost = self._on_lost
      if not self._began:
        self.heard.put(error)
        return
    on_lost(
      host_channel.GroupLost(f'gone before the learner was whole: {error}')
    )


def convene(
  host: str, port: int, secret: bytes, others: int, on_lost: OnLost
) -> Rendezvous:
  """Waits on host 0 for the others, then tells them JAX's address.

  Args:
    host: IP literal of this machine.
    port: the coordinator's port.
    secret: the learner's secret.
    others: the number of other hosts.
    on_lost: see `Rendezvous`.

  Raises:
    ConfigError: the address is not this machine's, or is taken.
    GroupLost: not all came.
  """
  at = sockets.join(host, port)
  try:
    listener = host_channel.HostListener(host, secret, port)
  except OSError as error:
    raise ConfigError(
      [f'--coordinator: {at} can not be listened at ({error.strerror})']
    ) from error
  try:
    raws = listener.accept(others, MEET_S)
  finally:
    listener.close()
  met = Rendezvous(raws, 'another host', host_messages.TO_FIRST_HOST, on_lost)
  hosts = sorted(said.host for said in met.expect(others))
  if hosts != list(range(1, others + 1)):
    raise host_channel.GroupLost(f'hosts {hosts} came, one of each was awaited')
  jax_at = sockets.join(host, sockets.free_port(host))
  met.tell(host_messages.JaxAt(jax_at))
  met.begin(jax_at)
  return met


def attend(
  at: tuple[str, int], secret: bytes, host: int, on_lost: OnLost
) -> Rendezvous:
  """Connects another host to host 0 and learns JAX's address.

  Args:
    at: host and port of host 0.
    secret: the learner's secret.
    host: the launcher's number of this host.
    on_lost: see `Rendezvous`.

  Raises:
    GroupLost: host 0 is not there in time, or has another secret.
  """
  raw = host_channel.connect(at, secret, absent_s=MEET_S)
  met = Rendezvous([raw], 'host 0', host_messages.FROM_FIRST_HOST, on_lost)
  met.tell(host_messages.HostHere(host))
  [said] = met.expect(1)
  met.begin(said.address)
  return met


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
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
    host, _ = sockets.split(self.coordinator)
    if sockets.is_literal(host) and (
      self.host == 0 or sockets.is_loopback(host)
    ):
      return host
    if not sockets.is_loopback(self.own):
      return sockets.routable(self.own)
    return host_channel.own_address(sockets.resolve(host))

  def join(self, on_lost: OnLost) -> Rendezvous | None:
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
        sockets.split(self.coordinator)[1],
        self.secret,
        self.hosts - 1,
        on_lost,
      )
    else:
      at = sockets.split(self.coordinator)
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
      raise host_channel.GroupLost(
        f'jax.distributed at {met.jax_at}: {first}'
      ) from (error)
    return met

  def listen(self) -> host_channel.HostListener:
    """Listens on the leading host and tells the others where; does not
    block.
    """
    listener = host_channel.HostListener(self.listens_at, self.secret)
    _spread(list(listener.address))
    return listener

  def connect(self):
    """Connects another host to the leading host."""
    host, port = _spread(None)
    return host_channel.connect((host, port), self.secret)


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


def _spread(greeting: list | None) -> list:
  """Broadcasts from the leading host; all hosts must call it.

  It uses the devices' own collectives: no secret may be sent here.
  """
  text = json.dumps(greeting).encode().ljust(GREETING_BYTES)
  sent = np.frombuffer(text, np.uint8)
  heard = multihost_utils.broadcast_one_to_all(sent)
  return json.loads(np.asarray(heard).tobytes())
