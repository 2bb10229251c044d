# SPDX-License-Identifier: Apache-2.0
"""Makes the runs of a sweep in the lab, each in a process with one thread.

A small model's step is faster on one thread than on two (measured: 14 ms
against 28 at 131 k parameters), and two runs fit side by side on two cores. All
share their compiled programs: for a run of 131 k parameters, 13 to 15 s of 20
to 23 s of CPU do not depend on its steps.
"""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from diloco.sweeps import making
from diloco.sweeps.making import Sweep, SweepRun

ONE_THREAD = '--xla_cpu_multi_thread_eigen=false'
LOG = 'log'  # In the folder of a run.
LOOK_EVERY_S = 0.1


def make(asked: Sweep, jobs: int) -> int:
  """Makes the missing runs, then prints the table; 1 if a run failed.

  Raises:
    ConfigError: another sweep is making runs in the folder.
  """
  side_by_side = functools.partial(_side_by_side, jobs)
  return making.make(asked, side_by_side, f'{jobs} at a time', LOG)


def _side_by_side(
  jobs: int, runs: Sequence[SweepRun]
) -> Iterator[tuple[SweepRun, int]]:
  """Yields runs with their exit codes; with it, those that run end, too."""
  waiting, running = list(runs), {}
  try:
    while waiting or running:
      while waiting and len(running) < jobs:
        run = waiting.pop(0)
        running[_start(run)] = run
      time.sleep(LOOK_EVERY_S)
      for process in [p for p in running if p.poll() is not None]:
        yield running.pop(process), process.returncode
  except KeyboardInterrupt:
    print('the same command goes on with the sweep', file=sys.stderr)
    raise
  finally:
    for process in running:
      process.terminate()
    for process in running:
      process.wait()


def _start(run: SweepRun) -> subprocess.Popen:
  folder = run.workdir.root
  folder.mkdir(parents=True, exist_ok=True)
  xla = f'{os.environ.get("XLA_FLAGS", "")} {ONE_THREAD}'.strip()
  with (folder / LOG).open('wb') as log:
    return subprocess.Popen(
      [
        sys.executable,
        '-m',
        'diloco.lab',
        *run.arguments,
        f'--workdir={folder}',
        f'--compiled={run.compiled}',
        '--noparameters',  # A sweep's models would fill the disk.
      ],
      stdout=log,
      stderr=log,
      env={**os.environ, 'XLA_FLAGS': xla, 'NPROC': '1'},
    )
