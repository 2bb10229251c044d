# SPDX-License-Identifier: Apache-2.0
"""Makes the runs of a sweep in the lab, each in a process with one thread.

A small model's step is faster on one thread than on two (measured: 14 ms
against 28 at 131 k parameters), and two runs fit side by side on two cores. All
share their compiled programs: for a run of 131 k parameters, 13 to 15 s of 20
to 23 s of CPU do not depend on its steps.
"""

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

from diloco.sweeps import making
from diloco.sweeps.making import Sweep, SweepRun

ONE_THREAD = '--xla_cpu_multi_thread_eigen=false'
LOG = 'log'  # In the folder of a run.


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
  with _stopping_pool(jobs) as submit:
    running = {submit(run): run for run in runs}
    for done in futures.as_completed(running):
      yield running[done], done.result()


@contextlib.contextmanager
def _stopping_pool(jobs: int) -> Iterator[Callable[..., futures.Future]]:
  """Yields what submits a run; Ctrl-C ends those that have begun, and no
  other begins.
  """
  pool = futures.ThreadPoolExecutor(jobs)
  submitted, processes = [], set()

  def submit(run: SweepRun) -> futures.Future:
    submitted.append(pool.submit(_run, run, processes))
    return submitted[-1]

  try:
    yield submit
  except KeyboardInterrupt:
    print('the same command goes on with the sweep', file=sys.stderr)
    raise
  finally:
    pool.shutdown(wait=False, cancel_futures=True)
    # Again and again: a process may be just beginning.
    while not all(future.done() for future in submitted):
      for process in tuple(processes):
        process.terminate()
      time.sleep(0.1)


def _run(run: SweepRun, processes: set[subprocess.Popen]) -> int:
  folder = run.workdir.root
  folder.mkdir(parents=True, exist_ok=True)
  xla = f'{os.environ.get("XLA_FLAGS", "")} {ONE_THREAD}'.strip()
  with (folder / LOG).open('wb') as log:
    process = subprocess.Popen(
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
  processes.add(process)
  code = process.wait()
  processes.discard(process)
  return code
