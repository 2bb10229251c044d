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
from diloco.metrics import files
from diloco.metrics.figures import clock
from diloco.metrics.run_progress import count
from diloco.metrics.workdir import Workdir
from diloco.pages import text_tables
from diloco.sweeps import records, sweep
from diloco.sweeps.records import Records
from diloco.sweeps.sweep import Variant

LOCK = 'sweep.lock'
COLUMNS = (
  'variant', 'seeds', 'loss', '±', 'against', 'difference', 'participation',
  'age, steps', 'older than 1.5', 'delay, steps', 'goodput', 'M tokens merged',
  'code',
)  # fmt: skip

COLUMNS_OF_AVERAGE = 'average', 'difference'  # After the loss of the end.
FINAL, AVERAGE = LOSSES = 'loss', 'average_loss'  # See `sweep.Measure`.
SEEDS_MIN, SEEDS_MAX = 6, 16  # Of a sweep that adds some.

LAB = 'lab.'  # Keys that mean something in the lab only.
SWEEP, SEEDS, ONLY = 'sweep', 'seeds', 'only'
UNTIL_WIDTH, HALF, RECORDS = 'until_width', 'half', 'records'
# What a file of experiments may say of its sweep, besides `sweep(add)`: from
# which seed on it counts, and on which half of the held-out text.
OF_SWEEP = {'FIRST_SEED': 0, 'HALF': ''}
HALVES = {'': None, 'first': 0, 'second': 1}
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
  """A sweep whose configurations have been checked.

  Attributes:
    configs: configurations by label.
    seeds: ascending.
    width: half of the interval of each difference, relative, until which seeds
      are added; None: none are.
    half: of the held-out text on which the runs are compared; None: all of it.
    kept: where results are found and added.
  """

  root: pathlib.Path
  rows: tuple[Variant, ...]
  configs: Mapping[str, RunConfig]
  seeds: tuple[int, ...]
  width: float | None = None
  half: int | None = None
  kept: Records = dataclasses.field(default_factory=lambda: Records(None))

  @property
  def runs(self) -> tuple[SweepRun, ...]:
    """Those without a result, seed by seed."""
    return tuple(run for run, result in self._all() if result is None)

  def _all(self) -> Iterator[tuple[SweepRun, sweep.SeedResult | None]]:
    """Yields each run with the result in its folder, if any."""
    for seed in self.seeds:
      for variant in self.rows:
        run = SweepRun(
          variant,
          seed,
          dataclasses.replace(self.configs[variant.label], seed=seed),
          Workdir(sweep.folder(self.root, variant.label, seed)),
          Workdir(self.root).compiled,
        )
        yield run, sweep.read(self.root, variant.label, seed)

  def with_another_seed(self) -> 'Sweep':
    """Returns the sweep with the seed after its last one."""
    return dataclasses.replace(self, seeds=(*self.seeds, self.seeds[-1] + 1))

  def recall(self) -> int:
    """Puts the results of earlier runs into their folders; returns how many.

    Keeps those that are in their folders only, as of a sweep that was cut off.
    """
    count = 0
    for run, result in self._all():
      here, changes = records.flat(run.config), run.variant.changes
      kept = self.kept.find(here, run.seed, changes)
      if result is None and kept is not None:
        run.workdir.root.mkdir(parents=True, exist_ok=True)
        files.write_json(run.workdir.config, run.config)
        sweep.write_into(run.workdir.root, kept)
        count += 1
      elif result is not None and kept is None:
        self.kept.add(run.variant.label, run.seed, here, result)
    return count

  def compared(self, name: str) -> list[sweep.Comparison]:
    """Compares the losses of that name; see `sweep.Measure`."""
    results = {
      v.label: {
        seed: result
        for seed in self.seeds
        if (result := sweep.read(self.root, v.label, seed)) is not None
      }
      for v in self.rows
    }
    return sweep.compare(results, self.rows, sweep.Measure(name, self.half))


# Makes runs; yields each with its exit code once it has ended.
MakeRuns = Callable[[Sequence[SweepRun]], Iterable[tuple[SweepRun, int]]]


