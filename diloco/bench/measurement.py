# SPDX-License-Identifier: Apache-2.0
"""Values of a benchmark: what a row measures, and a figure that it returns."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np


class BenchFailed(Exception):
  """A row could not be measured; says why."""


@dataclasses.dataclass(frozen=True)
class BenchFigure:
  """One number of one repetition.

  Attributes:
    name: unique within its row.
    ratio: cost in units of the reference's cost: 1 is as good, 2 is twice as
      dear. None: nothing in the same run can be compared with.
    against: the reference.
  """

  name: str
  value: float
  unit: str
  ratio: float | None = None
  against: str = ''


@dataclasses.dataclass(frozen=True)
class BenchSettings:
  """Sizes of all rows.

  Attributes:
    smallest: True for a test: everything runs, nothing is measured well.
    millions: sizes of the rows that take parameters, in 10⁶.
    learners: numbers of learners of the row that has many.
  """

  smallest: bool = False
  millions: tuple[float, ...] = (1.0, 10.0)
  learners: tuple[int, ...] = (16, 64)

  def pick(self, usual, smallest):
    """Returns the size that fits."""
    return smallest if self.smallest else usual

  @property
  def sizes(self) -> tuple[float, ...]:
    """Returns the model sizes in 10⁶ parameters."""
    return self.pick(self.millions, (0.01,))


@dataclasses.dataclass(frozen=True)
class BenchRow:
  """A benchmark.

  Attributes:
    title: what it measures, in a line.
    measure: makes one repetition.
    seconds: what a repetition takes, roughly: for the time that is left.
  """

  title: str
  measure: Callable[[BenchSettings], Sequence[BenchFigure]]
  seconds: float


@dataclasses.dataclass(frozen=True)
class Pair:
  """Medians of something and of its reference, measured in turns."""

  work_s: float
  reference_s: float
  ratio: float  # The median of the turns' ratios.


def in_turns(
  work: Callable[[], object],
  reference: Callable[[], object],
  turns: int,
  clock: Callable[[], float] = time.process_time,
) -> Pair:
  """Calls both alternately, after one call of each that does not count.

  Args:
    clock: seconds; by default the CPU time of all threads of the process, so
      that a busy machine lengthens nothing.
  """
  work()
  reference()
  took = [(timed(work, clock), timed(reference, clock)) for _ in range(turns)]
  return Pair(
    statistics.median(a for a, _ in took),
    statistics.median(b for _, b in took),
    statistics.median(a / b for a, b in took),
  )


def copying(values: int) -> Callable[[], object]:
  """Returns a call that copies so many f32 into memory that it keeps."""
  source = np.ones(values, np.float32)
  target = np.zeros_like(source)
  return functools.partial(np.copyto, target, source)


def timed(
  call: Callable[[], object],
  clock: Callable[[], float] = time.perf_counter,
) -> float:
  """Returns how many seconds a call takes."""
  began_s = clock()
  call()
  return max(clock() - began_s, 1e-9)


def quantile(values: Sequence[float], share: float) -> float:
  """Returns the smallest value that at least `share` of them don't exceed."""
  ascending = sorted(values)
  return ascending[max(0, -int(-len(ascending) * share // 1) - 1)]
