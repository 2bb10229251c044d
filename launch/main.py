# SPDX-License-Identifier: Apache-2.0
"""Starts a run here, on TPU VMs, on GKE or under Slurm.

  python -m launch.main --config=experiments/NAME.py --workdir=DIR \\
    --to={local,queued_resources,gke,slurm} [--dry_run] …
  python -m launch.main add-learner --learner=3 …the same flags…
  python -m launch.main remove-learner --learner=3 …the same flags…
  python -m launch.main watch --to=queued_resources …the same flags…

launch/README.md has the steps. Exit code 0: it was done; 1: a command failed,
which is named; 78: it can't be done as configured; 130: Ctrl-C.
"""

import functools
import pathlib
import sys
from collections.abc import Callable

from absl import flags as absl_flags

from diloco.config import flags
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import Workdir
from launch import launch_flags, local, syncer_sizes
from launch.backends import (
  commands,
  dry_run,
  newcomers,
  registry,
)
from launch.job import JobSpec

START = 'start'
ADD = 'add-learner'
REMOVE = 'remove-learner'
WATCH = 'watch'
COMMANDS = (START, ADD, REMOVE, WATCH)

Backend = registry.Gke | registry.Slurm | registry.QueuedResources


# Carries out one command of launch.main on the back end that was asked for.


def perform(command: str, config: RunConfig, say: Callable[[str], None]) -> int:
  """The exit code of launch.main.

  Raises:
    ConfigError: the launch can not be.
    CommandFailed: a program of the back end is missing, or failed.
  """
  given = absl_flags.FLAGS
  whole = launch_flags.read_launch(config)
  kind, place = registry.BACKENDS[given.to], whole.syncer.resources
  registry.check_evaluator(whole, kind.shares_workdir(given))
  for line in (
    *left_out(config),
    *syncer_sizes.notes(config, place.memory_gib, place.disk_gib),
    *kind.notes(given),
  ):
    print(f'note: {line}', file=sys.stderr)
  if given.dry_run and registry.BACKENDS[given.to].stays:
    return _show_steps(command, whole, say)
  backend = _backend(say)
  match command:
    case 'start':
      return backend.start(whole)
    case 'add-learner':
      return backend.add(whole, given.learner)
    case 'remove-learner':
      return backend.remove(whole, given.learner)
    case 'watch':
      return backend.watch(whole)
    case _:
      raise ValueError(f'no command: {command!r}')


def left_out(config: RunConfig) -> list[str]:
  """Returns lines on settings that only a local run supports."""
  lines = []
  if config.faults:
    lines.append('config.faults is for --to=local; no process is killed here')
  return lines


def _backend(say: Callable[[str], None]) -> Backend:
  given = absl_flags.FLAGS
  act = dry_run.shown(say) if given.dry_run else _loudly(say)
  return registry.BACKENDS[given.to].make(given, act, say)


def _loudly(say: Callable[[str], None]) -> registry.Act:
  """Runs a command and passes on what it says."""

  def act(argv, text):
    output = commands.run(argv, text)
    if output:
      say(output.rstrip('\n'))
    return output

  return act


def _show_steps(
  command: str, whole: JobSpec, say: Callable[[str], None]
) -> int:
  """Prints the steps on TPU VMs, each of which needs the previous one's
  result.
  """
  given = absl_flags.FLAGS
  cloud, learner = registry.cloud_of(given), given.learner
  if command == ADD:
    dry_run.queued_learner(whole, learner, cloud, say)
  elif command == REMOVE:
    dry_run.queued_removal(whole, learner, cloud, say)
  else:
    dry_run.queued_resources(whole, cloud, say, with_roles=command == START)
  return 0


def main(argv) -> int:
  config, given = flags.load(), absl_flags.FLAGS
  command = argv[1] if len(argv) > 1 else START
  say = functools.partial(print, flush=True)
  try:
    if command not in COMMANDS or len(argv) > 2:
      known = ', '.join(COMMANDS)
      raise ConfigError([f'{" ".join(argv[1:])}: must be one of {known}'])
    if (given.learner is not None) != (command in (ADD, REMOVE)):
      raise ConfigError(['--learner: is for add-learner and remove-learner'])
    staying = [n for n, kind in registry.BACKENDS.items() if kind.stays]
    if command == WATCH and given.to not in staying:
      raise ConfigError([f'watch: is for --to={" or --to=".join(staying)}'])
    if given.to != launch_flags.LOCAL:
      return perform(command, config, say)
    if problems := [*launch_flags.wrong_for_backend()]:
      raise ConfigError(problems)
    if command != START:
      if given.dry_run:
        raise ConfigError([f'--dry_run: is not for {command} --to=local'])
      is_new = given.learner >= config.protocol.learners
      if command == ADD and is_new and local.accelerators(config):
        raise ConfigError(
          [
            f'--learner={given.learner}: accelerators are dealt to learners of '
            'the configuration; start it by hand: docs/one_machine.md'
          ]
        )
      request = newcomers.Request(given.learner, joins=command == ADD)
      workdir = Workdir(pathlib.Path(given.workdir))
      return newcomers.ask(config, workdir, request, say)
    if given.dry_run:
      local.show_processes(config, say)
      return 0
  except commands.CommandFailed as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print('stopped by SIGINT; what was started goes on', file=sys.stderr)
    return 130
  return local.main(argv[:1])


if __name__ == '__main__':
  local.define_flags()
  launch_flags.define_flags()
  flags.run(main)
