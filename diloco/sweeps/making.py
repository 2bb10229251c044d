# SPDX-License-Identifier: Apache-2.0
"""Plans the runs of a sweep, has them made, and shows the table.

How a run is made is the caller's: by the lab some side by side, by the launcher
one after the other.
"""

import contextlib
import copy
import dataclasses
import fcntl
import json
import pathlib
import runpy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from absl import flags as absl_flags

from diloco.config import flags, run_config, sections
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics.figures import clock
from diloco.metrics.run_progress import count
from diloco.metrics.workdir import Workdir
from diloco.pages import text_tables
from diloco.sweeps import sweep
from diloco.sweeps.sweep import Variant

LOCK = 'sweep.lock'
COLUMNS = (
  'variant', 'seeds', 'loss', '±', 'against it', 'participation',
  'age, steps', 'older than 1.5', 'delay, steps', 'goodput', 'M tokens merged',
  'code',
)  # fmt: skip

LAB = 'lab.'  # Keys that mean something in the lab only.
_OF_A_RUN = ('name', 'seed')  # May differ between equal runs.
SWEEP, SEEDS, ONLY = 'sweep', 'seeds', 'only'
OF_FILE = 'file'  # The value of --sweep alone.


@dataclasses.dataclass(frozen=True)
class SweepRun:
  """One run of a sweep: a variant with a seed."""

  variant: Variant
  seed: int
  config: RunConfig
  workdir: Workdir
  compiled: pathlib.Path  # The compilation cache of all runs.

  @property
  def name(self) -> str:
    return f'{self.variant.label}, seed {self.seed}'

  @property
  def arguments(self) -> list[str]:
    """The flags that give its processes their configuration."""
    changes = self.variant.changes | {'seed': self.seed}
    return [*flags.arguments(), *flags.as_flags(changes)]


@dataclasses.dataclass(frozen=True)
class Sweep:
  """A sweep whose configurations have been checked."""

  root: pathlib.Path
  rows: tuple[Variant, ...]
  seeds: int
  runs: tuple[SweepRun, ...]  # Those without a result, seed by seed.


# Makes runs; yields each with its exit code once it has ended.
MakeRuns = Callable[[Sequence[SweepRun]], Iterable[tuple[SweepRun, int]]]


def plan(of_processes: bool) -> Sweep:
  """Returns the sweep that the parsed flags ask for.

  Args:
    of_processes: whether its runs are real ones, not the lab's.

  Raises:
    ConfigError: it can't be made; names each variant or folder.
  """
  root, seeds = pathlib.Path(absl_flags.FLAGS.workdir), absl_flags.FLAGS.seeds
  if of_processes and Workdir(root).config.exists():
    raise ConfigError(
      f'--workdir={root}: holds a run, a sweep needs a folder of its own'
    )
  rows = variants()
  if of_processes and (problems := [*_of_the_lab(rows)]):
    raise ConfigError(problems)
  configs = flags.load(build=lambda base: make_configs(base.to_dict(), rows))
  with flags.refusing(sweep.BadResult):
    check(configs, rows, seeds, root, of_processes)
  return with_missing(root, rows, seeds, configs)


def with_missing(
  root: pathlib.Path,
  rows: Sequence[Variant],
  seeds: int,
  configs: Mapping[str, RunConfig],
) -> Sweep:
  """Returns a sweep with the runs that have no result.

  Args:
    configs: configurations by label.
  """
  runs = [
    SweepRun(
      variant,
      seed,
      dataclasses.replace(configs[variant.label], seed=seed),
      Workdir(sweep.folder(root, variant.label, seed)),
      Workdir(root).compiled,
    )
    for seed in range(seeds)
    for variant in rows
    if sweep.read(root, variant.label, seed) is None
  ]
  return Sweep(root, tuple(rows), seeds, tuple(runs))


