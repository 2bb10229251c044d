# SPDX-License-Identifier: Apache-2.0
"""Random scenarios of failures against the protocol's invariants.

python -m diloco.swarm --seeds=0:1000
python -m diloco.swarm --fresh=100000 --jobs=2
python -m diloco.swarm --seed=17

A seed that fails does not stop the others. Each failure is told at once on
standard error, all are listed at the end, with how to see each again, and the
exit code is 1. 78: it can't run as asked; 130, 143: Ctrl-C, SIGTERM.
"""

import multiprocessing
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent import futures

from absl import flags

from diloco.config import flags as config_flags
from diloco.config.sections import ConfigError
from diloco.metrics.run_progress import ProgressLine, count
from diloco.simulator import swarm
from diloco.simulator.scenario import SLICED_FROM

_SEEDS = flags.DEFINE_string('seeds', '0:1000', 'first:last, without the last.')
_SEED = flags.DEFINE_integer(
  'seed', None, 'Only this one; a failure shows its whole evidence.'
)
_FRESH = flags.DEFINE_integer(
  'fresh', None, 'So many that are new, in place of `--seeds`.', lower_bound=1
)
_JOBS = flags.DEFINE_integer('jobs', 1, 'Processes.', lower_bound=1)

AT_ONCE = 50  # Seeds that a process is given at a time.
POLL_S = 0.5  # How often it looks whether it was told to stop.


def main(_) -> int:
  """Runs all seeds; returns 1 where any of them failed."""
  if _SEED.value is not None:
    events = swarm.run(_SEED.value)
    print(f'1 seeds, {events} events, no violation')
    return 0
  seeds = _seeds()
  began_s = time.monotonic()
  done, stops = swarm.Survey(), []
  with ProgressLine() as line:
    for survey in _surveys(seeds, _JOBS.value, stops):
      done = done.plus(survey)
      for failure in failure_lines(survey.failures):
        line.stay(failure)
      line.say(progress(done, len(seeds), began_s))
  if stops:
    print('stopped', file=sys.stderr)
    return 128 + stops[0]
  for line in failure_lines(done.failures):
    print(line)
  verdict = f'{len(done.failures)} FAILED' if done.failures else 'no violation'
  took_s = time.monotonic() - began_s
  for what in swarm.WITNESSED:
    print(f'{done.witnessed.get(what, 0)} with {what}')
  print(f'{done.seeds} seeds, {done.events} events, {verdict}, {took_s:.1f} s')
  return 1 if done.failures else 0


def progress(done: swarm.Survey, seeds: int, since_s: float) -> str:
  """A line on how far it has come, and when it will be over."""
  per_s = done.seeds / (time.monotonic() - since_s)
  line = count(done.seeds, seeds, since_s)
  return f'{line}  {len(done.failures)} failed, {per_s:.0f} seeds/s'


def failure_lines(failures: Sequence[tuple[int, str]]) -> list[str]:
  """Returns each seed's failure, and the command that shows it again."""
  lines = []
  for seed, symptom in sorted(failures):
    lines.append(f'FAILED {seed}: {symptom}')
    lines.append(f'rerun: {swarm.rerun(seed)}')
  return lines


def _surveys(
  seeds: range, jobs: int, stops: list[int]
) -> Iterator[swarm.Survey]:
  """Yields the results of batches of seeds, in whatever order they are done.

  Args:
    stops: takes the signal that ended it before its time.
  """
  batches = [seeds[i : i + AT_ONCE] for i in range(0, len(seeds), AT_ONCE)]
  # Raised in a lock, a signal could hold it for ever.
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: stops.append(number))
  if jobs == 1:
    for batch in batches:
      if stops:
        return
      yield swarm.survey(batch)
    return
  context = multiprocessing.get_context('spawn')
  with futures.ProcessPoolExecutor(jobs, context, swarm.begin_process) as pool:
    running = {pool.submit(swarm.survey, batch) for batch in batches}
    while running and not stops:
      done, running = futures.wait(
        running, POLL_S, return_when=futures.FIRST_COMPLETED
      )
      for result in done:
        yield result.result()
    pool.shutdown(cancel_futures=True)


def _seeds() -> range:
  if _FRESH.value is not None:
    first = SLICED_FROM + secrets.randbits(40)
    print(f'--seeds={first}:{first + _FRESH.value}')
    return range(first, first + _FRESH.value)
  first, colon, last = _SEEDS.value.partition(':')
  if not (first.isdecimal() and colon and last.isdecimal()):
    raise ConfigError(
      [f'--seeds={_SEEDS.value}: must be first:last, such as 0:1000']
    )
  return range(int(first), int(last))


if __name__ == '__main__':
  config_flags.run_without_config(main)
