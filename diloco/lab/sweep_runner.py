# SPDX-License-Identifier: Apache-2.0
"""Checks the configurations of a sweep, then makes its runs."""

import contextlib
import copy
import dataclasses
import fcntl
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures

from diloco.config import flags, parsing, run_config
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.lab import sweep
from diloco.lab.sweep import Variant
from diloco.metrics.run_progress import count
from diloco.metrics.workdir import Workdir
from diloco.pages import text_tables

_OF_A_RUN = ('name', 'seed')  # May differ between equal runs.
LOCK = 'sweep.lock'
ONE_THREAD = '--xla_cpu_multi_thread_eigen=false'
COLUMNS = (
  'variant', 'seeds', 'loss', '±', 'against it', 'participation',
  'age, steps', 'older than 1.5', 'delay, steps', 'goodput', 'M tokens merged',
)  # fmt: skip


def make_configs(base: dict, rows: Sequence[Variant]) -> dict[str, RunConfig]:
  """Returns each variant's configuration, by label.

  Args:
    base: the configuration of --config, as nested plain dicts.

  Raises:
    ConfigError: lists each problem with its variant's label.
  """
  made, problems = {}, []
  for variant in rows:
    try:
      made[variant.label] = run_config.build(_changed(base, variant.changes))
    except ConfigError as error:
      problems += [f'sweep: {variant.label!r}: {p}' for p in error.problems]
  if problems:
    raise ConfigError(problems)
  return made


def check(
  made: Mapping[str, RunConfig],
  rows: Sequence[Variant],
  seeds: int,
  workdir: pathlib.Path,
) -> None:
  """Rejects finished runs with another configuration.

  A run from before a key existed passes if its variant leaves that key alone.

  Raises:
    ConfigError: names the folders and what differs.
  """
  problems = [
    f'{run}: was made otherwise ({differs}): remove it, or use another '
    '--workdir'
    for variant in rows
    for seed in range(seeds)
    if sweep.read(workdir, variant.label, seed) is not None
    for run in [sweep.folder(workdir, variant.label, seed)]
    if (differs := _difference(made[variant.label], variant.changes, run))
  ]
  if problems:
    raise ConfigError(problems)


def _changed(base: dict, changes: Mapping[str, object]) -> dict:
  """Returns a copy with other values; unknown keys are found later."""
  nested = copy.deepcopy(base)
  for key, value in changes.items():
    *sections, last = key.split('.')
    inner = nested
    for section in sections:
      inner = inner.setdefault(section, {})
    inner[last] = value
  return nested


def _difference(
  config: RunConfig, changes: Mapping[str, object], run: pathlib.Path
) -> str:
  """Returns how a run's stored configuration differs, '' if it does not."""
  path = Workdir(run).config
  here = parsing.flatten(_as_json(config))
  try:
    there = parsing.flatten(json.loads(path.read_text()))
  except (OSError, ValueError, AttributeError) as error:
    return f'{path.name}: {error}'
  absent = here.keys() - there.keys() - changes.keys()
  return '; '.join(
    f'{key}={there.get(key)} there, {here.get(key)} here'
    for key in sorted(here.keys() | there.keys())
    if key not in absent
    and key not in _OF_A_RUN
    and here.get(key) != there.get(key)
  )


def _as_json(config: RunConfig) -> dict:
  """Returns the configuration as stored in a file: lists for tuples."""
  return json.loads(json.dumps(dataclasses.asdict(config)))


# Makes the runs of a sweep, each in a process of its own with one thread.
#
# A small model's step is faster on one thread than on two (measured: 14 ms
# against 28 at 131 k parameters), and two runs fit side by side on two cores.
# All share their compiled programs: for a run of 131 k parameters, 13 to 15 s
# of 20 to 23 s of CPU do not depend on its steps.


def make(
  rows: Sequence[Variant], seeds: int, jobs: int, workdir: pathlib.Path
) -> int:
  """Makes the missing runs, then prints the table; 1 if a run failed.

  Raises:
    ConfigError: another sweep is making runs in the folder.
  """
  with _alone_in(workdir):
    return _make(rows, seeds, jobs, workdir)


@contextlib.contextmanager
def _alone_in(workdir: pathlib.Path) -> Iterator[None]:
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


def _make(
  rows: Sequence[Variant], seeds: int, jobs: int, workdir: pathlib.Path
) -> int:
  sweep.write_variants(workdir, rows)
  todo = [
    (variant, seed)
    for seed in range(seeds)
    for variant in rows
    if sweep.read(workdir, variant.label, seed) is None
  ]
  if todo:
    said = f'{len(todo)} runs, {jobs} at a time; logs: {workdir}/*/seed-*/log'
    print(said, file=sys.stderr, flush=True)
  failed, began_s = [], time.monotonic()
  with _stopping_pool(jobs) as submit:
    running = {
      submit(variant, seed, workdir): (variant, seed) for variant, seed in todo
    }
    for number, done in enumerate(futures.as_completed(running), start=1):
      variant, seed = running[done]
      result = sweep.read(workdir, variant.label, seed)
      if done.result() or result is None:
        failed.append((variant.label, seed))
      loss = 'failed' if result is None else f'loss {result.loss:.4f}'
      done_so_far = count(number, len(todo), began_s)
      said = f'{done_so_far}  {variant.label}, seed {seed}: {loss}'
      print(said, file=sys.stderr, flush=True)
  print(table(rows, seeds, workdir))
  for label, seed in failed:
    log = sweep.folder(workdir, label, seed) / 'log'
    print(f'failed: {label}, seed {seed}; see {log}', file=sys.stderr)
  return 1 if failed else 0


@contextlib.contextmanager
def _stopping_pool(jobs: int) -> Iterator[Callable[..., futures.Future]]:
  """Yields what submits a run; Ctrl-C ends those that have begun, and no
  other begins.
  """
  pool = futures.ThreadPoolExecutor(jobs)
  submitted, processes = [], set()

  def submit(*run) -> futures.Future:
    submitted.append(pool.submit(_run, *run, processes))
    return submitted[-1]

  try:
    yield submit
  except KeyboardInterrupt:
    print('the same command goes on with the sweep', file=sys.stderr)
    raise
  finally:
    pool.shutdown(wait=False, cancel_futures=True)
    # Again and again: a process may be just beginning.
    while not all(future.done() for future in submitted):
      for process in tuple(processes):
        process.terminate()
      time.sleep(0.1)


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


def _run(
  variant: Variant,
  seed: int,
  workdir: pathlib.Path,
  processes: set[subprocess.Popen],
) -> int:
  folder = sweep.folder(workdir, variant.label, seed)
  folder.mkdir(parents=True, exist_ok=True)
  changes = [f'--config.{key}={_text(x)}' for key, x in variant.changes.items()]
  xla = f'{os.environ.get("XLA_FLAGS", "")} {ONE_THREAD}'.strip()
  with (folder / 'log').open('wb') as log:
    process = subprocess.Popen(
      [
        sys.executable,
        '-m',
        'diloco.lab',
        *flags.arguments(),
        *changes,
        f'--config.seed={seed}',
        f'--workdir={folder}',
        f'--compiled={Workdir(workdir).compiled}',
        '--noparameters',  # A sweep's models would fill the disk.
      ],
      stdout=log,
      stderr=log,
      env={**os.environ, 'XLA_FLAGS': xla, 'NPROC': '1'},
    )
  processes.add(process)
  code = process.wait()
  processes.discard(process)
  return code


def _text(value) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)
