# SPDX-License-Identifier: Apache-2.0
"""Rows of real processes: stalls of steps, bytes, kills, memory, starts.

The twin without syncing is the same processes with H so long that no round
becomes due. Where steps are slept out, a sleep stands for accelerators at work.
"""

import itertools
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
  duration,
  in_turns,
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
FLOOR_S = 0.05
SAVE = 'checkpoint.learner_every_steps'
QUANTILES = {'longest': 1.0, 'p99': 0.99, 'median': 0.5}
EMPTY_MILLIONS = 0.001
VICTIM, SURVIVOR = 1, 0
# Of the row `start`: `--help`, and what the two import once flags are read.
HELP = ('diloco.learner', 'diloco.syncer')
SERVING = ('diloco.learner.hosts.host_main', 'diloco.syncer.server')
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
  """Measures stalls of learners that save, compute as a sleep.

  Like `measure_stall`, with the same syncing without saves as the reference.
  """
  count, saves = settings.pick((120, 40), (10, 5))
  for millions in settings.sizes:
    saving, without = (
      _steps(
        {**EVERY_20, **bowl(millions), **more},
        2 * [sleep_s(millions)],
        count,
        settings.pick(8, 1),
      )
      for more in ({SAVE: saves}, {})
    )
    name = f'{millions:g} M, compute as a sleep'
    against, titles = 'the same without saves', ('longest', 'p99')
    yield from stalls(name, saving, without, against, titles)


def measure_slower(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures goodput of a learner beside one that is twice as slow."""
  floors_s, count = [FLOOR_S, 2 * FLOOR_S], settings.pick(120, 20)
  synced, alone = _with_and_without(
    EVERY_24, floors_s, count, settings.pick(8, 1)
  )
  for name, steps, twin in zip(('fast', 'slow'), synced, alone):
    mean_s = statistics.fmean(step_seconds(steps))
    stall_s = statistics.fmean(column(steps, names.STALL_TIME))
    yield BenchFigure(
      f'the {name} learner, goodput',
      100 * (1 - stall_s / mean_s),
      '%',
      mean_s / statistics.fmean(step_seconds(twin)),
      TWIN,
    )


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
    overrides = {**EVERY_8, 'run.step_floor_s': FLOOR_S, **bowl(millions)}
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


# Kills. Steps are slept out.


def _until_quiet(run: RealRun, settings: BenchSettings) -> float:
  """Starts all, lets them train; returns when the quiet span began."""
  _start_both(run, settings.pick(8, 2))
  quiet_s = time.time()
  run.until_steps(SURVIVOR, settings.pick(120, 20))
  return quiet_s


def measure_learner_killed(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures the survivor's longest step gap, and the respawn."""
  with RealRun({**EVERY_8, 'run.step_floor_s': FLOOR_S}) as run:
    quiet_s = _until_quiet(run, settings)
    victim = learner_name(VICTIM)
    first_s = run.closes(VICTIM)[0]['time_s'] - run.started_s[victim]
    killed_s = run.kill(victim)
    run.until_steps(SURVIVOR, settings.pick(60, 5))
    run.start_learner(VICTIM)
    started_s = run.started_s[victim]
    run.until_merged(VICTIM, 1, started_s)
    run.until_steps(SURVIVOR, settings.pick(60, 5))
    times_s = column(run.steps(SURVIVOR), names.TIME)
    merged_s = next(
      close['time_s']
      for close in run.closes(VICTIM)
      if close['time_s'] >= started_s
    )
  before_s = longest_gap_s(times_s, quiet_s, killed_s)
  spans = {'away': (killed_s, started_s), 'starts': (started_s, merged_s)}
  for when, span in spans.items():
    yield duration(
      f'survivor, longest step gap, victim {when}',
      'ms',
      longest_gap_s(times_s, *span),
      before_s,
      'its longest before the kill',
    )
  respawn_s = merged_s - started_s
  yield duration(
    'respawn to first contribution', 's', respawn_s, first_s, 'its first start'
  )


def measure_syncer_killed(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures the time from "listens" to the first merge, and the steps."""
  with RealRun({**EVERY_8, 'run.step_floor_s': FLOOR_S}) as run:
    quiet_s = _until_quiet(run, settings)
    killed_s = run.kill(SYNCER)
    run.until_steps(SURVIVOR, settings.pick(60, 5))
    listens_s = run.start_syncer()

    def merges() -> list[float]:
      times_s = (close['time_s'] for close in run.closes())
      return [t for t in times_s if t >= run.started_s[SYNCER]]

    run.until(merges, 'a round closes after the restart')
    merged_s = merges()[0]
    run.until_steps(SURVIVOR, 5)
    times_s = column(run.steps(SURVIVOR), names.TIME)
    closes_s = [
      close['time_s']
      for close in run.closes()
      if quiet_s <= close['time_s'] < killed_s
    ]
  between_s = statistics.median(b - a for a, b in itertools.pairwise(closes_s))
  yield duration(
    'syncer listens to first merge',
    's',
    max(merged_s - listens_s, 0.0),
    between_s,
    'the time between two rounds',
  )
  yield duration(
    'longest step gap without a syncer',
    'ms',
    longest_gap_s(times_s, killed_s, listens_s),
    longest_gap_s(times_s, quiet_s, killed_s),
    'the longest before the kill',
  )


def longest_gap_s(times_s: list[float], begin_s: float, end_s: float) -> float:
  """Returns the longest time between two steps that touches the span."""
  gaps = [
    b - a for a, b in itertools.pairwise(times_s) if b > begin_s and a < end_s
  ]
  return max(gaps, default=end_s - begin_s)


# Starts.


def measure_start(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures `--help` and the imports of both processes, in wall time."""
  jax = ('-c', 'import jax')
  commands = {f'{m} --help': ('-m', m, '--help') for m in HELP}
  commands |= {f'import {m}': ('-c', f'import {m}') for m in SERVING}
  for name, words in commands.items():
    pair = in_turns(
      lambda words=words: _python(words),
      lambda: _python(jax),
      settings.pick(2, 1),
      time.perf_counter,
    )
    yield BenchFigure(
      name, pair.work_s, 's', pair.ratio, 'python -c "import jax"'
    )


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
