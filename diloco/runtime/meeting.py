# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of a learner's hosts, before JAX connects them.

Host 0 listens at the coordinator's address; each other host connects, and each
side proves that it has the learner's secret before anything else is sent. The
connections stay open until every host has those that it trains with: a host
that ends in between is noticed by the others, even while JAX blocks.
"""

import multiprocessing.connection
import queue
import socket
import threading
from collections.abc import Callable, Sequence

from diloco.config_values import ConfigError
from diloco.protocol import host_messages
from diloco.transport import addresses, group

MEET_S = 300.0  # Machines of a slice may come up minutes apart.
CLOSE_S = 3.0

OnLost = Callable[[group.GroupLost], None]


class Meeting:
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
      group.Connection(
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
        each = self.heard.get(timeout=group.CONNECT_S)
      except queue.Empty:
        raise group.GroupLost('a host that came says nothing') from None
      if isinstance(each, group.GroupLost):
        raise each
      said.append(each)
    return said

  def begin(self, jax_at: str) -> None:
    """Reports losses to `on_lost` from here on, including an earlier one."""
    self.jax_at = jax_at
    with self._lock:
      self._began = True
      lost = None if self.heard.empty() else self.heard.get()
    if isinstance(lost, group.GroupLost):
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

  def _lost(self, peer: int, error: group.GroupLost):
    with self._lock:
      if peer in self._connected:
        return
      on_lost = self._on_lost
      if not self._began:
        self.heard.put(error)
        return
    on_lost(group.GroupLost(f'gone before the learner was whole: {error}'))


def convene(
  host: str, port: int, secret: bytes, others: int, on_lost: OnLost
) -> Meeting:
  """Waits on host 0 for the others, then tells them JAX's address.

  Args:
    host: IP literal of this machine.
    port: the coordinator's port.
    secret: the learner's secret.
    others: the number of other hosts.
    on_lost: see `Meeting`.

  Raises:
    ConfigError: the address is not this machine's, or is taken.
    GroupLost: not all came.
  """
  at = addresses.join(host, port)
  try:
    listener = group.Listener(host, secret, port)
  except OSError as error:
    raise ConfigError(
      [f'--coordinator: {at} can not be listened at ({error.strerror})']
    ) from error
  try:
    raws = listener.accept(others, MEET_S)
  finally:
    listener.close()
  met = Meeting(raws, 'another host', host_messages.TO_FIRST_HOST, on_lost)
  hosts = sorted(said.host for said in met.expect(others))
  if hosts != list(range(1, others + 1)):
    raise group.GroupLost(f'hosts {hosts} came, one of each was awaited')
  with socket.create_server((host, 0)) as free:
    jax_at = addresses.join(host, free.getsockname()[1])
  met.tell(host_messages.JaxAt(jax_at))
  met.begin(jax_at)
  return met


def attend(
  at: tuple[str, int], secret: bytes, host: int, on_lost: OnLost
) -> Meeting:
  """Connects another host to host 0 and learns JAX's address.

  Args:
    at: host and port of host 0.
    secret: the learner's secret.
    host: the launcher's number of this host.
    on_lost: see `Meeting`.

  Raises:
    GroupLost: host 0 is not there in time, or has another secret.
  """
  raw = group.connect(at, secret, absent_s=MEET_S)
  met = Meeting([raw], 'host 0', host_messages.FROM_FIRST_HOST, on_lost)
  met.tell(host_messages.HostHere(host))
  [said] = met.expect(1)
  met.begin(said.address)
  return met
