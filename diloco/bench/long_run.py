# SPDX-License-Identifier: Apache-2.0
"""Shows whether a run stays as it begins: python -m diloco.bench.long_run

  python -m diloco.bench.long_run --minutes=10 --millions=10 \\
      [--picture=FILE.png] [--json=FILE]

Two learners whose computation is a sleep, P = 4, H = 20, τ = 4, int4, with the
usual checkpoints of learners and syncer. Memory, steps and rounds by minute (by
a sixtieth of a shorter run); the table compares the last third with the first,
after a warm-up. Linux only.
"""

import dataclasses
import pathlib
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import rich.console
from absl import flags as absl_flags
from absl import logging

from diloco.bench import machine_load
from diloco.bench.__main__ import check_writable
from diloco.bench.measurement import BenchFailed, quantile
from diloco.bench.process_rows import EVERY_20, sleep_s
from diloco.bench.real_run import RealRun, bowl, resident_bytes
from diloco.config import flags
from diloco.config.sections import CheckpointConfig, ConfigError, defaults
from diloco.metrics import files, names
from diloco.metrics.figures import clock
from diloco.metrics.run_progress import ProgressLine
from diloco.metrics.workdir import learner_name
from diloco.pages import terminal
from diloco.pages.parts import Chart, Column, Line, ReportPage, Table

LEARNERS = (0, 1)
WINDOWS = 60  # Of the whole time.
WARM_UP = 5  # Windows: what is compiled, allocators, pools.
SAMPLES = 5  # Of memory, in a window.
# A boundary or a checkpoint lengthens some steps of a hundred.
SHARES = {'median': 0.5, 'p99': 0.99}

Points = list[tuple[float, float]]  # (Seconds since the epoch, value).
Windows = list[float | None]  # None: nothing was measured in it.


def define_flags() -> None:
  """The flags of this main."""
  absl_flags.DEFINE_float(
    'minutes', 10.0, 'Minutes that it runs.', lower_bound=0.1
  )
  absl_flags.DEFINE_float(
    'millions', 10.0, 'Parameters, in 10⁶.', lower_bound=0.001
  )
  absl_flags.DEFINE_string('picture', None, 'PNG file for the chart.')
  absl_flags.DEFINE_string('json', None, 'File for the values of all windows.')


def main(argv: Sequence[str]) -> int:
  given = absl_flags.FLAGS
  if len(argv) > 1:
    raise ConfigError([f'{argv[1]}: unexpected argument'])
  check_writable([pathlib.Path(p) for p in (given.picture, given.json) if p])
  logging.set_verbosity(logging.WARNING)
  # Ends the processes of the run, too.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  machine, load = machine_load.describe(), machine_load.LoadMeter()
  command = shlex.join(['python', '-m', 'diloco.bench.long_run', *sys.argv[1:]])
  print(announcement(given.minutes), file=sys.stderr)
  try:
    with ProgressLine() as line:
      found = measure(given.minutes, given.millions, line.say)
    page = report(found, given.minutes, given.millions, command, load.others())
  except BenchFailed as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  console = rich.console.Console(highlight=False, markup=False)
  terminal.show(dataclasses.replace(page, parts=page.parts[:1]), console)
  if given.picture:
    from diloco.pages import figures  # Matplotlib is an extra.

    figures.save(page.parts[1], pathlib.Path(given.picture))
  if given.json:
    record = {'machine': machine, 'command': command, 'windows': found}
    files.write_json(pathlib.Path(given.json), record)
  return 0


def announcement(minutes: float) -> str:
  """Returns how long it will take, in words."""
  return (
    f'it runs for {minutes:g} minutes, and a start of a minute; --minutes=60 '
    'shows a slower growth; Ctrl-C ends it'
  )


