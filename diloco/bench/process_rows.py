# SPDX-License-Identifier: Apache-2.0
"""Rows of real processes: stalls of steps, bytes, memory, growth, starts.

The twin without syncing is the same processes with H so long that no round
becomes due. Where steps are slept out, a sleep stands for accelerators at work.
"""

import functools
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from diloco.bench.measurement import (
  BenchFailed,
  BenchFigure,
  BenchSettings,
  Comparison,
  duration,
  quantile,
  timed,
)
from diloco.bench.real_run import (
  NEVER,
  SYNCER,
  RealRun,
  bowl,
  column,
  status,
  step_seconds,
)
from diloco.config.sections import CheckpointConfig, defaults
from diloco.metrics import names
from diloco.metrics.workdir import learner_name
from diloco.numerics.codec import make_codec

Overrides = Mapping[str, object]
Steps = list[list[dict]]  # By learner, records of its steps.


def every(steps: int, overlap: int, fragments: int = 4) -> Overrides:
  """Returns H, τ and P."""
  return {
    'protocol.fragments': fragments,
    'protocol.sync_every_steps': steps,
    'protocol.overlap_steps': overlap,
  }


TWIN = 'the same without syncing'
WITHOUT = {'protocol.sync_every_steps': NEVER}
EVERY_8, EVERY_20, EVERY_24 = every(8, 2), every(20, 4), every(24, 6)
SMALL_DECODER = {
  'model.layers': 2,
  'model.d_model': 128,
  'model.heads': 4,
  'model.kv_heads': 2,
  'model.head_dim': 32,
  'model.d_ff': 256,
}
SMALL_PARAMETERS = 361_088
SAVE = 'checkpoint.learner_every_steps'
QUANTILES = {'longest': 1.0, 'p99': 0.99, 'median': 0.5}
EMPTY_MILLIONS = 0.001
SAMPLES = 300  # Of memory, in the row `long`,
WARM_UP = 1 / 12  # and what of it is left out: compiling, allocators, pools.
# Of the row `start`: `--help`, and what the two import once flags are read.
STARTS = {
  'diloco.learner --help': ('-m', 'diloco.learner', '--help'),
  'diloco.syncer --help': ('-m', 'diloco.syncer', '--help'),
  **{
    f'import {module}': ('-c', f'import {module}')
    for module in ('diloco.learner.hosts.host_main', 'diloco.syncer.server')
  },
}
HELP_EXITS = (0, 1)  # absl's --help exits with 1.
ENDS_S = 300.0


# Steps with and without something.


def _steps(
  overrides: Overrides, floors_s: list[float], count: int, rounds: int
) -> Steps:
  """Returns `count` steps of each learner, after `rounds` rounds with each.

  Raises:
    BenchFailed: learners were to save, and one has no checkpoint at the end.
  """
  learners = range(len(floors_s))
  with RealRun({'protocol.learners': len(floors_s), **overrides}) as run:
    run.start_syncer()
    for m, floor_s in enumerate(floors_s):
      run.start_learner(m, step_floor_s=floor_s)
    for m in learners:
      run.until_steps(m, 5)
      run.until_merged(m, rounds)
    # All of them at the same time.
    before = [len(run.steps(m)) for m in learners]
    for m, begin in enumerate(before):
      run.until_steps(m, max(begin + count - len(run.steps(m)), 0))
    for m in learners if SAVE in overrides else ():
      if not list(run.workdir.checkpoints(learner_name(m)).glob('[0-9]*')):
        raise BenchFailed(f'learner {m} has no checkpoint')
    return [
      run.steps(m)[begin : begin + count] for m, begin in enumerate(before)
    ]


def _with_and_without(
  overrides: Overrides, floors_s: list[float], count: int, rounds: int
) -> tuple[Steps, Steps]:
  without = _steps({**overrides, **WITHOUT}, floors_s, count, 0)
  return _steps(overrides, floors_s, count, rounds), without


def all_seconds(steps: Steps) -> list[float]:
  return [s for each in steps for s in step_seconds(each)]


def stalls(
  name: str, steps: Steps, twin: Steps, against: str, titles: Sequence[str]
) -> Iterator[BenchFigure]:
  """Yields quantiles of the step time beyond the twin's median step."""
  steps_s, twin_s = all_seconds(steps), all_seconds(twin)
  for title in titles:
    share = QUANTILES[title]
    yield duration(
      f'{name}, {title} step stall',
      'ms',
      quantile(steps_s, share),
      quantile(twin_s, share),
      against,
      beyond_s=quantile(twin_s, 0.5),
    )


