# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, their results as a table and as JSON, and the machine."""

import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence

from diloco import __version__
from diloco.pages.parts import Column, ReportPage, Table

SCALES = {'s': 1.0, 'ms': 1e3, 'µs': 1e6}
STAT = pathlib.Path('/proc/stat')
CPUINFO = pathlib.Path('/proc/cpuinfo')
ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ('jax', 'jaxlib', 'numpy', 'optax', 'grpcio', 'orbax-checkpoint')
IDLE = (3, 4)  # Fields of a line of /proc/stat: idle, waiting for a disk.
GUEST = 8  # From here on, fields repeat what others hold.
BUSY_SHARE = 0.05  # Of all cores; from here on the table warns.
COLUMNS = (
  'row', 'figure', 'median', 'least … most', 'unit', 'ratio', 'against',
  'others',
)  # fmt: skip
DIGITS = 3  # That are shown; the files have all.
HOW_TO_READ = (
  'A ratio is a cost in units of the cost of what stands behind it, measured '
  'in the same run: 1 is as good, 2 takes twice as long (or as many bytes). '
  "'others' is the share of the machine's CPU time that other processes used "
  'meanwhile.'
)


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


def duration(
  name: str,
  unit: str,
  took_s: float,
  reference_s: float,
  against: str,
  beyond_s: float = 0.0,
) -> BenchFigure:
  """Returns the figure of a time, and its ratio to that of a reference.

  Args:
    unit: a key of SCALES.
    beyond_s: the figure, not the ratio, is what lies beyond it.
  """
  value = SCALES[unit] * (took_s - beyond_s)
  return BenchFigure(name, value, unit, took_s / reference_s, against)


@dataclasses.dataclass(frozen=True)
class BenchSettings:
  """Sizes of all rows.

  Attributes:
    smallest: True for a test: everything runs, nothing is measured well.
    millions: sizes of the rows that take parameters, in 10⁶.
    minutes: length of the row that looks for growth.
  """

  smallest: bool = False
  millions: tuple[float, ...] = (1.0, 10.0)
  minutes: float = 2.0

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
  measure: Callable[[BenchSettings], Iterable[BenchFigure]]
  seconds: float


# Calls beside a reference.


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A figure as data: a call, what it is measured beside, and in which unit.

  Attributes:
    value: makes the figure of the seconds of one call.
    reference: called in turn with `work`.
    against: what that is, in words.
    turns: so many calls of each, after one that does not count.
    clock: seconds; by default the CPU time of all threads of the process, so
      that a busy machine lengthens nothing.
  """

  name: str
  unit: str
  value: Callable[[float], float]
  work: Callable[[], object]
  reference: Callable[[], object]
  against: str
  turns: int
  clock: Callable[[], float] = time.process_time

  def measure(self) -> BenchFigure:
    """Returns medians: of the calls, and of the turns' ratios."""
    self.work()
    self.reference()
    took = [
      (timed(self.work, self.clock), timed(self.reference, self.clock))
      for _ in range(self.turns)
    ]
    ratio = statistics.median(a / b for a, b in took)
    work_s = statistics.median(a for a, _ in took)
    return BenchFigure(
      self.name, self.value(work_s), self.unit, ratio, self.against
    )


