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

HELP = ('diloco.learner', 'diloco.syncer')
# Imported by the two once their flags are read.
SERVING = ('diloco.learner.hosts.host_main', 'diloco.syncer.server')
IMPORT_JAX = ('-c', 'import jax')
AGAINST = 'python -c "import jax"'
HELP_EXITS = (0, 1)  # absl's --help exits with 1.
ENDS_S = 300.0


def measure(settings: BenchSettings) -> list[BenchFigure]:
  """Measures `--help` and the imports of both processes, in wall time."""
  commands = {f'{m} --help': ('-m', m, '--help') for m in HELP}
  commands |= {f'import {m}': ('-c', f'import {m}') for m in SERVING}
  found = []
  for name, words in commands.items():
    exits = HELP_EXITS if '--help' in words else (0,)
    pair = in_turns(
      lambda words=words, exits=exits: _python(words, exits),
      lambda: _python(IMPORT_JAX, (0,)),
      settings.pick(2, 1),
      time.perf_counter,
    )
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
