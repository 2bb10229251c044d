# SPDX-License-Identifier: Apache-2.0
"""Trains on one machine: starts a syncer and M learners, keeps them alive.

A run that was stopped goes on where the same command is given again.

  python -m launch.local --config=experiments/NAME.py --workdir=DIR \\
    [--config.a.b=c ...] [--overwrite] [--tls_ca=… --token_file=… …] \\
    [--hosts=2,1 --cpu_devices] [--log_json]

Exit code 0: the run finished and was evaluated; 78: it can't run as
configured; 1: it failed; 130, 143: Ctrl-C, SIGTERM.
"""

import os
import pathlib
from collections.abc import Callable

import rich.console
from absl import flags as absl_flags

from diloco import config_faults, flags
from diloco.config import RunConfig
from diloco.config_data import missing_paths
from diloco.config_values import ConfigError
from diloco.metrics.workdir import Workdir
from launch import faults, hosts, rehearsal, session
from launch.address import free_address
from launch.folder import occupy
from launch.program import Program, program


def define_flags() -> None:
  """The flags of this main."""
  flags.define_flags()
  flags.define_access_flags()
  flags.define_log_flags()
  absl_flags.DEFINE_string(
    'workdir', None, 'Folder of the run: logs, metrics, parameters.'
  )
  absl_flags.DEFINE_bool(
    'overwrite', False, 'Remove the run that the workdir holds.'
  )
  absl_flags.DEFINE_string(
    'hosts', '1', 'Of every learner; here also of each, such as 2,1.'
  )
  absl_flags.DEFINE_bool(
    'cpu_devices',
    False,
    'The devices of config.mesh are made out of CPU cores.',
  )


def read_program(config: RunConfig, workdir: Workdir, address: str) -> Program:
  """The processes that the parsed flags ask for.

  Raises:
    ConfigError: they can not be.
  """
  given = absl_flags.FLAGS
  return program(
    config,
    flags.arguments(),
    workdir,
    address,
    flags.access_arguments(),
    flags.log_arguments(),
    hosts.on_this_machine(
      config,
      given.hosts,
      given.cpu_devices,
      os.environ.get(hosts.XLA_FLAGS, ''),
    ),
  )


def rehearse(config: RunConfig, say: Callable[[str], None]) -> None:
  """Shows the processes of a run; nothing is started.

  Raises:
    ConfigError: they can not be.
  """
  workdir = Workdir(pathlib.Path(absl_flags.FLAGS.workdir))
  address = f'{config.transport.host}:{config.transport.port}'
  rehearsal.local(read_program(config, workdir, address), say)


def main(argv) -> int:
  config = flags.load()
  given = absl_flags.FLAGS
  try:
    if len(argv) > 1:
      raise ConfigError([f'{argv[1]}: unexpected argument'])
    if not given.workdir:
      raise ConfigError(['--workdir: is missing, such as runs/first'])
    if missing := list(missing_paths(config.data)):
      raise ConfigError(missing)  # Before a process starts for it.
    planned = config_faults.plan(config.faults, config.protocol.learners)
    address = free_address(config.transport.host, config.transport.port)
    root = pathlib.Path(given.workdir)
    parts = read_program(config, Workdir(root), address)
    workdir, lock, goes_on = occupy(root, given.overwrite, config)
  except ConfigError as error:
    flags.exit_config(error)
  console = rich.console.Console()
  if goes_on:
    console.print(
      f'goes on with the run in {workdir.root}', markup=False, highlight=False
    )
    planned = faults.still_due(planned, config, workdir)
  with lock:
    return session.run(config, parts, workdir, planned, console)


if __name__ == '__main__':
  define_flags()
  flags.run(main)
