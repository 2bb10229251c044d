# SPDX-License-Identifier: Apache-2.0
"""Makes the runs of a sweep as processes: python -m launch.local --sweep …

One run after the other: each takes the whole machine, and beside another one
its steps, stalls and ages would be others. Each lies in a folder as of
`python -m launch.local`, and goes on there after an interruption.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import rich.console
from absl import flags as absl_flags

from diloco.config.sections import ConfigError
from diloco.metrics.run_progress import ProgressLine
from diloco.sweeps import making, recorded_result, sweep
from diloco.sweeps.making import Sweep, SweepRun
from diloco.sweeps.sweep import BadResult
from launch import local, preflight
from launch import program as launch_program
from launch.preflight import free_address

LOG = 'logs/launcher.log'  # In the folder of a run.
LOG_WIDTH = 120  # Of the tables in a log.


def main(argv) -> int:
  """Makes the sweep that the parsed flags ask for; returns the exit code.

  Raises:
    ConfigError: it can't be made; names all that is wrong.
  """
  local.check_arguments(argv)
  if absl_flags.FLAGS['overwrite'].present:
    raise ConfigError(
      [
        '--overwrite: is for a single run; remove the folder of a run to make '
        'it again'
      ]
    )
  asked = making.plan(of_processes=True)
  problems: dict[str, None] = {}  # Each once, whatever the seeds.
  for run in asked.runs:
    try:
      _check(run)
    except ConfigError as error:
      label = run.variant.label
      problems |= {f'sweep: {label!r}: {p}': None for p in error.problems}
  if problems:
    raise ConfigError([*problems])
  return make(asked, make_run)


def make(
  asked: Sweep, make_run: Callable[[SweepRun, Callable[[str], None]], int]
) -> int:
  """Makes the runs without a result, then prints the table.

  Args:
    make_run: makes a run, or goes on with it, and returns the exit code of the
      launcher; takes what is told a line on the progress now and then.

  Returns:
    0; 1 if a run failed; 128 + n if signal n stopped it.

  Raises:
    ConfigError: another sweep is making runs in the folder.
  """

  def one_by_one(runs: Sequence[SweepRun]) -> Iterator[tuple[SweepRun, int]]:
    for run in runs:
      if received:  # Between two runs.
        raise local.Interrupted(received[0])
      with ProgressLine() as line:
        begin = f'{run.name}: '
        code = make_run(run, lambda text, b=begin, x=line: x.say(b + text))
      if code > 128:
        raise local.Interrupted(code - 128)
      if code == 0:
        _keep_result(run)
      yield run, code

  try:
    with local.signals() as received:
      note = 'one at a time, for each takes the whole machine'
      return making.make(asked, one_by_one, note, LOG)
  except local.Interrupted as stopped:
    making.say(
      f'{stopped}; no process is left; the same command goes on with the sweep'
    )
    return 128 + stopped.number


def _keep_result(run: SweepRun) -> None:
  """Writes the result beside the run's records, unless they are broken."""
  try:
    result = recorded_result.read(run.workdir, run.config)
  except BadResult as error:
    making.say(f'{run.name}: {error}')
  else:
    sweep.write_into(run.workdir.root, result)


def _check(run: SweepRun) -> None:
  """Looks at what can be known of a run before an earlier one is made.

  Raises:
    ConfigError: it can't be made, or not in its folder.
  """
  config, transport = run.config, run.config.transport
  preflight.check_keeps_own(config)
  preflight.check(config)
  address = free_address(transport.host, transport.port)
  local.read_program(config, run.workdir, address, run.arguments)
  # One that is over was compared with its configuration before.
  if run.workdir.root.exists() and not making.is_over(run.workdir):
    _, lock, _ = local.occupy(run.workdir.root, False, config)
    lock.close()


def make_run(run: SweepRun, tell: Callable[[str], None]) -> int:
  """Makes one run, or goes on with it; returns the exit code of a launcher.

  What `launch.local` would print goes into the run's log. One that is over has
  only no result yet.

  Args:
    tell: takes a line on the progress now and then.

  Raises:
    ConfigError: it can't be made.
  """
  config = run.config
  if making.is_over(run.workdir):
    return 0
  address = free_address(config.transport.host, config.transport.port)
  parts = dataclasses.replace(
    local.read_program(config, run.workdir, address, run.arguments),
    environment=launch_program.environment(config, run.compiled),
  )
  workdir, lock, goes_on = local.occupy(run.workdir.root, False, config)
  log = workdir.root / LOG
  log.parent.mkdir(exist_ok=True)
  with lock, log.open('a') as file:
    console = rich.console.Console(file=file, width=LOG_WIDTH)
    return local.make(config, parts, workdir, address, goes_on, console, tell)
