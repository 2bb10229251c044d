# SPDX-License-Identifier: Apache-2.0
"""A worker thread that hides no error, an inbox that is fair, and a pulse.

The pulse of a process notices that none of its threads ran.
"""

import queue
import threading
import time
from collections.abc import Callable, Hashable

Job = Callable[[], None]
LOOK_EVERY_S = 1.0  # Interval of the check for a close, while waiting for room.
PULSE_S = 0.25


class Worker:
  """One thread with one bounded queue.

  Args:
    on_crash: called on the thread with a job's error; the worker then ends.
  """

  def __init__(
    self, name: str, jobs_max: int, on_crash: Callable[[BaseException], None]
  ):
    self._jobs: queue.Queue[Job | None] = queue.Queue(jobs_max)
    self._on_crash = on_crash
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()

  def submit(self, job: Job) -> bool:
    """Queues `job`; returns False if the queue is full. Never blocks."""
    try:
      self._jobs.put_nowait(job)
    except queue.Full:
      return False
    return True

  def close(self, timeout_s: float):
    """Ends the thread after what is queued, or leaves it to the exit."""
    try:
      self._jobs.put(None, timeout=timeout_s)
    except queue.Full:
      return
    self._thread.join(timeout_s)

  def _run(self):
    while (job := self._jobs.get()) is not None:
      try:
        job()
      except BaseException as error:  # noqa: BLE001 - handed on, not hidden.
        self._on_crash(error)
        return


class Pulse:
  """Tells when no thread of this process ran for a while.

  That happens where a library holds the interpreter's lock, such as while the
  dynamic linker maps a large shared object from a slow disk, and where the
  process or its machine is suspended. Without it such a time looks like a slow
  network to whoever reads the logs.

  Args:
    tell: called on a thread of its own with the seconds of each such time.
    limit_s: shorter times are not told.
  """

  def __init__(self, tell: Callable[[float], None], limit_s: float = 1.0):
    self._tell = tell
    self._limit_s = limit_s
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._run, name='pulse', daemon=True)
    self._thread.start()

  def close(self):
    """Ends the thread."""
    self._closed.set()
    self._thread.join()

  def _run(self):
    before_s = time.monotonic()
    while not self._closed.wait(PULSE_S):
      now_s = time.monotonic()
      late_s, before_s = now_s - before_s - PULSE_S, now_s
      if late_s >= self._limit_s:
        self._tell(late_s)


# A queue of unread messages, bounded in total and per session.
#
# A session that sends too much fills its own share and then waits; the others'
# messages never queue behind more than that.


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
