# SPDX-License-Identifier: Apache-2.0
"""What the machine's thread has not read yet: bounded, in all and per session.

Whoever talks too much fills his own share and then waits; the others' messages
do not queue up behind more than that.
"""

import queue
import threading
from collections.abc import Hashable

LOOK_EVERY_S = 1.0  # Whether it has been closed, while waiting for room.


class Inbox(queue.Queue):
  """Items in the order of their arrival.

  Args:
    items_max: of all sources together.
    share_max: of one source: a message may have a MiB.
  """

  def __init__(self, items_max: int, share_max: int):
    super().__init__(items_max)
    self._share_max = share_max
    self._shares: dict[Hashable, threading.Semaphore] = {}
    self._closing = threading.Event()

  def close(self) -> None:
    """Nobody reads any more: whoever waits for room goes on without."""
    self._closing.set()

  def tell(self, item) -> None:
    """Waits for room; for what there is not more of than is asked for."""
    while not self._closing.is_set():
      try:
        self.put(item, timeout=LOOK_EVERY_S)
        return
      except queue.Full:
        continue

  def tell_from(self, source: Hashable, item) -> None:
    """Waits for room in the share of `source`, too; its thread alone calls."""
    share = self._shares.setdefault(
      source, threading.Semaphore(self._share_max)
    )
    while not self._closing.is_set():
      if share.acquire(timeout=LOOK_EVERY_S):
        self.tell(item)
        return

  def was_read(self, source: Hashable) -> None:
    """Makes room for one more of `source`."""
    self._shares[source].release()

  def forget(self, source: Hashable) -> None:
    """Its last item was read."""
    self._shares.pop(source, None)