def plan(of_processes: bool) -> Sweep:
  """Returns the sweep that the parsed flags ask for.

  Args:
    of_processes: whether its runs are real ones, not the lab's.

  Raises:
    ConfigError: it can't be made; names each variant or folder.
  """
  values = absl_flags.FLAGS
  root, seeds = pathlib.Path(values.workdir), asked_seeds()
  if of_processes and Workdir(root).config.exists():
    raise ConfigError(
      f'--workdir={root}: holds a run, a sweep needs a folder of its own'
    )
  rows = variants()
  if of_processes and (problems := [*_of_the_lab(rows)]):
    raise ConfigError(problems)
  configs = flags.load(build=lambda base: make_configs(base.to_dict(), rows))
  with flags.refusing(sweep.BadResult):
    # Of all seeds that may be added, too.
    most = SEEDS_MAX if values.until_width is not None else len(seeds)
    checked = range(seeds[0], seeds[0] + max(most, len(seeds)))
    check(configs, rows, checked, root, of_processes)
    kept = Records(None if of_processes else _records_path())
  return Sweep(
    root, tuple(rows), configs, seeds, values.until_width, _asked_half(), kept
  )


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
  failed: list[SweepRun] = []
  with _alone_in(asked.root):
    sweep.write_variants(asked.root, asked.rows)
    while not failed:
      if recalled := asked.recall():
        say(f'{recalled} runs were made before: {asked.kept.path.parent}')
      if runs := asked.runs:
        say(f'{len(runs)} runs, {note}; logs: {asked.root}/*/seed-*/{log}')
      failed = _follow(make_runs(runs), len(runs), asked.kept)
      if asked.width is None or not (wide := too_wide(asked)):
        break
      if len(asked.seeds) >= SEEDS_MAX:
        break
      say(f'{", ".join(wide)}: one more seed')
      asked = asked.with_another_seed()
  print(table(asked))
  if asked.width is not None:
    print(_verdict(asked))
  for run in failed:
    say(f'failed: {run.name}; see {run.workdir.root / log}')
  return 1 if failed else 0


def too_wide(asked: Sweep) -> list[str]:
  """Returns the differences whose interval is not yet as narrow as asked."""
  return [
    f'{each.variant.label} ± {100 * each.half_width:.2f} %'
    for name in LOSSES
    for each in asked.compared(name)
    if each.difference is not None and not each.half_width <= asked.width
  ]


def _verdict(asked: Sweep) -> str:
  """Returns a sentence on whether the intervals are as narrow as asked."""
  limit = f'± {100 * asked.width:g} %'
  seeds = f'{len(asked.seeds)} seeds from {asked.seeds[0]} on'
  if wide := too_wide(asked):
    return f'not within {limit} with {seeds}: {", ".join(wide)}'
  return f'all within {limit}, with {seeds}'


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


def _follow(
  ended: Iterable[tuple[SweepRun, int]], runs: int, kept: Records
) -> list[SweepRun]:
  """Says how each run has ended and keeps results; returns what failed."""
  failed, began_s = [], time.monotonic()
  for number, (run, code) in enumerate(ended, start=1):
    result = None
    if (run.workdir.root / sweep.RESULT).exists():
      result = sweep.read_from(run.workdir.root)
    if code or result is None:
      failed.append(run)
    else:
      config = records.flat(run.config)
      kept.add(run.variant.label, run.seed, config, result)
    loss = 'failed' if result is None else f'loss {result.loss:.4f}'
    so_far = clock(time.monotonic() - began_s)
    say(f'{count(number, runs, began_s)}  {run.name}: {loss}, {so_far} so far')
  return failed


def table(asked: Sweep) -> str:
  """Returns losses, and paired differences with 95 % intervals, as text."""
  columns, cells = columns_and_cells(*map(asked.compared, LOSSES))
  return text_tables.plain(text_tables.table(None, columns, cells))


def columns_and_cells(
  finals: Sequence[sweep.Comparison], averages: Sequence[sweep.Comparison]
) -> tuple[list[str], list[list[str]]]:
  """Returns the titles of a table's columns, and its rows.

  Args:
    finals: of the losses at the end of the runs, a row each.
    averages: of the average over their last steps, if they have it.
  """
  by_label = {x.variant.label: x for x in averages}
  cells = []
  for each in finals:
    cell = [
      each.variant.label,
      str(len(each.results)),
      f'{each.mean:.4f}',
      _text(each.spread if len(each.results) > 1 else None, 4),
      each.variant.against or '-',
      _difference_of(each),
    ]
    if averages:
      average = by_label.get(each.variant.label)
      cell += (
        [f'{average.mean:.4f}', _difference_of(average)] if average else '--'
      )
    cell += [
      _text(each.mean_of('participation'), 3),
      _text(each.mean_of('age_steps')),
      _text(each.mean_of('old_share'), 3),
      _text(each.mean_of('delay_steps')),
      _text(each.mean_of('goodput')),
      _text(each.merged_tokens, factor=1e-6),
      each.code,
    ]
    cells.append(cell)
  of_average = COLUMNS_OF_AVERAGE if averages else ()
  return [*COLUMNS[:6], *of_average, *COLUMNS[6:]], cells


