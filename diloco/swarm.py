# SPDX-License-Identifier: Apache-2.0
"""Random scenarios of failures against the protocol's invariants.

python -m diloco.swarm --seeds=0:1000
python -m diloco.swarm --seeds=0:200000 --jobs=2
python -m diloco.swarm --seed=17

A seed that fails does not stop the others. Each failure is told at once on
standard error, all are listed at the end, with how to see each again, and the
exit code is 1.
"""

import itertools
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent import futures

from absl import app, flags

from diloco.simulator import swarm

_SEEDS = flags.DEFINE_string('seeds', '0:1000', 'first:last, without the last.')
_SEED = flags.DEFINE_integer(
  'seed', None, 'Only this one; a failure shows its whole evidence.'
)
_JOBS = flags.DEFINE_integer('jobs', 1, 'Processes.', lower_bound=1)

AT_ONCE = 50  # Seeds that a process is given at a time.
AHEAD = 2  # Batches that a process has, with the one at hand.
POLL_S = 0.5  # How often it looks whether it was told to stop.
PROGRESS_S = 10.0  # Between two lines of progress.


def main(_):
  """Runs all seeds; exits with 1 where any of them failed."""
  if _SEED.value is not None:
    events = swarm.run(_SEED.value)
    print(f'1 seeds, {events} events, no violation')
    return
  seeds = _seeds()
  began_s = told_s = time.monotonic()
  done = swarm.Survey()
  for survey in _surveys(seeds, _JOBS.value):
    done = done.plus(survey)
    for line in failure_lines(survey.failures):
      print(line, file=sys.stderr, flush=True)
    now_s = time.monotonic()
    if now_s >= told_s + PROGRESS_S:
      told_s = now_s
      print(progress(done, len(seeds), now_s - began_s), file=sys.stderr)
  for line in failure_lines(done.failures):
    print(line)
  found = f'{len(done.failures)} FAILED' if done.failures else 'no violation'
  took_s = time.monotonic() - began_s
  print(f'{done.seeds} seeds, {done.events} events, {found}, {took_s:.1f} s')
  if done.failures:
    sys.exit(1)


def progress(done: swarm.Survey, seeds: int, took_s: float) -> str:
  """A line on how far it has come, and when it will be over."""
  per_s = done.seeds / took_s
  left_min = (seeds - done.seeds) / per_s / 60
  return (
    f'{done.seeds} of {seeds} seeds, {len(done.failures)} failed, '
    f'{per_s:.0f} seeds/s, {left_min:.1f} min left'
  )


def failure_lines(failures: Sequence[tuple[int, str]]) -> list[str]:
  """Returns each seed's failure, and the command that shows it again."""
  lines = []
  for seed, symptom in sorted(failures):
    lines.append(f'FAILED {seed}: {symptom}')
    lines.append(f'rerun: {swarm.rerun(seed)}')
  return lines


def _surveys(seeds: range, jobs: int) -> Iterator[swarm.Survey]:
  """The results of batches of seeds, in whatever order they are done."""
  batches = [seeds[i : i + AT_ONCE] for i in range(0, len(seeds), AT_ONCE)]
  if jobs == 1:
    yield from map(swarm.survey, batches)
    return
  stops: list[
    int
  ] = []  # Signals; raised in a lock, one could hold it for ever.
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: stops.append(number))
  context = multiprocessing.get_context('spawn')
  # Ctrl-C reaches the whole group; its processes end with this one.
  ignored = signal.SIGINT, signal.SIG_IGN
  pool = futures.ProcessPoolExecutor(jobs, context, signal.signal, ignored)
  rest, running = iter(batches), set()
  with pool:
    while not stops:
      room = AHEAD * jobs - len(running)
      for batch in itertools.islice(rest, room):
        running.add(pool.submit(swarm.survey, batch))
      if not running:
        return
      done, running = futures.wait(
        running, POLL_S, return_when=futures.FIRST_COMPLETED
      )
      for result in done:
        yield result.result()
    for result in running:
      result.cancel()
  sys.exit(128 + stops[0])


def _seeds() -> range:
  first, colon, last = _SEEDS.value.partition(':')
  if not (first.isdecimal() and colon and last.isdecimal()):
    raise app.UsageError(f'--seeds={_SEEDS.value}, must be first:last')
  return range(int(first), int(last))


if __name__ == '__main__':
  app.run(main)