def _of_the_lab(rows: Sequence[Variant]) -> Iterator[str]:
  """Yields variants that would be equal runs: processes ignore their keys."""
  for variant in rows:
    if vain := [key for key in variant.changes if key.startswith(LAB)]:
      yield (
        f'sweep: {variant.label!r}: {", ".join(vain)}: only of the lab, make '
        'it by python -m diloco.lab --sweep, or leave it out by --only=TEXT'
      )


def make(asked: Sweep, make_runs: MakeRuns, note: str, log: str) -> int:
  """Makes the runs without a result, then prints the table.

  Args:
    note: how they are made.
    log: path of a run's log below its folder.

  Returns:
    0; 1 if a run failed.

  Raises:
    ConfigError: another sweep is making runs in the folder.
  """
  with _alone_in(asked.root):
    sweep.write_variants(asked.root, asked.rows)
    if asked.runs:
      say(f'{len(asked.runs)} runs, {note}; logs: {asked.root}/*/seed-*/{log}')
    failed = _follow(make_runs(asked.runs), len(asked.runs))
    print(table(asked.rows, asked.seeds, asked.root))
    for run in failed:
      say(f'failed: {run.name}; see {run.workdir.root / log}')
    return 1 if failed else 0


@contextlib.contextmanager
def _alone_in(workdir: pathlib.Path) -> Iterator[None]:
  """Holds a lock, which the kernel releases when the process dies."""
  workdir.mkdir(parents=True, exist_ok=True)
  with (workdir / LOCK).open('a') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ConfigError(
        f'--workdir={workdir}: another sweep is making runs there; wait for '
        'it, or use another folder'
      ) from None
    yield


def say(line: str) -> None:
  """Prints a line beside the table, which goes to standard output."""
  print(line, file=sys.stderr, flush=True)


def _follow(ended: Iterable[tuple[SweepRun, int]], runs: int) -> list[SweepRun]:
  """Says how each run has ended, and returns those that failed."""
  failed, began_s = [], time.monotonic()
  for number, (run, code) in enumerate(ended, start=1):
    result = None
    if (run.workdir.root / sweep.RESULT).exists():
      result = sweep.read_from(run.workdir.root)
    if code or result is None:
      failed.append(run)
    loss = 'failed' if result is None else f'loss {result.loss:.4f}'
    so_far = clock(time.monotonic() - began_s)
    say(f'{count(number, runs, began_s)}  {run.name}: {loss}, {so_far} so far')
  return failed


def table(rows: Sequence[Variant], seeds: int, workdir: pathlib.Path) -> str:
  """Returns losses, and paired differences with 95 % intervals, as text."""
  results = {
    v.label: {
      seed: result
      for seed in range(seeds)
      if (result := sweep.read(workdir, v.label, seed)) is not None
    }
    for v in rows
  }
  cells = []
  for each in sweep.compare(results, rows):
    against = '-'
    if each.difference is not None:
      against = f'{100 * each.difference:+.2f} ± {100 * each.half_width:.2f} %'
    cells.append(
      (
        each.variant.label,
        len(each.results),
        f'{each.mean:.4f}',
        f'{each.spread:.4f}',
        against,
        _text(each.mean_of('participation'), 3),
        _text(each.mean_of('age_steps')),
        _text(each.mean_of('old_share'), 3),
        _text(each.mean_of('delay_steps')),
        _text(each.mean_of('goodput')),
        _text(each.merged_tokens, factor=1e-6),
        each.code,
      )
    )
  return text_tables.plain(text_tables.table(None, COLUMNS, cells))


def _text(value: float | None, digits: int = 2, factor: float = 1.0) -> str:
  return '-' if value is None else f'{factor * value:.{digits}f}'


# What is asked for, as flags.


def define_flags() -> None:
  """Defines the flags."""
  absl_flags.DEFINE_string(
    SWEEP,
    None,
    'Makes all variants of the file; with KEY=V1,V2,… those of that key.',
  )
  absl_flags.DEFINE_integer(
    SEEDS, 3, 'Runs of each variant, each with its own seed.', lower_bound=1
  )
  absl_flags.DEFINE_string(ONLY, '', 'Variants whose label has this.')


