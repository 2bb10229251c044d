# SPDX-License-Identifier: Apache-2.0
"""Trains on one machine: starts a syncer and M learners, keeps them alive.

A run that was stopped goes on where the same command is given again.

  python -m launch.local --config=experiments/NAME.py --workdir=DIR \\
    [--config.a.b=c ...] [--overwrite] [--tls_ca=… --token_file=… …]

Exit code 0: the run finished and was evaluated; 78: it can't run as
configured; 1: it failed; 130, 143: Ctrl-C, SIGTERM.
"""

import pathlib

import rich.console
from absl import flags as absl_flags

from diloco import config_faults, flags
from diloco.config_values import ConfigError
from launch import faults, session
from launch.address import free_address
from launch.folder import occupy
from launch.program import program


def define_flags() -> None:
  """The flags of this main."""
  flags.define_flags()
  flags.define_access_flags()
  absl_flags.DEFINE_string(
    'workdir', None, 'Folder of the run: logs, metrics, parameters.'
  )
  absl_flags.DEFINE_bool(
    'overwrite', False, 'Remove the run that the workdir holds.'
  )


def main(argv) -> int:
  config = flags.load()
  given = absl_flags.FLAGS
  try:
    if len(argv) > 1:
      raise ConfigError([f'{argv[1]}: unexpected argument'])
    if not given.workdir:
      raise ConfigError(['--workdir: is missing, such as runs/first'])
    planned = config_faults.plan(config.faults, config.protocol.learners)
    address = free_address(config.transport.host, config.transport.port)
    root = pathlib.Path(given.workdir)
    workdir, lock, goes_on = occupy(root, given.overwrite, config)
  except ConfigError as error:
    flags.exit_config(error)
  parts = program(
    config, flags.arguments(), workdir, address, flags.access_arguments()
  )
  console = rich.console.Console()
  if goes_on:
    console.print(f'goes on with the run in {workdir.root}', highlight=False)
    planned = faults.still_due(planned, config, workdir)
  with lock:
    return session.run(config, parts, workdir, planned, console)


if __name__ == '__main__':
  define_flags()
  flags.run(main)