def measure(
  minutes: float, millions: float, say: Callable[[str], None]
) -> dict[str, Windows]:
  """Trains for so long; returns the windows of each figure by its name."""
  overrides = {
    **EVERY_20,
    **bowl(millions),
    **{
      f'checkpoint.{key}': defaults(CheckpointConfig)[key]
      for key in ('learner_every_steps', 'syncer_every_rounds')
    },
    'protocol.learners': len(LEARNERS),
    'run.step_floor_s': sleep_s(millions),
  }
  window_s = 60 * minutes / WINDOWS
  with RealRun(overrides) as run:
    say('the processes start')
    run.start_syncer()
    for m in LEARNERS:
      run.start_learner(m)
    for m in LEARNERS:
      run.until_merged(m, 1)
    began_s = time.time()
    memory: dict[str, Points] = {
      f'{name}, memory': [] for name in run.processes
    }
    for i in range(WINDOWS * SAMPLES):
      if i % SAMPLES == 0:
        left = clock(60 * minutes - (time.time() - began_s))
        say(f'{i // SAMPLES}/{WINDOWS} windows, {left} left')
      due_s = began_s + (i + 1) * window_s / SAMPLES
      run.until(lambda due_s=due_s: time.time() >= due_s, 'the next sample')
      for name, process in run.processes.items():
        mb = resident_bytes(process.pid) / 1e6
        memory[f'{name}, memory'].append((time.time(), mb))
    steps = {m: run.steps(m) for m in LEARNERS}
    closes = run.closes()
  windows = {
    name: _windows(points, began_s, window_s, statistics.median)
    for name, points in memory.items()
  }
  for m, records in steps.items():
    points = [(r[names.TIME], 1e3 * r[names.STEP_TIME]) for r in records]
    for title, share in SHARES.items():
      windows[f'{learner_name(m)}, {title} step'] = _windows(
        points, began_s, window_s, lambda ms, share=share: quantile(ms, share)
      )
  points = [(close['time_s'], 1e3 * close['sync_s']) for close in closes]
  windows['median round'] = _windows(
    points, began_s, window_s, statistics.median
  )
  return windows


def _windows(
  points: Points,
  began_s: float,
  window_s: float,
  summary: Callable[[list[float]], float],
) -> Windows:
  """Returns the summary of the values in each window."""
  values: list[list[float]] = [[] for _ in range(WINDOWS)]
  for at_s, value in points:
    window = int((at_s - began_s) // window_s)
    if 0 <= window < WINDOWS:
      values[window].append(value)
  return [summary(each) if each else None for each in values]


def thirds(name: str, windows: Windows) -> tuple[float, float]:
  """Returns the medians of the first and the last third after the warm-up.

  Raises:
    BenchFailed: nothing was measured in one of them.
  """
  warm = windows[WARM_UP:]
  third = len(warm) // 3
  first, last = (
    [v for v in each if v is not None] for each in (warm[:third], warm[-third:])
  )
  if not first or not last:
    raise BenchFailed(f'{name}: too few; give more --minutes')
  return statistics.median(first), statistics.median(last)


def report(
  found: Mapping[str, Windows],
  minutes: float,
  millions: float,
  command: str,
  others: float | None,
) -> ReportPage:
  """Returns the table, and the chart of each figure beside its first third."""
  rows, lines = [], []
  for group, (name, windows) in enumerate(found.items()):
    unit = 'MB' if name.endswith('memory') else 'ms'
    first, last = thirds(name, windows)
    rows.append((name, unit, first, last, last / first))
    places = [i for i, value in enumerate(windows) if value is not None]
    xs = tuple((i + 0.5) * minutes / WINDOWS for i in places)
    ys = tuple(windows[i] / first for i in places)
    label = f'{name}, {first:.3g} {unit}'
    lines.append(Line(label, 'course', xs, ys, group=group))
  size = f'{millions:g} M parameters, M = {len(LEARNERS)}'
  names_ = ('figure', 'unit', 'first third', 'last third')
  table = Table(
    'long_run',
    f'{minutes:g} minutes with {size}',
    (*map(Column, names_), Column('last ÷ first', digits=3)),
    tuple(rows),
  )
  chart = Chart(
    'long_run_course',
    f'{size}: each figure beside its first third',
    'minutes',
    'times the median of the first third',
    tuple(lines),
    y_range=(0.0, 1.05 * max(y for line in lines for y in line.ys)),
  )
  return ReportPage(
    name='long_run',
    title=f'{minutes:g} minutes',
    command=command,
    paragraphs=(machine_load.said(others),),
    parts=(table, chart),
  )


if __name__ == '__main__':
  define_flags()
  flags.run_without_config(main)
