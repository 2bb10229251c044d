# SPDX-License-Identifier: Apache-2.0
"""The command line of a chaos test that has a configuration of its own."""

import sys
from collections.abc import Sequence

from diloco.config import config_files, flags


def parse_with_default(
  argv: Sequence[str], config: str, *overrides: str
) -> list[str]:
  """Calls `flags.parse`, with a default configuration.

  Args:
    argv: the command line.
    config: a file below `experiments/`, with its argument.
    *overrides: such as 'run.step_floor_s=0.05', for that file only.
  """
  given = [word for word in argv if word.startswith(('--config=', '--config '))]
  if not given and '--config' not in argv:
    rest = [f'--config.{override}' for override in overrides]
    path = config_files.EXPERIMENTS / config
    argv = [argv[0], f'--config={path}', *rest, *argv[1:]]
    sys.argv = list(argv)  # ml_collections reads the overrides there.
  return flags.parse(argv)
