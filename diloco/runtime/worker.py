# SPDX-License-Identifier: Apache-2.0
"""A thread that does jobs in order, and does not hide what goes wrong."""

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Worker:
  """One thread, one bounded queue.

  Args:
    name: of the thread.
    jobs_max: jobs that may wait.
    on_crash: called on the thread with what a job raised; the worker ends.
  """

  def __init__(
    self, name: str, jobs_max: int, on_crash: Callable[[BaseException], None]
  ):
    self._jobs: queue.Queue[Job | None] = queue.Queue(jobs_max)
    self._on_crash = on_crash
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()

  def submit(self, job: Job) -> bool:
    """Queues `job`; False where the queue is full. Never waits."""
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
