# SPDX-License-Identifier: Apache-2.0
"""The other hosts of a learner, as its leading host sees them.

The loop announces each of its steps to all hosts before it performs it. A
transfer is requested of each host, and counts once the last one has answered:
all parts, or none.
"""

import contextlib
import threading
from collections.abc import Callable

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.learner.hosts.process_group import ProcessGroup, Rendezvous
from diloco.learner.replica import Mismatch
from diloco.learner.restore import common_step
from diloco.protocol import host_messages
from diloco.protocol.host_messages import HostDone
from diloco.transport.host_channel import (
  GroupLost,
  HostConnection,
  HostListener,
)

ANSWER_S = 120.0  # A live host answers; jax ends dead ones sooner.
STATE_S = 3600.0  # The limit when all of a host's state is moved.
_STARTED = 0  # The job that a host begins with; the others have larger numbers.


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
    # By job and host.
    self._answers: dict[int, dict[int, HostDone]] = {}
    # Answers to come that are not needed, by job.
    self._unwanted: dict[int, int] = {}
    self._saved: dict[int, int] = {}  # Host -> step of the last that is over.
    self._lost: GroupLost | None = None
    self._connections: dict[int, HostConnection] = {}
    self._unnamed: list[HostConnection] = []
    if listener is not None:
      for connection in listener.accept(others):
        self._unnamed.append(self._open(connection))
      listener.close()
    started = self.answers(_STARTED)
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

  def answers(
    self, job: int, timeout_s: float = ANSWER_S
  ) -> dict[int, HostDone]:
    """Waits for each host's answer, and returns them by host, ascending."""

    def complete():
      found = self._answers.get(job, {})
      return self._lost or len(found) == self.count - 1

    with self._changed:
      if not self._changed.wait_for(complete, timeout_s):
        raise GroupLost(f'no answer of all hosts in {timeout_s} s: job {job}')
      if self._lost:
        raise self._lost
      return dict(sorted(self._answers.pop(job, {}).items()))

  def forget(self, job: int) -> None:
    """Drops the answers for a job, which are not waited for any more."""
    with self._changed:
      left = self.count - 1 - len(self._answers.pop(job, {}))
      if left:
        self._unwanted[job] = left

  @contextlib.contextmanager
  def together(self, order, timeout_s: float = ANSWER_S):
    """Makes a context in which host 0 and the others each perform an order.

    At its end all have; otherwise it raises `Mismatch`, which names the host
    and the reason.
    """
    self.tell(order)
    try:
      yield
    finally:
      answers = self.answers(order.job, timeout_s)
    for host, each in answers.items():
      if each.reason:
        raise Mismatch(f'host {host}: {each.reason}')

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
        self._answer(_STARTED, connection, message)
      case host_messages.HostDone():
        self._answer(message.job, connection, message)
      case host_messages.HostSaved():
        with self._changed:
          self._saved[self._host_of(connection)] = message.step
          self._changed.notify_all()
      case host_messages.StopWanted():
        self._on_stop()
      case _:
        raise TypeError(f'Not of another host: {message!r}.')

  def _answer(self, job: int, connection: HostConnection, message):
    host = self._host_of(connection)
    with self._changed:
      if job in self._unwanted:
        self._unwanted[job] -= 1
        if not self._unwanted[job]:
          del self._unwanted[job]
        return
      self._answers.setdefault(job, {})[host] = message
      self._changed.notify_all()

  def _all_saved(self, step: int) -> bool:
    return all(self._saved.get(h, 0) >= step for h in self._connections)

  def _host_of(self, connection: HostConnection) -> int:
    [host] = [h for h, c in self._connections.items() if c is connection]
    return host

  def _note_lost(self, error: GroupLost):
    with self._changed:
      self._lost = self._lost or error
      self._changed.notify_all()
    self._on_lost(error)


def gather(
  process_group: ProcessGroup, met: Rendezvous | None, records: LearnerRecords
) -> tuple[HostGroup, int | None]:
  """Connects the leading host to the others; returns them and the common step.

  `met` is closed once they are connected. It is None if there are none: then
  there is nothing to agree on, and no step.

  Raises:
    GroupLost: a host is gone.
  """
  if met is None:
    return HostGroup(), None
  hosts = HostGroup(process_group.listen(), process_group.hosts - 1)
  met.close()
  step = common_step([records.readable(), *hosts.steps.values()])
  hosts.tell(host_messages.RestoreFrom(step))
  return hosts, step
