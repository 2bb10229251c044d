# SPDX-License-Identifier: Apache-2.0
"""Measures what syncing costs the learners' steps, in runs of real processes.

The twin without syncing is the same processes with H so long that no round
becomes due. Where steps are slept out, a sleep stands for accelerators at work.
"""

import socket
import statistics
import threading
from collections.abc import Mapping

import numpy as np

from diloco.bench.measurement import (
  BenchFailed,
  BenchFigure,
  BenchSettings,
  quantile,
  timed,
)
from diloco.bench.real_run import NEVER, RealRun, bowl, column, step_seconds
from diloco.metrics import names
from diloco.metrics.workdir import learner_name
from diloco.numerics.codec import bytes_per_value, make_codec

Overrides = Mapping[str, object]
Steps = list[list[dict]]  # By learner, records of its steps.

TWIN = 'the same without syncing'
WITHOUT = {'protocol.sync_every_steps': NEVER}
EVERY_20 = {
  'protocol.fragments': 4,
  'protocol.sync_every_steps': 20,
  'protocol.overlap_steps': 4,
}
EVERY_24 = {
  'protocol.fragments': 4,
  'protocol.sync_every_steps': 24,
  'protocol.overlap_steps': 6,
}
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


def _steps(
  overrides: Overrides, floors_s: list[float], count: int, rounds: int
) -> Steps:
  """Returns `count` steps of each learner, after `rounds` rounds with each.

  Raises:
    BenchFailed: learners were to save, and one has no checkpoint at the end.
  """
  own = {'protocol.learners': len(floors_s), **overrides}
  with RealRun(own) as run:
    run.start_syncer()
    for m, floor_s in enumerate(floors_s):
      run.start_learner(m, step_floor_s=floor_s)
    for m in range(len(floors_s)):
      run.until_steps(m, 5)
      run.until_merged(m, rounds)
    # All of them at the same time.
    before = [len(run.steps(m)) for m in range(len(floors_s))]
    for m, begin in enumerate(before):
      run.until_steps(m, max(begin + count - len(run.steps(m)), 0))
    if SAVE in overrides:
      for m in range(len(floors_s)):
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


def measure(settings: BenchSettings) -> list[BenchFigure]:
  """Measures stalls of two learners whose computation is a sleep, by size."""
  found = []
  count = settings.pick(100, 10)
  for millions in settings.sizes:
    floors_s = 2 * [_floor_s(millions)]
    synced, alone = _with_and_without(
      {**EVERY_20, **bowl(millions)}, floors_s, count, settings.pick(8, 1)
    )
    found += _stalls(f'{millions:g} M', synced, alone)
  return found


def _floor_s(millions: float) -> float:
  return 0.03 + 0.02 * millions


def _stalls(name: str, synced: Steps, alone: Steps) -> list[BenchFigure]:
  """Returns quantiles of the step time beyond the twin's median step."""
  steps_s = [s for each in synced for s in step_seconds(each)]
  alone_s = [s for each in alone for s in step_seconds(each)]
  usual_s = quantile(alone_s, 0.5)
  found = []
  for title, share in (('longest', 1.0), ('p99', 0.99), ('median', 0.5)):
    step_s, twin_s = quantile(steps_s, share), quantile(alone_s, share)
    stall_ms = 1e3 * (step_s - usual_s)
    ratio = step_s / twin_s
    found.append(
      BenchFigure(f'{name}, {title} step stall', stall_ms, 'ms', ratio, TWIN)
    )
  boundary_s = max(s for e in synced for s in column(e, names.STALL_TIME))
  title = f'{name}, longest boundary'
  found.append(
    BenchFigure(title, 1e3 * boundary_s, 'ms', boundary_s / usual_s, 'a step')
  )
  return found


def measure_saving(settings: BenchSettings) -> list[BenchFigure]:
  """Measures the longest stall of learners that save, compute as a sleep.

  Like `measure`, with the same syncing without saves as the reference.
  """
  found = []
  count, every = settings.pick((120, 40), (10, 5))
  for millions in settings.sizes:
    overrides, floor_s = {**EVERY_20, **bowl(millions)}, _floor_s(millions)
    saving, without = (
      _steps(
        {**overrides, **more}, [floor_s, floor_s], count, settings.pick(8, 1)
      )
      for more in ({SAVE: every}, {})
    )
    steps_s, others_s = (
      [s for each in steps for s in step_seconds(each)]
      for steps in (saving, without)
    )
    usual_s = quantile(others_s, 0.5)
    for title, share in (('longest', 1.0), ('p99', 0.99)):
      step_s, twin_s = quantile(steps_s, share), quantile(others_s, share)
      found.append(
        BenchFigure(
          f'{millions:g} M, compute as a sleep, {title} step stall',
          1e3 * (step_s - usual_s), 'ms', step_s / twin_s,
          'the same without saves',
        )
      )  # fmt: skip
  return found


