# SPDX-License-Identifier: Apache-2.0
"""The other hosts of a learner, as its leading host sees them.

The loop announces each of its steps to all hosts before it performs it. A
transfer is requested of each host, and counts once the last one has answered:
all parts, or none.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from diloco.learner.replica import Mismatch
from diloco.protocol import host_messages, messages
from diloco.transport.host_channel import (
  GroupLost,
  HostConnection,
  HostListener,
)

ANSWER_S = 120.0  # A live host answers; jax ends dead ones sooner.

STATE_S = 3600.0  # The limit when all of a host's state is moved.

Addresses = tuple[str, ...]  # Addresses of one host, by shard of the syncer.
# Parts of one host, by shard; None: it failed.
Parts = tuple[messages.Part | None, ...]
Donated = host_messages.HostDonated


class HostGroup:
  """Connections to the hosts 1 … N−1, which are all open once constructed.

  Args:
    listener: the listener they connect to; it is closed. None: there are none.
    others: N−1.

  Attributes:
    count: N, with the leading one.
    steps: host -> the checkpoint steps that it has complete.

  Raises:
    GroupLost: not all of them came in time.
  """

  def __init__(self, listener: HostListener | None = None, others: int = 0):
    self.count = others + 1
    self._on_stop: Callable[[], None] = lambda: None
    self._on_lost: Callable[[GroupLost], None] = lambda error: None
    self._changed = threading.Condition()
    self._answers: dict[Hashable, dict[int, object]] = {}
    # Answers to come that are not needed.
    self._unwanted: dict[Hashable, int] = {}
    self._saved: dict[int, int] = {}  # Host -> step of the last that is over.
    self._lost: GroupLost | None = None
    self._connections: dict[int, HostConnection] = {}
    self._unnamed: list[HostConnection] = []
    if listener is not None:
      for connection in listener.accept(others):
        self._unnamed.append(self._open(connection))
      listener.close()
    started = self._wait('started')
    self.steps = {host: each.steps for host, each in started.items()}

  def watch(
    self,
    on_stop: Callable[[], None],
    on_lost: Callable[[GroupLost], None],
  ) -> None:
    """Sets callbacks for a host that is told to stop, or is lost.

    They are called on a thread.
    """
    self._on_stop, self._on_lost = on_stop, on_lost
    with self._changed:
      lost = self._lost
    if lost is not None:
      on_lost(lost)

  def tell(self, message) -> None:
    """Sends one of `host_messages.FROM_LEADING_HOST` to all of them."""
    for connection in self._connections.values():
      connection.send(message)

  def tell_each(self, said: Iterable) -> None:
    """Sends each of them its own message, from host 1 on."""
    for host, message in enumerate(said, start=1):
      self._connections[host].send(message)

  def open_session(self, session: int) -> tuple[Addresses, ...]:
    """Opens a syncer session on each host; returns where each offers."""
    self.tell(host_messages.OpenSession(session))
    found = self._wait(('session', session))
    return tuple(each.addresses for each in found.values())

  def offered(self, handle: int) -> tuple[Parts, ...]:
    """Waits for, and returns, what each host has on offer under a handle."""
    found = self._wait(('offered', handle))
    return tuple(each.parts or (None,) for each in found.values())

  def forget(self, handle: int) -> None:
    """Drops the answers for a handle, which are not waited for any more."""
    key = 'offered', handle
    with self._changed:
      left = self.count - 1 - len(self._answers.pop(key, {}))
      if left:
        self._unwanted[key] = left

  @contextlib.contextmanager
  def taking(self, orders: Sequence[host_messages.HostTake]):
    """Makes a context in which host 0 and the others each take their part.

    At its end all have; otherwise it raises `Mismatch`, which names the host
    and the reason.

    Args:
      orders: by host, from 0 on.
    """
    own, *others = orders
    self.tell_each(others)
    try:
      yield
    finally:
      took = self._wait(('took', own.fragment, own.version))
    _check_all(took)

  def donated(self, newcomer: tuple[int, int]) -> tuple[Donated, ...]:
    """Waits for, and returns, what each host offers to a newcomer."""
    return tuple(self._wait(('donated', *newcomer), STATE_S).values())

  @contextlib.contextmanager
  def fetching(self, orders: Sequence[host_messages.HostFetch]):
    """Makes a context like `taking` for parts of a donor's state.

    The parts are only fetched in it, not adopted.
    """
    self.tell_each(orders[1:])
    try:
      yield
    finally:
      fetched = self._wait('fetched', STATE_S)
    _check_all(fetched)

  def end_fetch(self, taken: bool) -> None:
    """Has the hosts adopt what they fetched, and waits for it; or discard
    it.
    """
    self.tell(host_messages.FetchOver(taken))
    if taken:
      self._wait('adopted')

  def have_saved(self, step: int) -> bool:
    """Returns True once no other host is saving that step, or an older one."""
    with self._changed:
      return self._all_saved(step)

  def wait_until_saved(self, step: int, timeout_s: float) -> None:
    """Waits for `have_saved`; a host that is lost is not waited for."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._lost or self._all_saved(step), timeout_s
      )

  def close(self) -> None:
    """Sends what is queued, and ends."""
    for connection in self._connections.values():
      connection.close(timeout_s=3.0)

  def _open(self, connection) -> HostConnection:
    opened: list[HostConnection] = []
    there = threading.Event()

    def heard(message):
      there.wait()
      self._hear(opened[0], message)

    opened.append(
      HostConnection(
        connection,
        host_messages.FROM_OTHER_HOSTS,
        heard,
        self._note_lost,
        'another host',
      )
    )
    there.set()
    return opened[0]

  def _hear(self, connection: HostConnection, message):
    match message:
      case host_messages.HostStarted():
        self._connections[message.host] = connection
        self._answer('started', connection, message)
      case host_messages.SessionAt():
        self._answer(('session', message.session), connection, message)
      case host_messages.HostOffered():
        self._answer(('offered', message.handle), connection, message)
      case host_messages.HostTook():
        key = 'took', message.fragment, message.version
        self._answer(key, connection, message)
      case host_messages.HostDonated():
        key = 'donated', message.learner, message.incarnation
        self._answer(key, connection, message)
      case host_messages.HostFetched():
        self._answer('fetched', connection, message)
      case host_messages.HostAdopted():
        self._answer('adopted', connection, message)
      case host_messages.HostSaved():
        with self._changed:
          self._saved[self._host_of(connection)] = message.step
          self._changed.notify_all()
      case host_messages.StopWanted():
        self._on_stop()
      case _:
        raise TypeError(f'Not of another host: {message!r}.')

  def _answer(self, key: Hashable, connection: HostConnection, message):
    host = self._host_of(connection)
    with self._changed:
      if key in self._unwanted:
        self._unwanted[key] -= 1
        if not self._unwanted[key]:
          del self._unwanted[key]
        return
      self._answers.setdefault(key, {})[host] = message
      self._changed.notify_all()

  def _all_saved(self, step: int) -> bool:
    return all(self._saved.get(h, 0) >= step for h in self._connections)

  def _host_of(self, connection: HostConnection) -> int:
    [host] = [h for h, c in self._connections.items() if c is connection]
    return host

  def _wait(
    self, key: Hashable, timeout_s: float = ANSWER_S
  ) -> dict[int, object]:
    """Waits for all answers to `key` and returns them by host, ascending."""

    def complete():
      found = self._answers.get(key, {})
      return self._lost or len(found) == self.count - 1

    with self._changed:
      if not self._changed.wait_for(complete, timeout_s):
        raise GroupLost(f'no answer of all hosts in {timeout_s} s: {key}')
      if self._lost:
        raise self._lost
      return dict(sorted(self._answers.pop(key, {}).items()))

  def _note_lost(self, error: GroupLost):
    with self._changed:
      self._lost = self._lost or error
      self._changed.notify_all()
    self._on_lost(error)


def _check_all(answers: Mapping[int, object]) -> None:
  """Raises `Mismatch` for the first host that failed."""
  for host, each in answers.items():
    if each.reason:
      raise Mismatch(f'host {host}: {each.reason}')
