# SPDX-License-Identifier: Apache-2.0
"""Memory, descriptors and threads of processes, and whether they grow."""

import dataclasses
import statistics
import time
from collections.abc import Sequence

import psutil

SAMPLE_EVERY_S = 1.0
WARM_UP_S = 15.0  # After its first merge: allocators, caches, pools.
MEASURED_S = 30.0  # A shorter life says nothing of growth.


@dataclasses.dataclass(frozen=True)
class Sample:
  """What one process holds at one moment."""

  time_s: float  # Monotonic.
  rss_bytes: float
  descriptors: float
  threads: float


@dataclasses.dataclass(frozen=True)
class Growth:
  """Of one process, per minute, once it was warm; negative: it shrank."""

  name: str
  pid: int
  measured_s: float
  rss_bytes: float
  descriptors: float
  threads: float


class Resources:
  """Samples processes from their start to their end."""

  def __init__(self):
    self._processes: list[tuple[str, psutil.Process]] = []
    self._samples: dict[tuple[str, int], list[Sample]] = {}
    self._working: dict[str, float] = {}  # Name -> since when.
    self._sampled_at_s = float('-inf')

  def follow(self, name: str, pid: int) -> None:
    """From now on; to be called before the process is reaped."""
    self._processes.append((name, psutil.Process(pid)))
    # The pid of one that died long ago may come again.
    self._samples[name, pid] = []
    self._working.pop(name, None)

  def works(self, name: str) -> None:
    """The process does its part: what it takes from now on is counted."""
    self._working.setdefault(name, time.monotonic())

  def sample(self) -> None:
    """Takes a sample of each, where the last ones are old enough."""
    now_s = time.monotonic()
    if now_s - self._sampled_at_s < SAMPLE_EVERY_S:
      return
    self._sampled_at_s = now_s
    for name, process in self._processes:
      warm_at_s = self._working.get(name, now_s) + WARM_UP_S
      try:
        if now_s < warm_at_s or not process.is_running():
          continue
        with process.oneshot():
          found = Sample(
            now_s,
            process.memory_info().rss,
            process.num_fds(),
            process.num_threads(),
          )
      except (psutil.NoSuchProcess, psutil.AccessDenied):
        continue  # It dies at this moment.
      self._samples[name, process.pid].append(found)

  def left(self) -> list[str]:
    """Processes that are still there."""
    return [
      f'{name} ({process.pid})'
      for name, process in self._processes
      if process.is_running()
    ]

  def samples(self) -> dict[str, list[Sample]]:
    """By 'name (pid)'; those that never were warm have none."""
    return {
      f'{name} ({pid})': list(samples)
      for (name, pid), samples in self._samples.items()
    }

  def growths(self) -> list[Growth]:
    """Of each process that lived long enough to tell."""
    found = (
      growth(name, pid, samples)
      for (name, pid), samples in self._samples.items()
    )
    return [each for each in found if each is not None]


def growth(name: str, pid: int, samples: Sequence[Sample]) -> Growth | None:
  """From the median of the first third of the samples to that of the last.

  None where they span less than `MEASURED_S`.
  """
  if not samples or samples[-1].time_s - samples[0].time_s < MEASURED_S:
    return None
  third = max(len(samples) // 3, 1)
  first, last = samples[:third], samples[-third:]

  def median(part: Sequence[Sample], field: str) -> float:
    return statistics.median(getattr(sample, field) for sample in part)

  minutes = (median(last, 'time_s') - median(first, 'time_s')) / 60
  per_minute = {
    field: (median(last, field) - median(first, field)) / minutes
    for field in ('rss_bytes', 'descriptors', 'threads')
  }
  span_s = samples[-1].time_s - samples[0].time_s
  return Growth(name, pid, span_s, **per_minute)
