# SPDX-License-Identifier: Apache-2.0
"""The publishers and fetchers that a data plane closes when it closes."""

import threading
from typing import Protocol


class End(Protocol):
  """A publisher or a fetcher."""

  def close(self) -> None:
    """Frees it; idempotent."""


class OpenEnds:
  """A thread-safe set of open ends; closed ones leave it."""

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
    """Closes each; an end may call `discard` meanwhile."""
    with self._lock:
      ends = list(self._ends)
    for end in ends:
      end.close()
