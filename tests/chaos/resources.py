# SPDX-License-Identifier: Apache-2.0
"""Memory, descriptors and threads of processes, and whether they grow."""

import collections
import contextlib
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Collection, Mapping, Sequence

import psutil

PROC = pathlib.Path('/proc')

SAMPLE_EVERY_S = 0.5
WARM_UP_S = 15.0  # After its first merge: allocators, caches, pools.
MEASURED_S = 30.0  # A shorter life says nothing of growth,
SAMPLES_MIN = 15  # nor do fewer samples.
# Tensorstore, which writes checkpoints, gives its threads back 20 s after each.
THREADS_MEASURED_S = 80.0
# Growth per minute of a warm process. What stayed of every death would be
# more: there are 5 to 10 of them in a minute.
RSS_BYTES_MAX = 16e6
DESCRIPTORS_MAX = 4.0
THREADS_MAX = 4.0  # Pools fill up as they are used.


@dataclasses.dataclass(frozen=True)
class Sample:
  """The resources of one process at one moment."""

  time_s: float  # Monotonic.
  rss_bytes: float
  descriptors: float
  thread_names: Mapping[str, int]  # How many threads have each.

  @property
  def threads(self) -> int:
    """All of them."""
    return sum(self.thread_names.values())


@dataclasses.dataclass(frozen=True)
class Growth:
  """The growth of one warm process per minute; negative: it shrank.

  Attributes:
    threads: of the fewest that it had, as a pool that is given back between
      two uses is no leak; None: it did not live for `THREADS_MEASURED_S`.
    new_threads: names of those that were added, from the first to the last
      sample.
  """

  name: str
  pid: int
  measured_s: float
  rss_bytes: float
  descriptors: float
  threads: float | None
  new_threads: str


class ResourceWatch:
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

  def leaves(self, name: str) -> None:
    """Notes that it is gone for good: the others are all that there are."""
    self.dies(name)
    self._roles -= {name}

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
      if now_s < warm_at_s or not process.is_running():
        continue
      found = _sample(process, now_s)
      if found is None:
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


def _sample(process: psutil.Process, now_s: float) -> Sample | None:
  """Looks at a process; None: it is gone."""
  try:
    rss_bytes, descriptors = process.memory_info().rss, process.num_fds()
  except psutil.Error:
    return None
  names = _thread_names(PROC / str(process.pid))
  return Sample(now_s, rss_bytes, descriptors, names)


def _thread_names(folder: pathlib.Path) -> Mapping[str, int]:
  """Counts the threads of a process by name, without those that just end."""
  names = collections.Counter()
  for task in folder.glob('task/*/comm'):
    with contextlib.suppress(OSError):
      names[task.read_text().strip()] += 1
  return names


def growth(name: str, pid: int, samples: Sequence[Sample]) -> Growth | None:
  """Returns the growth per minute: the least of both halves'.

  What leaks grows in both; what warms up (allocators, caches, pools) hardly
  grows in the second. Each half's is from its first to its last third's
  median; that of threads, from the first to the last half's minimum. None if
  the samples are few or span less than `MEASURED_S`.
  """
  if len(samples) < SAMPLES_MIN:
    return None
  span_s = samples[-1].time_s - samples[0].time_s
  if span_s < MEASURED_S:
    return None
  middle = len(samples) // 2
  halves = samples[:middle], samples[middle:]
  per_minute = {
    field: min(_slope(half, field) for half in halves)
    for field in ('rss_bytes', 'descriptors')
  }
  new = collections.Counter(samples[-1].thread_names)
  new.subtract(samples[0].thread_names)
  told = ', '.join(f'{n:+d} {thread}' for thread, n in sorted(new.items()) if n)
  return Growth(
    name, pid, span_s, **per_minute, threads=_floor(samples), new_threads=told
  )


def _slope(samples: Sequence[Sample], field: str) -> float:
  """Returns by how much a minute a field grows, by medians of thirds."""
  third = len(samples) // 3

  def grew(of: str) -> float:
    first, last = (
      statistics.median(getattr(sample, of) for sample in part)
      for part in (samples[:third], samples[-third:])
    )
    return last - first

  return grew(field) / (grew('time_s') / 60)


def _floor(samples: Sequence[Sample]) -> float | None:
  """Returns by how many threads a minute the fewest of them grew."""
  span_s = samples[-1].time_s - samples[0].time_s
  if span_s < THREADS_MEASURED_S:
    return None
  half = len(samples) // 2
  first, last = (
    min(sample.threads for sample in part)
    for part in (samples[:half], samples[half:])
  )
  return (last - first) / (span_s / 2 / 60)