def measure_stall(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures stalls of two learners whose computation is a sleep, by size."""
  for millions in settings.sizes:
    synced, alone = _with_and_without(
      {**EVERY_20, **bowl(millions)},
      2 * [sleep_s(millions)],
      settings.pick(100, 10),
      settings.pick(8, 1),
    )
    name = f'{millions:g} M'
    yield from stalls(name, synced, alone, TWIN, tuple(QUANTILES))
    boundary_s = max(s for e in synced for s in column(e, names.STALL_TIME))
    usual_s = quantile(all_seconds(alone), 0.5)
    yield duration(
      f'{name}, longest boundary', 'ms', boundary_s, usual_s, 'a step'
    )


def sleep_s(millions: float) -> float:
  """Returns how long a step of such a model is slept out."""
  return 0.03 + 0.02 * millions


def measure_saving(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures stalls of learners that save, by size.

  First with computation as a sleep, then with steps that keep the cores busy;
  the same syncing without saves is the reference.
  """
  count, saves = settings.pick((120, 40), (10, 5))
  kinds = {'compute as a sleep': sleep_s, 'cores busy': lambda millions: 0.0}
  for kind, floor_s in kinds.items():
    for millions in settings.sizes:
      saving, without = (
        _steps(
          {**EVERY_20, **bowl(millions), **more},
          2 * [floor_s(millions)],
          count,
          settings.pick(8, 1),
        )
        for more in ({SAVE: saves}, {})
      )
      name = f'{millions:g} M, {kind}'
      against, titles = 'the same without saves', ('longest', 'p99')
      yield from stalls(name, saving, without, against, titles)


def measure_decoder(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures the step of a real decoder with and without syncing, M = 1."""
  overrides = {**EVERY_24, **SMALL_DECODER, 'data.batch': 16}
  overrides['data.seq_len'] = 64
  synced, alone = _with_and_without(
    overrides, [0.0], settings.pick(200, 20), settings.pick(8, 1)
  )
  steps_s, twin_s = all_seconds(synced), all_seconds(alone)
  for name, of in (('mean', statistics.mean), ('median', statistics.median)):
    yield duration(f'{name} step', 'ms', of(steps_s), of(twin_s), TWIN)


def measure_blocking(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures the round trip for which a step waits at τ = 0, by size.

  One learner and one fragment: encoding, a pull, the merge of one, the outer
  step, the ledger, a pull, rebuilding.
  """
  rounds = settings.pick(20, 3)
  for millions in settings.sizes:
    overrides = {**every(4, 0, 1), 'protocol.quorum': 1, **bowl(millions)}
    (steps,) = _steps(overrides, [0.02], 4 * rounds, 2)
    # Only the steps after a boundary with an offer have waited.
    waits_s = sorted(column(steps, names.STALL_TIME))[-rounds:]
    nbytes = make_codec('int4').nbytes(round(millions * 1e6))
    plain_s = statistics.median(
      timed(lambda n=nbytes: socket_round_trip(n)) for _ in range(5)
    )
    yield duration(
      f'{millions:g} M, round trip',
      'ms',
      statistics.median(waits_s),
      plain_s,
      'the bytes over a plain socket, up and down',
    )


def socket_round_trip(nbytes: int):
  """Sends so many bytes over loopback and receives as many."""
  data = bytes(nbytes)
  with socket.create_server(('127.0.0.1', 0)) as server:

    def serve():
      peer, _ = server.accept()
      with peer:
        _receive(peer, nbytes)
        peer.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    with socket.create_connection(server.getsockname()) as connection:
      connection.sendall(data)
      _receive(connection, nbytes)
    thread.join()


def _receive(connection: socket.socket, nbytes: int):
  buffer, have = memoryview(bytearray(nbytes)), 0
  while have < nbytes:
    have += connection.recv_into(buffer[have:])


def _start_both(run: RealRun, rounds: int):
  """Starts a syncer and two learners; waits for rounds with each."""
  run.start_syncer()
  for m in (0, 1):
    run.start_learner(m)
  for m in (0, 1):
    run.until_merged(m, rounds)


def measure_return(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures the longest step while a syncer that was killed comes back.

  It has saved its ledger alone, so the learners give it whole fragments.
  """
  for millions in settings.sizes:
    floor_s = sleep_s(millions)
    model = {**bowl(millions), 'run.step_floor_s': floor_s}
    with RealRun({**EVERY_20, **model}) as run:
      _start_both(run, settings.pick(8, 1))
      before = [run.steps(m) for m in (0, 1)]
      run.kill(SYNCER)
      closed = len(run.closes())
      run.start_syncer()
      more = settings.pick(8, 1)
      run.until(lambda n=closed + more: len(run.closes()) >= n, 'it closes')
      after = [run.steps(m)[len(before[m]) :] for m in (0, 1)]
    usual_s = quantile(all_seconds(before), 0.5)
    yield duration(
      f'{millions:g} M, longest step stall',
      'ms',
      max(all_seconds(after)),
      usual_s,
      'the median step before',
      beyond_s=usual_s,
    )


def measure_bytes(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures TCP payload per parameter and full sync, control plane included.

  Learners count all of their sockets. Between two records, n rounds merged the
  learner: n / P syncs of all parameters up; all rounds came down.
  """
  with RealRun({**EVERY_24, **SMALL_DECODER}) as run:
    _start_both(run, settings.pick(8, 2))
    begin, closed = run.steps(0)[-1], len(run.closes())
    more = settings.pick(48, 8)
    run.until(lambda: len(run.closes()) >= closed + more, 'rounds close')
    end = run.steps(0)[-1]
    rounds = {'up': run.closes(0), 'down': run.closes()}
  if names.SOCKET_SENT not in end:
    raise BenchFailed('this system does not count the bytes of sockets')
  scalars = {'up': names.SOCKET_SENT, 'down': names.SOCKET_RECEIVED}
  codec = make_codec('int4').nbytes(1 << 20) / (1 << 20)
  for leg, scalar in scalars.items():
    carried = sum(
      begin[names.TIME] < close['time_s'] <= end[names.TIME]
      for close in rounds[leg]
    )
    each = (end[scalar] - begin[scalar]) * EVERY_24['protocol.fragments']
    each /= max(carried, 1) * SMALL_PARAMETERS
    yield BenchFigure(
      f'{leg}, each sync', each, 'B/parameter', each / codec,
      'int4 with its scales',
    )  # fmt: skip


def measure_memory(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures the peak of resident memory beyond that of an empty model."""

  def peak_bytes(millions: float) -> int:
    overrides = {**EVERY_8, 'run.step_floor_s': 0.05, **bowl(millions)}
    with RealRun(overrides) as run:
      _start_both(run, settings.pick(12, 2))
      return 1024 * status(run.processes[SYNCER].pid, 'VmHWM')

  empty_bytes = peak_bytes(EMPTY_MILLIONS)
  for millions in settings.sizes:
    beyond = max(peak_bytes(millions) - empty_bytes, 0)
    each = beyond / (millions * 1e6)
    yield BenchFigure(
      f'{millions:g} M, M = 2', each, 'B/parameter', each / 4, 'Θ in f32'
    )


def measure_long(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Compares the last third of a run with its first: memory, steps, rounds.

  Two learners whose computation is a sleep, with the usual checkpoints. What
  grows in some minutes shows as a ratio above 1; a slow leak takes an hour.
  """
  millions, span_s = settings.sizes[-1], settings.pick(60 * settings.minutes, 6)
  usual = defaults(CheckpointConfig)
  overrides = {
    **EVERY_20,
    **bowl(millions),
    'run.step_floor_s': sleep_s(millions),
    SAVE: usual['learner_every_steps'],
    'checkpoint.syncer_every_rounds': usual['syncer_every_rounds'],
  }
  with RealRun(overrides) as run:
    _start_both(run, 1)
    began_s = time.time()
    memory = {name: [] for name in run.processes}
    for i in range(1, SAMPLES + 1):
      due_s = began_s + span_s * i / SAMPLES
      run.until(lambda due_s=due_s: time.time() >= due_s, 'the next sample')
      for name, process in run.processes.items():
        mb = 1024 * status(process.pid, 'VmRSS') / 1e6
        memory[name].append((time.time(), mb))
    points = {
      (f'{name}, memory', 'MB', 0.5): seen for name, seen in memory.items()
    }
    for m in (0, 1):
      seen = [(x[names.TIME], 1e3 * x[names.STEP_TIME]) for x in run.steps(m)]
      for title in ('median', 'p99'):
        name = f'{learner_name(m)}, {title} step'
        points[name, 'ms', QUANTILES[title]] = seen
    seen = [(close['time_s'], 1e3 * close['sync_s']) for close in run.closes()]
    points['median round', 'ms', 0.5] = seen
  for (name, unit, share), seen in points.items():
    yield growth(name, unit, share, seen, began_s, span_s)


def growth(
  name: str,
  unit: str,
  share: float,
  points: Sequence[tuple[float, float]],
  began_s: float,
  span_s: float,
) -> BenchFigure:
  """Returns a quantile of the last third of a span beside that of the first.

  Args:
    points: times and values.

  Raises:
    BenchFailed: nothing was measured in one of the thirds.
  """
  warm_s = began_s + WARM_UP * span_s
  third_s = (began_s + span_s - warm_s) / 3
  first, last = (
    [v for t, v in points if begin_s <= t < begin_s + third_s]
    for begin_s in (warm_s, warm_s + 2 * third_s)
  )
  if not first or not last:
    raise BenchFailed(f'{name}: too few; give more --minutes')
  first, last = quantile(first, share), quantile(last, share)
  against = 'the first third'
  return BenchFigure(f'{name}, last third', last, unit, last / first, against)


def measure_start(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures `--help` and the imports of both processes, in wall time."""
  jax = functools.partial(_python, ('-c', 'import jax'))
  for name, words in STARTS.items():
    yield Comparison(
      name, 's', float, functools.partial(_python, words), jax,
      'python -c "import jax"', settings.pick(2, 1), time.perf_counter,
    ).measure()  # fmt: skip


def _python(words: Sequence[str]):
  done = subprocess.run(
    [sys.executable, *words],
    capture_output=True,
    text=True,
    timeout=ENDS_S,
    check=False,
  )
  if done.returncode not in (HELP_EXITS if '--help' in words else (0,)):
    raise BenchFailed(
      f'python {" ".join(words)} exits with {done.returncode}: '
      f'{done.stderr[-500:]}'
    )