def measure_blocking(settings: BenchSettings) -> list[BenchFigure]:
  """Measures the round trip for which a step waits at τ = 0, by size.

  One learner and one fragment: encoding, a pull, the merge of one, the outer
  step, the ledger, a pull, rebuilding.
  """
  found, every = [], 4
  for millions in settings.sizes:
    overrides = {
      'protocol.fragments': 1,
      'protocol.sync_every_steps': every,
      'protocol.overlap_steps': 0,
      'protocol.quorum': 1,
    } | bowl(millions)
    rounds = settings.pick(20, 3)
    (steps,) = _steps(overrides, [0.02], every * rounds, 2)
    # Only the steps after a boundary with an offer have waited.
    waits_s = sorted(column(steps, names.STALL_TIME))[-rounds:]
    trip_s = statistics.median(waits_s)
    nbytes = make_codec('int4').nbytes(round(millions * 1e6))
    plain_s = statistics.median(
      timed(lambda n=nbytes: socket_round_trip(n)) for _ in range(5)
    )
    found.append(
      BenchFigure(
        f'{millions:g} M, round trip', 1e3 * trip_s, 'ms', trip_s / plain_s,
        'the bytes over a plain socket, up and down',
      )
    )  # fmt: skip
  return found


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


def measure_bytes(settings: BenchSettings) -> list[BenchFigure]:
  """Measures TCP payload per parameter and full sync, control plane included.

  Learners count all of their sockets. Between two records, n rounds merged the
  learner: n / P syncs of all parameters up; all rounds came down.
  """
  fragments, found = EVERY_24['protocol.fragments'], []
  with RealRun({**EVERY_24, **SMALL_DECODER}) as run:
    run.start_syncer()
    for m in (0, 1):
      run.start_learner(m)
    for m in (0, 1):
      run.until_merged(m, settings.pick(8, 2))
    begin, closed = run.steps(0)[-1], len(run.closes())
    more = settings.pick(48, 8)
    run.until(lambda: len(run.closes()) >= closed + more, 'rounds close')
    end = run.steps(0)[-1]
    rounds = {'up': run.closes(0), 'down': run.closes()}
  if names.SOCKET_SENT not in end:
    raise BenchFailed('this system does not count the bytes of sockets')
  scalars = {'up': names.SOCKET_SENT, 'down': names.SOCKET_RECEIVED}
  codec = bytes_per_value('int4')
  for leg, scalar in scalars.items():
    carried = sum(
      begin[names.TIME] < close['time_s'] <= end[names.TIME]
      for close in rounds[leg]
    )
    each = (end[scalar] - begin[scalar]) * fragments
    each /= max(carried, 1) * SMALL_PARAMETERS
    found.append(
      BenchFigure(f'{leg}, each sync', each, 'B/parameter', each / codec,
                  'int4 with its scales')
    )  # fmt: skip
  return found


def measure_slower(settings: BenchSettings) -> list[BenchFigure]:
  """Measures goodput of a learner beside one that is twice as slow."""
  synced, alone = _with_and_without(
    EVERY_24,
    [FLOOR_S, 2 * FLOOR_S],
    settings.pick(120, 20),
    settings.pick(8, 1),
  )
  found = []
  for name, steps, twin in zip(('fast', 'slow'), synced, alone):
    mean_s = float(np.mean(step_seconds(steps)))
    stall_s = float(np.mean(column(steps, names.STALL_TIME)))
    ratio = mean_s / float(np.mean(step_seconds(twin)))
    goodput = 100 * (1 - stall_s / mean_s)
    found.append(
      BenchFigure(f'the {name} learner, goodput', goodput, '%', ratio, TWIN)
    )
  return found


def measure_decoder(settings: BenchSettings) -> list[BenchFigure]:
  """Measures the step of a real decoder with and without syncing, M = 1."""
  synced, alone = _with_and_without(
    {**EVERY_24, **SMALL_DECODER, 'data.batch': 16, 'data.seq_len': 64},
    [0.0],
    settings.pick(200, 20),
    settings.pick(8, 1),
  )
  steps_s, twin_s = step_seconds(synced[0]), step_seconds(alone[0])
  return [
    BenchFigure(
      f'{name} step', 1e3 * of(steps_s), 'ms', of(steps_s) / of(twin_s), TWIN
    )
    for name, of in (('mean', statistics.mean), ('median', statistics.median))
  ]
