# SPDX-License-Identifier: Apache-2.0
"""The other hosts of a learner, as its leading host sees them.

The loop announces each of its steps to all hosts before it performs it. A
transfer is requested of each host, and counts once the last one has answered:
all parts, or none.
"""

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from diloco.learner.replica import Mismatch
from diloco.learner.restore import NONE
from diloco.protocol import host_messages
from diloco.protocol.host_messages import HostDone
from diloco.transport.host_channel import GroupLost, HostConnection

ANSWER_S = 120.0  # A live host answers; jax ends dead ones sooner.
STATE_S = 3600.0  # The limit when all of a host's state is moved.
# The jobs that a host begins with; the others have larger numbers.
_HERE, _STARTED = -1, 0  # −2: see `train_loop.REFORM_JOB`.


class HostGroup:
  """Connections to the other hosts of a learner.

  Args:
    peers: open connections to them, authenticated.
    on_lost: called on a thread when a host is lost; see `watch`.

  Attributes:
    count: N, with the leading one.
  """

  def __init__(
    self,
    peers: Sequence[Connection] = (),
    on_lost: Callable[[GroupLost], None] = lambda error: None,
  ):
    self.count = len(peers) + 1
    self._on_stop: Callable[[], None] = lambda: None
    self._on_lost = on_lost
    self._changed = threading.Condition()
    # By job and host.
    self._answers: dict[int, dict[int, HostDone]] = {}
    # Answers to come that are not needed, by job.
    self._unwanted: dict[int, int] = {}
    self._hosts: dict[int, int] = {}  # Peer -> its index in JAX, once started.
    self._saved = [0] * len(peers)  # Step of the last that is over.
    self._lost: GroupLost | None = None
    self._connections = [
      HostConnection(
        connection,
        host_messages.FROM_OTHER_HOSTS,
        functools.partial(self._hear, peer),
        self._note_lost,
        'another host',
      )
      for peer, connection in enumerate(peers)
    ]

  def here(self) -> list[int]:
    """Waits for all of them; returns the launcher's numbers, ascending."""
    return sorted(answer.host for answer in self.answers(_HERE).values())

  def agree(
    self, mine: host_messages.HostStarted, slices: int = 1
  ) -> host_messages.RestoreFrom | None:
    """Waits until all have started; tells them, and returns, what to restore.

    Args:
      mine: what the leading host would say itself.
      slices: of this world.

    Returns:
      The newest boundary that a whole slice has in memory; the newest
      checkpoint that all hosts have, if that is newer, or its step `NONE` if
      there is none. None where there is no other host to agree with, and
      nothing in memory.
    """
    if self.count == 1 and not mine.held_step:
      return None
    started = {mine.host: mine, **self.answers(_STARTED, STATE_S)}
    restore = what_to_restore([started[x] for x in sorted(started)], slices)
    self.tell(restore)
    return restore

  def watch(
    self, on_stop: Callable[[], None], on_lost: Callable[[GroupLost], None]
  ) -> None:
    """Sets callbacks for a host that is told to stop, or is lost.

    They are called on a thread.
    """
    self._on_stop, self._on_lost = on_stop, on_lost

  def tell(self, message) -> None:
    """Sends one of `host_messages.FROM_LEADING_HOST` to all of them."""
    for connection in self._connections:
      connection.send(message)

  def answers(
    self, job: int, timeout_s: float = ANSWER_S
  ) -> dict[int, HostDone]:
    """Waits for each host's answer, and returns them by host, ascending."""

    def complete():
      answers = self._answers.get(job, {})
      return self._lost or len(answers) == self.count - 1

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
    for host, answer in answers.items():
      if answer.reason:
        raise Mismatch(f'host {host}: {answer.reason}')

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
    for connection in self._connections:
      connection.close(timeout_s=3.0)

  def _hear(self, peer: int, message):
    match message:
      case host_messages.HostHere():
        self._answer(_HERE, peer, message)
      case host_messages.HostStarted():
        self._hosts[peer] = message.host
        self._answer(_STARTED, peer, message)
      case host_messages.HostDone():
        self._answer(message.job, peer, message)
      case host_messages.HostSaved():
        with self._changed:
          self._saved[peer] = message.step
          self._changed.notify_all()
      case host_messages.StopWanted():
        self._on_stop()
      case _:
        raise TypeError(f'Not of another host: {message!r}.')

  def _answer(self, job: int, peer: int, message):
    with self._changed:
      if job in self._unwanted:
        self._unwanted[job] -= 1
        if not self._unwanted[job]:
          del self._unwanted[job]
        return
      host = self._hosts.get(peer, peer)
      self._answers.setdefault(job, {})[host] = message
      self._changed.notify_all()

  def _all_saved(self, step: int) -> bool:
    return all(saved >= step for saved in self._saved)

  def _note_lost(self, error: GroupLost):
    with self._changed:
      self._lost = self._lost or error
      self._changed.notify_all()
    self._on_lost(error)


def what_to_restore(
  hosts: Sequence[host_messages.HostStarted], slices: int
) -> host_messages.RestoreFrom:
  """Returns what a learner goes on from; the newest that is whole.

  Of what is in memory that of the newest process, of whose steps the last.

  Args:
    hosts: what each has, by its index: one slice after the other.
    slices: that share the hosts evenly.
  """
  step = max(
    set.intersection(*(set(host.steps) for host in hosts)), default=NONE
  )
  part = len(hosts) // slices
  of_slice = [hosts[i : i + part] for i in range(0, len(hosts), part)]
  # Of a slice whose hosts were at different steps no boundary is whole.
  held = [
    boundaries.pop() if len(boundaries := {*map(_held, each)}) == 1 else (0, 0)
    for each in of_slice
  ]
  newest = max(held)
  if not newest[1] or newest[1] < step:
    return host_messages.RestoreFrom(step)
  gives = held.index(newest)
  return host_messages.RestoreFrom(
    newest[1], gives, len(set(held)) == 1, of_slice[gives][0].progress
  )


def _held(host: host_messages.HostStarted) -> tuple[int, int]:
  """Returns process and step of the boundary in a host's memory; 0: none.

  Whatever its step: a slice that comes back may be further than what the others
  had to begin again with, and since then have trained.
  """
  if not host.held_step:
    return 0, 0
  return json.loads(host.progress)['process'], host.held_step