def kept_results(
  kept: Records, base: dict, rows: Sequence[Variant], first: int = 0
) -> dict[str, dict[int, sweep.SeedResult]]:
  """Returns the results of the variants as they are now, by label and seed.

  Args:
    base: see `make_configs`.
    first: seed from which on they count.
  """
  configs = make_configs(base, rows)
  return {
    variant.label: {
      seed: result
      for seed in kept.seeds
      if seed >= first
      and (result := kept.find(here, seed, variant.changes)) is not None
    }
    for variant in rows
    for here in [records.flat(configs[variant.label])]
  }


def _difference_of(each: sweep.Comparison) -> str:
  if each.difference is None:
    return '-'
  width = f' ± {100 * each.half_width:.2f}' if len(each.pairs) > 1 else ''
  return f'{100 * each.difference:+.2f}{width} %'


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
  absl_flags.DEFINE_string(
    SEEDS,
    '3',
    "Runs of each variant, each with its own seed, from the file's FIRST_SEED "
    'or 0 on; or FIRST:LAST, without the last.',
  )
  absl_flags.DEFINE_string(ONLY, '', 'Variants whose label has this.')
  absl_flags.DEFINE_float(
    UNTIL_WIDTH,
    None,
    f'Adds seeds, from {SEEDS_MIN} to {SEEDS_MAX}, until half of the interval '
    'of each difference is at most this, such as 0.003 for 0.3 %.',
    lower_bound=0.0,
  )
  absl_flags.DEFINE_enum(
    HALF,
    None,
    [x for x in HALVES if x],
    "Half of the held-out text that is compared; the file's HALF, or all.",
  )
  absl_flags.DEFINE_bool(
    RECORDS,
    True,
    'Takes the runs in records/ beside the file, and adds those that it makes.',
  )


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
  ours = SEEDS, ONLY, UNTIL_WIDTH, HALF, RECORDS
  if vain := [name for name in ours if values[name].present]:
    raise ConfigError(
      [f'--{name}: is for --sweep, which is not given' for name in vain]
    )
  return False


def asked_seeds() -> tuple[int, ...]:
  """Returns the seeds to begin with, ascending.

  Raises:
    ConfigError: there is none, or it is no number.
  """
  values = absl_flags.FLAGS
  given, first = values.seeds, _of_file('FIRST_SEED')
  if values.until_width is not None and not values[SEEDS].present:
    given = str(SEEDS_MIN)
  begin, colon, end = given.rpartition(':')
  try:
    seeds = (
      range(int(begin), int(end)) if colon else range(first, first + int(end))
    )
  except ValueError:
    seeds = ()
  if not seeds or seeds[0] < 0:
    raise ConfigError(
      f'--{SEEDS}={given}: must be a number of seeds, or FIRST:LAST without '
      'the last, such as 10:16'
    )
  return tuple(seeds)


def _asked_half() -> int | None:
  return HALVES[absl_flags.FLAGS.half or _of_file('HALF')]


def _of_file(name: str):
  """Returns what the file says of its sweep, or the value of one that doesn't.

  A sweep of values of a key says nothing of itself.
  """
  if absl_flags.FLAGS.sweep != OF_FILE:
    return OF_SWEEP[name]
  return runpy.run_path(flags.config_file()).get(name, OF_SWEEP[name])


def _records_path() -> pathlib.Path | None:
  """Returns where results are kept; None: this sweep's are not."""
  values = absl_flags.FLAGS
  plain = flags.arguments() == [f'--{flags.CONFIG}={flags.config_file()}']
  if not (values.records and plain and values.sweep == OF_FILE):
    return None
  return records.path_of(flags.config_file())


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
  seeds: Sequence[int],
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
    for seed in seeds
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
  try:
    there = sections.flatten(json.loads(path.read_text()))
    differing = records.differing(records.flat(config), there, changes)
  except (OSError, ValueError, AttributeError) as error:
    return f'{path.name}: {error}'
  return '; '.join(
    f'{key}={theirs} there, {ours} here'
    for key, (theirs, ours) in differing.items()
  )
