# SPDX-License-Identifier: Apache-2.0
"""A queue of unread messages, bounded in total and per session.

A session that sends too much fills its own share and then waits; the others'
messages never queue behind more than that.
"""

import queue
import threading
from collections.abc import Hashable

LOOK_EVERY_S = 1.0  # Interval of the check for a close, while waiting for room.


class Inbox(queue.Queue):
  """A bounded queue of items in the order of their arrival.

  Args:
    items_max: for all sources together.
    share_max: for one source: a message may have a MiB.
  """

  def __init__(self, items_max: int, share_max: int):
    super().__init__(items_max)
    self._share_max = share_max
    self._shares: dict[Hashable, threading.Semaphore] = {}
    self._closing = threading.Event()

  def close(self) -> None:
    """Marks the inbox as no longer read; producers stop waiting for room."""
    self._closing.set()

  def tell(self, item) -> None:
    """Blocks until the queue has room for one more item, then adds it."""
    while not self._closing.is_set():
      try:
        self.put(item, timeout=LOOK_EVERY_S)
        return
      except queue.Full:
        continue

  def tell_from(self, source: Hashable, item) -> None:
    """Blocks until there is also room in the share of `source`.

    Only the thread of that source may call it.
    """
    share = self._shares.setdefault(
      source, threading.Semaphore(self._share_max)
    )
    while not self._closing.is_set():
      if share.acquire(timeout=LOOK_EVERY_S):
        self.tell(item)
        return

  def was_read(self, source: Hashable) -> None:
    """Makes room for one more item of `source`."""
    self._shares[source].release()

  def forget(self, source: Hashable) -> None:
    """Forgets a source whose last item was read."""
    self._shares.pop(source, None)
