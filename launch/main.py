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
import sys

from absl import flags as absl_flags

from diloco import flags
from diloco.config_values import ConfigError
from launch import commands, launch_flags, local
from launch.launching import ADD, COMMANDS, REMOVE, START, WATCH, perform


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
    if command == WATCH and given.to != launch_flags.QUEUED_RESOURCES:
      raise ConfigError(['watch: is for --to=queued_resources'])
    if given.to != launch_flags.LOCAL:
      return perform(command, config, say)
    if command != START:
      raise ConfigError([f'{command}: is not for --to=local'])
    if problems := [*launch_flags.wrong_for_engine()]:
      raise ConfigError(problems)
    if given.dry_run:
      local.rehearse(config, say)
      return 0
  except ConfigError as error:
    flags.exit_config(error)
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
