# SPDX-License-Identifier: Apache-2.0
"""The outlets and inlets that a data plane has to close when it closes."""

import threading
from typing import Protocol


class End(Protocol):
  """An outlet or an inlet."""

  def close(self) -> None:
    """Frees it; idempotent."""


class OpenEnds:
  """A thread-safe set; what closes leaves it, so that it does not grow."""

  def __init__(self):
    self._lock = threading.Lock()
    self._ends: set[End] = set()

  def add(self, end: End) -> None:
    with self._lock:
      self._ends.add(end)

  def discard(self, end: End) -> None:
    with self._lock:
      self._ends.discard(end)

  def close_all(self) -> None:
    """Closes each; an end that calls `discard` meanwhile does no harm."""
    with self._lock:
      ends = list(self._ends)
    for end in ends:
      end.close()