def spelled_out(argv: Sequence[str]) -> list[str]:
  """Returns a command line in which --sweep has a value, as absl wants it."""
  return [f'{w}={OF_FILE}' if w in ('--sweep', '-sweep') else w for w in argv]


def is_asked() -> bool:
  """Returns True for a sweep, False for a single run.

  Raises:
    ConfigError: a flag of sweeps is given for a single run.
  """
  values = absl_flags.FLAGS
  if values.sweep:
    return True
  if vain := [name for name in (SEEDS, ONLY) if values[name].present]:
    raise ConfigError(
      [f'--{name}: is for --sweep, which is not given' for name in vain]
    )
  return False


def variants() -> list[Variant]:
  """Returns the variants that are asked for, in their order.

  Raises:
    ConfigError: there are none, or they make no sense.
  """
  only = absl_flags.FLAGS.only
  with flags.refusing(ValueError):
    found = sweep.variants(_adding())
  rows = [variant for variant in found if only in variant.label]
  if not rows:
    labels = ', '.join(variant.label for variant in found) or 'none'
    raise ConfigError(
      f'--{ONLY}={only}: is in no label of the variants: {labels}'
    )
  return rows


def _adding() -> Callable:
  """Returns the `sweep(add)` that is asked for."""
  asked, path = absl_flags.FLAGS.sweep, flags.config_file()
  if asked != OF_FILE:
    return sweep.of_values(asked, run_config.key_types())
  make = runpy.run_path(path).get('sweep')
  if make is None:
    raise ConfigError(
      f'--config={path}: has no sweep(add); --sweep=KEY=V1,V2 names values '
      'of a key, such as outer.lr=0.3,0.6'
    )
  return make


# Configurations, and finished runs that have another.


def make_configs(base: dict, rows: Sequence[Variant]) -> dict[str, RunConfig]:
  """Returns each variant's configuration, by label.

  Args:
    base: the configuration of --config, as nested plain dicts.

  Raises:
    ConfigError: lists each problem with its variant's label.
  """
  configs, problems = {}, []
  for variant in rows:
    try:
      configs[variant.label] = run_config.build(_changed(base, variant.changes))
    except ConfigError as error:
      problems += [f'sweep: {variant.label!r}: {p}' for p in error.problems]
  if problems:
    raise ConfigError(problems)
  return configs


def check(
  configs: Mapping[str, RunConfig],
  rows: Sequence[Variant],
  seeds: int,
  workdir: pathlib.Path,
  of_processes: bool = False,
) -> None:
  """Rejects finished runs with another configuration, or of another kind.

  A run from before a key existed passes if its variant leaves that key alone.

  Args:
    of_processes: whether the sweep's runs are real ones, not the lab's.

  Raises:
    ConfigError: names the folders and what differs.
  """
  problems = [
    f'{run}: was made otherwise ({differs}): remove it, or use another '
    '--workdir'
    for variant in rows
    for seed in range(seeds)
    for run in [sweep.folder(workdir, variant.label, seed)]
    if sweep.read(workdir, variant.label, seed) is not None
    or is_over(Workdir(run))
    if (
      differs := _other_kind(run, of_processes)
      or _difference(configs[variant.label], variant.changes, run)
    )
  ]
  if problems:
    raise ConfigError(problems)


def is_over(workdir: Workdir) -> bool:
  """Returns True for a run of processes that has come to its end."""
  return workdir.summary.exists() and workdir.evaluation.exists()


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


def _other_kind(run: pathlib.Path, of_processes: bool) -> str:
  """Returns which kind of run a folder holds, '' if it is the one asked for."""
  if Workdir(run).pids.exists() == of_processes:
    return ''
  return 'in the lab' if of_processes else 'by processes'


def _difference(
  config: RunConfig, changes: Mapping[str, object], run: pathlib.Path
) -> str:
  """Returns how a run's stored configuration differs, '' if it does not."""
  path = Workdir(run).config
  here = sections.flatten(_as_json(config))
  try:
    there = sections.flatten(json.loads(path.read_text()))
    there = run_config.with_current_blend(there, sections.BLEND)
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
