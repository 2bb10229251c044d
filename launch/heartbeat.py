# SPDX-License-Identifier: Apache-2.0
"""Whether a process goes on that touches a file once a second.

A host of a slice that is stopped, or hangs, ends no connection: all others wait
for it in a collective. It is killed, and its slice is lost as any that dies.
"""

import pathlib

SILENT_S = 10.0  # A process that has not touched its file for so long hangs.
LATE_S = 2.0  # Who looks more seldom than that was stopped itself.


class Heartbeat:
  """The file of one process. Times are on the monotonic clock.

  Args:
    path: the file; it is not there before the process has read its flags.
  """

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._touched = self._last()  # By the process before, if there was one.
    self._heard_s: float | None = None
    self._looked_s = float('-inf')

  def is_silent(self, now_s: float) -> bool:
    """Returns True once the process has been silent for `SILENT_S`."""
    late = now_s - self._looked_s > LATE_S
    self._looked_s = now_s
    touched = self._last()
    if touched != self._touched:
      self._touched, self._heard_s = touched, now_s
    if self._heard_s is None:
      return False
    if late:
      self._heard_s = now_s
    return now_s - self._heard_s > SILENT_S

  def _last(self) -> int | None:
    try:
      return self._path.stat().st_mtime_ns
    except FileNotFoundError:
      return None
