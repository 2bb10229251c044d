# SPDX-License-Identifier: Apache-2.0
"""Makes the runs of a sweep as processes, one run after the other.

A run takes the whole machine: beside another one its steps, stalls and ages
would be others. Each lies in a folder as of `python -m launch.local`, and goes
on there after an interruption.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence

from absl import flags as absl_flags

from diloco.config import flags
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics.run_progress import ProgressLine
from diloco.metrics.workdir import Workdir
from diloco.sweeps import (
  making,
  recorded_result,
  sweep,
  sweep_flags,
  variant_configs,
)
from diloco.sweeps.sweep import BadResult, Variant
from launch import session

LAB = 'lab.'  # Keys that mean something in the lab only.
LOG = 'logs/launcher.log'  # In the folder of a run.


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
    return variant_configs.arguments(self.variant, self.seed)


# Makes a run, or goes on with it; returns the exit code of the launcher. Takes
# what is told a line on the progress now and then.
MakeRun = Callable[[SweepRun, Callable[[str], None]], int]


@dataclasses.dataclass(frozen=True)
class RealSweep:
  """The sweep that the parsed flags ask for."""

  root: pathlib.Path
  rows: tuple[Variant, ...]
  seeds: int
  runs: tuple[SweepRun, ...]  # Those without a result.


def plan() -> RealSweep:
  """Returns the sweep that the parsed flags ask for.

  Raises:
    ConfigError: it can't be made; names each variant or folder.
  """
  root, seeds = pathlib.Path(absl_flags.FLAGS.workdir), absl_flags.FLAGS.seeds
  if Workdir(root).config.exists():
    raise ConfigError(
      [f'--workdir={root}: holds a run, a sweep needs a folder of its own']
    )
  rows = sweep_flags.variants()
  if problems := [*_of_the_lab(rows)]:
    raise ConfigError(problems)
  made = flags.load(
    build=lambda base: variant_configs.make_configs(base.to_dict(), rows)
  )
  with flags.refusing(BadResult):
    variant_configs.check(made, rows, seeds, root, of_processes=True)
  compiled = Workdir(root).compiled
  runs = [
    SweepRun(
      variant,
      seed,
      dataclasses.replace(made[variant.label], seed=seed),
      Workdir(sweep.folder(root, variant.label, seed)),
      compiled,
    )
    for variant, seed in making.missing(rows, seeds, root)
  ]
  return RealSweep(root, tuple(rows), seeds, tuple(runs))


def _of_the_lab(rows: Sequence[Variant]) -> Iterator[str]:
  """Yields variants that would be equal runs: processes ignore their keys."""
  for variant in rows:
    if vain := [key for key in variant.changes if key.startswith(LAB)]:
      yield (
        f'sweep: {variant.label!r}: {", ".join(vain)}: only of the lab, make '
        'it by python -m diloco.lab --sweep, or leave it out by --only=TEXT'
      )


def make(asked: RealSweep, make_run: MakeRun) -> int:
  """Makes the runs without a result, then prints the table.

  Returns:
    0; 1 if a run failed; 128 + n if signal n stopped it.

  Raises:
    ConfigError: another sweep is making runs in the folder.
  """
  with making.alone_in(asked.root):
    sweep.write_variants(asked.root, asked.rows)
    if asked.runs:
      making.say(
        f'{len(asked.runs)} runs, one at a time, for each takes the whole '
        f'machine; logs: {asked.root}/*/seed-*/logs'
      )
    try:
      with session.signals() as received:
        ended = _ended(asked.runs, make_run, received)
        failed = making.follow(ended, len(asked.runs), asked.root)
    except session.Interrupted as stopped:
      making.say(
        f'{stopped}; no process is left; the same command goes on with the '
        'sweep'
      )
      return 128 + stopped.number
    return making.finish(asked.rows, asked.seeds, asked.root, failed, LOG)


def _ended(
  runs: Sequence[SweepRun], make_run: MakeRun, received: Sequence[int]
) -> Iterator[tuple[making.SeedRun, int]]:
  """Makes the runs; yields each with its exit code, once it has ended.

  Args:
    received: signals, as they come between two runs.

  Raises:
    Interrupted: a signal has stopped the sweep.
  """
  for run in runs:
    if received:
      raise session.Interrupted(received[0])
    with ProgressLine() as line:
      code = make_run(run, _prefixed(run, line))
    if code > 128:
      raise session.Interrupted(code - 128)
    if code == 0:
      _keep_result(run)
    yield (run.variant, run.seed), code


def _keep_result(run: SweepRun) -> None:
  """Writes the result beside the run's records, unless they are broken."""
  try:
    found = recorded_result.read(run.workdir, run.config)
  except BadResult as error:
    making.say(f'{run.name}: {error}')
  else:
    sweep.write_into(run.workdir.root, found)


def _prefixed(run: SweepRun, line: ProgressLine) -> Callable[[str], None]:
  return lambda text: line.say(f'{run.name}: {text}')
