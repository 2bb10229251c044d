# SPDX-License-Identifier: Apache-2.0
"""A thread that executes jobs in order and reports their errors."""

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class Worker:
  """One thread with one bounded queue.

  Args:
    name: name of the thread.
    jobs_max: number of jobs that may wait.
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
    """Ends the thread after what is queued, or leaves it to the process
    exit.
    """
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
