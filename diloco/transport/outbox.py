# SPDX-License-Identifier: Apache-2.0
"""A bounded queue of the messages to be sent on one stream.

Bounded, so that a slow reader cannot grow it, and without blocking, so that a
stopped one cannot stop the sender.
"""

import collections
import queue
import threading


class Outbox:
  """A bounded queue with two ways to end: drained, or at once."""

  def __init__(self, bodies_max: int):
    self._bodies_max = bodies_max
    self._bodies: collections.deque[bytes] = collections.deque()
    self._changed = threading.Condition()
    self._finished = False

  def put(self, body: bytes) -> bool:
    """Queues `body`; returns False if the queue is finished.

    Raises:
      queue.Full: the other side has not taken `bodies_max` bodies.
    """
    with self._changed:
      if self._finished:
        return False
      if len(self._bodies) >= self._bodies_max:
        raise queue.Full
      self._bodies.append(body)
      self._changed.notify()
    return True

  def finish(self) -> None:
    """Accepts nothing more; what is queued is still handed out."""
    with self._changed:
      self._finished = True
      self._changed.notify_all()

  def discard(self) -> None:
    """Finishes, and drops what is queued."""
    with self._changed:
      self._bodies.clear()
      self._finished = True
      self._changed.notify_all()

  def take(self, timeout_s: float | None = None) -> bytes | None:
    """Returns the next body; None once finished and empty.

    Raises:
      queue.Empty: nothing came in time.
    """
    with self._changed:
      if not self._changed.wait_for(
        lambda: self._bodies or self._finished, timeout_s
      ):
        raise queue.Empty
      return self._bodies.popleft() if self._bodies else None
