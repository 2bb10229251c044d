# SPDX-License-Identifier: Apache-2.0
"""The runs of a sweep as `launch.local` makes each: python -m launch.local …

`launch.local --sweep` calls `main`.
"""

import dataclasses
from collections.abc import Callable

import rich.console
from absl import flags as absl_flags

from diloco.config import lab_section
from diloco.config.sections import ConfigError
from diloco.sweeps import variant_configs
from launch import local, preflight, session
from launch import program as launch_program
from launch.role_processes import free_address
from launch.sweeps import real_sweep
from launch.sweeps.real_sweep import SweepRun

LOG_WIDTH = 120  # Of the tables in a log.
# Flags that a sweep does not take, and what is done instead.
ONE_RUN = {
  'overwrite': (
    'is for a single run; remove the folder of a run to make it again'
  ),
  'page': 'is for a single run; python -m diloco.watch FOLDER serves its page',
  'page_port': 'is for a single run, as --page is',
}


def main(argv) -> int:
  """Makes the sweep that the parsed flags ask for; returns the exit code.

  Raises:
    ConfigError: it can't be made; names all that is wrong.
  """
  local.check_arguments(argv)
  given = absl_flags.FLAGS
  if vain := [name for name in ONE_RUN if given[name].present]:
    raise ConfigError([f'--{name}: {ONE_RUN[name]}' for name in vain])
  asked = real_sweep.plan()
  problems: dict[str, None] = {}  # Each once, whatever the seeds.
  for run in asked.runs:
    try:
      _check(run)
    except ConfigError as error:
      label = run.variant.label
      problems |= {f'sweep: {label!r}: {p}': None for p in error.problems}
  if problems:
    raise ConfigError([*problems])
  return real_sweep.make(asked, make_run)


def _check(run: SweepRun) -> None:
  """Looks at what can be known of a run before an earlier one is made.

  Raises:
    ConfigError: it can't be made, or not in its folder.
  """
  config, transport = run.config, run.config.transport
  preflight.check(config)
  lab_section.plan(config.faults, config.protocol.learners)
  address = free_address(transport.host, transport.port)
  local.read_program(config, run.workdir, address, run.arguments)
  # One that is over was compared with its configuration before.
  if run.workdir.root.exists() and not variant_configs.is_over(run.workdir):
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
  if variant_configs.is_over(run.workdir):
    return 0
  planned = lab_section.plan(config.faults, config.protocol.learners)
  address = free_address(config.transport.host, config.transport.port)
  parts = dataclasses.replace(
    local.read_program(config, run.workdir, address, run.arguments),
    environment=launch_program.environment(config, run.compiled),
  )
  workdir, lock, goes_on = local.occupy(run.workdir.root, False, config)
  log = workdir.root / real_sweep.LOG
  log.parent.mkdir(exist_ok=True)
  with lock, log.open('a') as file:
    console = rich.console.Console(file=file, width=LOG_WIDTH)
    planned, trains = local.begin(
      config, parts, workdir, address, goes_on, planned, console
    )
    return session.run(config, parts, workdir, planned, console, trains, tell)
