# SPDX-License-Identifier: Apache-2.0
"""The parts that making a sweep has in common, whatever makes its runs."""

import contextlib
import fcntl
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from diloco.config.sections import ConfigError
from diloco.metrics.figures import clock
from diloco.metrics.run_progress import count
from diloco.pages import text_tables
from diloco.sweeps import sweep
from diloco.sweeps.sweep import Variant

LOCK = 'sweep.lock'
COLUMNS = (
  'variant', 'seeds', 'loss', '±', 'against it', 'participation',
  'age, steps', 'older than 1.5', 'delay, steps', 'goodput', 'M tokens merged',
)  # fmt: skip

SeedRun = tuple[Variant, int]  # A variant and its seed.


@contextlib.contextmanager
def alone_in(workdir: pathlib.Path) -> Iterator[None]:
  """Holds a lock, which the kernel releases when the process dies."""
  workdir.mkdir(parents=True, exist_ok=True)
  with (workdir / LOCK).open('a') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ConfigError(
        [
          f'--workdir={workdir}: another sweep is making runs there; wait for '
          'it, or use another folder'
        ]
      ) from None
    yield


def missing(
  rows: Sequence[Variant], seeds: int, workdir: pathlib.Path
) -> list[SeedRun]:
  """Returns the runs without a result, seed by seed."""
  return [
    (variant, seed)
    for seed in range(seeds)
    for variant in rows
    if sweep.read(workdir, variant.label, seed) is None
  ]


def say(line: str) -> None:
  """Prints a line beside the table, which goes to standard output."""
  print(line, file=sys.stderr, flush=True)


def follow(
  ended: Iterable[tuple[SeedRun, int]], runs: int, workdir: pathlib.Path
) -> list[SeedRun]:
  """Says how each run has ended, and returns those that failed.

  Args:
    ended: yields a run and its exit code as soon as it has ended.
    runs: how many there will be.
  """
  failed, began_s = [], time.monotonic()
  for number, ((variant, seed), code) in enumerate(ended, start=1):
    result = sweep.read(workdir, variant.label, seed)
    if code or result is None:
      failed.append((variant, seed))
    loss = 'failed' if result is None else f'loss {result.loss:.4f}'
    so_far = clock(time.monotonic() - began_s)
    say(
      f'{count(number, runs, began_s)}  {variant.label}, seed {seed}: {loss}, '
      f'{so_far} so far'
    )
  return failed


def finish(
  rows: Sequence[Variant],
  seeds: int,
  workdir: pathlib.Path,
  failed: Sequence[SeedRun],
  log: str,
) -> int:
  """Prints the table and names what failed; returns the exit code.

  Args:
    log: path of a run's log below its folder.
  """
  print(table(rows, seeds, workdir))
  for variant, seed in failed:
    path = sweep.folder(workdir, variant.label, seed) / log
    say(f'failed: {variant.label}, seed {seed}; see {path}')
  return 1 if failed else 0


def table(rows: Sequence[Variant], seeds: int, workdir: pathlib.Path) -> str:
  """Returns losses, and paired differences with 95 % intervals, as text."""
  found = {
    v.label: {
      seed: result
      for seed in range(seeds)
      if (result := sweep.read(workdir, v.label, seed)) is not None
    }
    for v in rows
  }
  cells = []
  for each in sweep.compare(found, rows):
    against = merged = '-'
    if each.difference is not None:
      against = f'{100 * each.difference:+.2f} ± {100 * each.half_width:.2f} %'
    if each.merged_tokens is not None:
      merged = f'{each.merged_tokens / 1e6:.2f}'
    cells.append(
      (
        each.variant.label,
        len(each.results),
        f'{each.mean:.4f}',
        f'{each.spread:.4f}',
        against,
        _mean(each.results, 'participation', 3),
        _mean(each.results, 'age_steps'),
        _mean(each.results, 'old_share', 3),
        _mean(each.results, 'delay_steps'),
        _mean(each.results, 'goodput'),
        merged,
      )
    )
  return text_tables.plain(text_tables.table(None, COLUMNS, cells))


def _mean(results, name: str, digits: int = 2) -> str:
  """Returns the mean of a field over the results that have it."""
  known = [x for r in results if (x := getattr(r, name)) is not None]
  return f'{sum(known) / len(known):.{digits}f}' if known else '-'
