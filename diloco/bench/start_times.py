# SPDX-License-Identifier: Apache-2.0
"""Measures how long the commands take to start, beside `import jax`."""

import subprocess
import sys
import time
from collections.abc import Sequence

from diloco.bench.measurement import (
  BenchFailed,
  BenchFigure,
  BenchSettings,
  in_turns,
)

COMMANDS = ('diloco.learner', 'diloco.syncer')
IMPORT_JAX = ('-c', 'import jax')
AGAINST = 'python -c "import jax"'
HELP_EXITS = (0, 1)  # absl's --help exits with 1.
ENDS_S = 300.0


def measure(settings: BenchSettings) -> list[BenchFigure]:
  """Measures `--help` of both processes, in wall time."""
  found = []
  for module in COMMANDS:
    pair = in_turns(
      lambda m=module: _python(('-m', m, '--help'), HELP_EXITS),
      lambda: _python(IMPORT_JAX, (0,)),
      settings.pick(3, 1),
      time.perf_counter,
    )
    name = f'{module} --help'
    found.append(BenchFigure(name, pair.work_s, 's', pair.ratio, AGAINST))
  return found


def _python(words: Sequence[str], exits: Sequence[int]):
  done = subprocess.run(
    [sys.executable, *words],
    capture_output=True,
    text=True,
    timeout=ENDS_S,
    check=False,
  )
  if done.returncode not in exits:
    raise BenchFailed(
      f'python {" ".join(words)} exits with {done.returncode}: '
      f'{done.stderr[-500:]}'
    )
