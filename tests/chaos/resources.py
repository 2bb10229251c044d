# SPDX-License-Identifier: Apache-2.0
"""Memory, descriptors and threads of processes, and whether they grow."""

import dataclasses
import statistics
import time
from collections.abc import Collection, Sequence

import psutil

SAMPLE_EVERY_S = 0.5
WARM_UP_S = 15.0  # After its first merge: allocators, caches, pools.
MEASURED_S = 30.0  # A shorter life says nothing of growth,
SAMPLES_MIN = 15  # nor do fewer samples.


@dataclasses.dataclass(frozen=True)
class Sample:
  """The resources of one process at one moment."""

  time_s: float  # Monotonic.
  rss_bytes: float
  descriptors: float
  threads: float


@dataclasses.dataclass(frozen=True)
class Growth:
  """The growth of one warm process per minute; negative: it shrank."""

  name: str
  pid: int
  measured_s: float
  rss_bytes: float
  descriptors: float
  threads: float


class Resources:
  """Samples processes from their start to their end.

  Only at moments at which all of them are at work together: what a process
  holds depends on how many others it is connected to.

  Args:
    roles: the names of all processes that there are at a time.
    hub: the one to which all others are connected.
  """

  def __init__(self, roles: Collection[str], hub: str):
    self._roles = frozenset(roles)
    self._hub = hub
    self._alive: set[str] = set()
    self._at_work: set[str] = set()
    self._processes: list[tuple[str, psutil.Process]] = []
    self._samples: dict[tuple[str, int], list[Sample]] = {}
    self._working_since_s: dict[str, float] = {}
    self._sampled_at_s = float('-inf')

  def follow(self, name: str, pid: int) -> None:
    """Follows a process from now on; call it before the process is reaped."""
    self._processes.append((name, psutil.Process(pid)))
    # The pid of one that died long ago may come again.
    self._samples[name, pid] = []
    self._working_since_s.pop(name, None)
    self._alive.add(name)

  def works(self, name: str) -> None:
    """The process is at work with the hub, unless it has died meanwhile."""
    if name not in self._alive:
      return
    self._at_work.add(name)
    self._working_since_s.setdefault(name, time.monotonic())

  def dies(self, name: str) -> None:
    """Notes that it stopped working; if it is the hub, all others did, too."""
    self._alive.discard(name)
    self._at_work -= self._roles if name == self._hub else {name}

  def sample(self) -> None:
    """Takes a sample of each that is warm, if the last ones are old enough."""
    now_s = time.monotonic()
    if self._at_work != self._roles:
      return
    if now_s - self._sampled_at_s < SAMPLE_EVERY_S:
      return
    self._sampled_at_s = now_s
    for name, process in self._processes:
      warm_at_s = self._working_since_s.get(name, now_s) + WARM_UP_S
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
    """Returns samples by 'name (pid)'; empty for those that never were warm."""
    return {
      f'{name} ({pid})': list(samples)
      for (name, pid), samples in self._samples.items()
    }

  def growths(self) -> list[Growth]:
    """Returns the growth of each process that lived long enough."""
    found = (
      growth(name, pid, samples)
      for (name, pid), samples in self._samples.items()
    )
    return [each for each in found if each is not None]


def growth(name: str, pid: int, samples: Sequence[Sample]) -> Growth | None:
  """Returns the growth from the first to the last third's median.

  None if the samples are few or span less than `MEASURED_S`.
  """
  if len(samples) < SAMPLES_MIN:
    return None
  if samples[-1].time_s - samples[0].time_s < MEASURED_S:
    return None
  third = len(samples) // 3
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