def timed(
  call: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
  """Returns how many seconds a call takes."""
  began_s = clock()
  call()
  return max(clock() - began_s, 1e-9)


def quantile(values: Sequence[float], share: float) -> float:
  """Returns the smallest value that at least `share` of them don't exceed."""
  ascending = sorted(values)
  return ascending[max(0, -int(-len(ascending) * share // 1) - 1)]


# Repetitions.


@dataclasses.dataclass(frozen=True)
class RepeatedFigure:
  """One figure of a row over all repetitions."""

  row: str
  name: str
  unit: str
  against: str
  values: tuple[float, ...]
  ratios: tuple[float, ...]  # Empty if there is no reference.
  others: float  # Share of the machine's CPU time, of the whole row.

  @property
  def median(self) -> float:
    return statistics.median(self.values)

  @property
  def ratio(self) -> float | None:
    """Returns the median of the repetitions' ratios."""
    return statistics.median(self.ratios) if self.ratios else None

  def plain(self) -> dict:
    """Returns it as JSON."""
    return {
      **dataclasses.asdict(self),
      'median': self.median,
      'least': min(self.values),
      'most': max(self.values),
      'ratio': self.ratio,
    }


def repeated(
  row: str, repetitions: Sequence[Sequence[BenchFigure]], others: float
) -> list[RepeatedFigure]:
  """Gathers the repetitions of a row, figure by figure."""
  figures = []
  for first in repetitions[0]:
    same = [f for each in repetitions for f in each if f.name == first.name]
    figures.append(
      RepeatedFigure(
        row,
        first.name,
        first.unit,
        first.against,
        tuple(f.value for f in same),
        tuple(f.ratio for f in same if f.ratio is not None),
        others,
      )
    )
  return figures


@dataclasses.dataclass(frozen=True)
class Measured:
  """All that a command has measured, and on what."""

  figures: Sequence[RepeatedFigure]
  failed: dict[str, str]  # Why, by row.
  machine: dict
  others: float
  command: str

  def page(self) -> ReportPage:
    """Returns the table with what it was measured on."""
    machine = self.machine
    memory_gb = machine['memory_bytes'] / 1e9
    rows = tuple(
      (
        f.row,
        f.name,
        _short(f.median),
        f'{_short(min(f.values))} … {_short(max(f.values))}',
        f.unit,
        _short(f.ratio),
        f.against,
        f'{f.others:.0%}',
      )
      for f in self.figures
    )
    notes = tuple(f'{row} failed: {why}' for row, why in self.failed.items())
    columns = tuple(map(Column, COLUMNS))
    return ReportPage(
      name='bench',
      title=f'diloco {machine["diloco"]}, benchmarks',
      command=self.command,
      paragraphs=(
        f'{machine["cpu"]}, {machine["cores_allowed"]} of {machine["cores"]} '
        f'cores, {memory_gb:.1f} GB; Python {machine["python"]}, jax '
        f'{machine["versions"]["jax"]}; commit {machine["commit"]}.',
        sentence(self.others),
        HOW_TO_READ,
      ),
      parts=(Table('benchmarks', 'Benchmarks', columns, rows, notes),),
    )

  def record(self) -> dict:
    """Returns all that was measured, as JSON."""
    return vars(self) | {'figures': [f.plain() for f in self.figures]}


def as_markdown(report: ReportPage) -> str:
  """Returns the table with machine, others' share and command."""
  (table,) = report.parts
  lines = [[column.name for column in table.columns]]
  lines.append(['---'] * len(lines[0]))
  lines += [['' if c is None else str(c) for c in row] for row in table.rows]
  rows = '\n'.join(f'| {" | ".join(line)} |' for line in lines)
  paragraphs = (*report.paragraphs[:-1], f'    {report.command}', rows)
  return '\n\n'.join((*paragraphs, *table.notes)) + '\n'


def _short(value: float | None) -> str | None:
  """Returns a number with few digits, never as a power of ten."""
  if value is None:
    return None
  if abs(value) >= 10 ** (DIGITS - 1):
    return f'{value:,.0f}'
  return f'{value:.{DIGITS}g}'


# The machine, and how busy others keep it.


def describe() -> dict:
  """Returns processor, cores, memory, versions, and the commit if known."""
  cpu = re.search(r'model name\s*:\s*(.*)', CPUINFO.read_text())
  return {
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'cpu': cpu[1] if cpu else platform.machine(),
    'cores': os.cpu_count(),
    'cores_allowed': len(os.sched_getaffinity(0)),
    'memory_bytes': os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'),
    'system': platform.platform(),
    'python': platform.python_version(),
    'diloco': __version__,
    'commit': _commit(),
    'versions': {name: importlib.metadata.version(name) for name in PACKAGES},
  }


# CPU seconds so far: of the machine, idle ones among them, and of this process
# and its dead children.
CpuTimes = tuple[float, float, float]


class LoadMeter:
  """Measures which share of the machine's CPU time others used.

  Children count as its own once they have been waited for.
  """

  def __init__(self):
    self._begin = read_times()

  def others(self) -> float:
    """Returns the others' share since the start, in [0, 1]."""
    return share_of_others(self._begin, read_times())


def share_of_others(begin: CpuTimes, end: CpuTimes) -> float:
  """Returns (busy − own) / total between two readings; 0 if no time passed."""
  total_s, idle_s, own_s = (b - a for a, b in zip(begin, end))
  return min(max((total_s - idle_s - own_s) / (total_s or 1.0), 0.0), 1.0)


def read_times() -> CpuTimes:
  """Reads /proc/stat."""
  line = STAT.read_text().split('\n', 1)[0]
  tick_s = 1 / os.sysconf('SC_CLK_TCK')
  fields = [int(field) * tick_s for field in line.split()[1:]][:GUEST]
  used = os.times()
  return sum(fields), sum(fields[i] for i in IDLE), sum(used[:4])


def sentence(share: float) -> str:
  """Returns the sentence on the others' share."""
  warning = (
    ' Figures of time are not those of a quiet machine.'
    if share > BUSY_SHARE
    else ''
  )
  return (
    f'Other processes used {share:.0%} of the CPU time of all cores during '
    f'the run.{warning}'
  )


def _commit() -> str | None:
  """Returns the commit of a checkout, with a + if files differ from it."""
  if not (ROOT / '.git').exists():
    return None
  commit = _git('rev-parse', 'HEAD')
  changed = _git('status', '--porcelain', '--untracked-files=no')
  return f'{commit}+' if commit and changed else commit


def _git(*words: str) -> str | None:
  try:
    done = subprocess.run(
      ['git', *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
  except (OSError, subprocess.CalledProcessError):
    return None
  return done.stdout.strip()
