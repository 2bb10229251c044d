# SPDX-License-Identifier: Apache-2.0
"""Measures what it takes a syncer to serve many learners.

The syncer is a real process. The many learners are threads of this one, each
with the real loop, client and data plane: as processes, 64 of them would leave
the syncer no core. Linux only.
"""

import os
import pathlib
import statistics
import threading
import time

import ml_collections

from diloco.bench.measurement import BenchFailed, BenchFigure, BenchSettings
from diloco.bench.process_rows import EVERY_8
from diloco.bench.real_run import SYNCER, RealRun, get_config, status
from diloco.checkpoint.learner_records import LearnerRecords
from diloco.config import run_config
from diloco.learner import restore
from diloco.learner.connection import SyncerAddress
from diloco.learner.device import Device
from diloco.learner.restore import Outputs
from diloco.learner.syncer_client import SyncerClient
from diloco.learner.train_loop import TrainLoop
from diloco.metrics.workdir import learner_name
from diloco.metrics.writer import JsonlWriter
from diloco.run.environment import describe
from diloco.run.event_log import LearnerEventLog
from diloco.run.spec import RunSpec, make_run_spec
from diloco.transport.auth import OPEN
from diloco.transport.planes import make_plane

NOTICE_S = 2.0
JOIN_S = 60.0
PLANE = 'grpc'  # One server of the other plane serves a whole process.
FRAGMENTS = EVERY_8['protocol.fragments']
MANY = {
  **EVERY_8,
  'protocol.quorum': 0,  # All: every round merges M contributions.
  'transport.data_plane': PLANE,
}


def measure_served(settings: BenchSettings) -> list[BenchFigure]:
  """Measures the syncer beside M learners; the first M is the reference."""
  found, first_s = [], None
  for learners in settings.pick(settings.learners, (2,)):
    with RealRun(_overrides(learners)) as run:
      seen = _served(run, learners, settings.pick(3 * FRAGMENTS, FRAGMENTS))
    name = f'M = {learners}'
    first_s = first_s or seen['cpu_s']
    found += [
      BenchFigure(f'{name}, first pull to merged', 1e3 * seen['sync_s'], 'ms'),
      BenchFigure(
        f'{name}, CPU a contribution', 1e3 * seen['cpu_s'], 'ms',
        seen['cpu_s'] / first_s, 'that with the smallest M',
      ),
      BenchFigure(f'{name}, threads', seen['threads'], ''),
      BenchFigure(f'{name}, descriptors', seen['descriptors'], ''),
    ]  # fmt: skip
  return found


def crowd_config(learners: int) -> ml_collections.ConfigDict:
  """Returns the configuration of a syncer and so many learners."""
  config = get_config()
  for key, value in _overrides(learners).items():
    section, _, name = key.partition('.')
    config[section][name] = value
  # Long enough that a busy core does not decide how long a round takes.
  config.run.step_floor_s = 0.02 * learners
  return config


def _overrides(learners: int) -> dict[str, object]:
  sizes = {'protocol.learners': learners, 'data.shards': learners}
  return {**MANY, **sizes}


def _served(run: RealRun, learners: int, rounds: int) -> dict[str, float]:
  """Returns what the syncer used while so many rounds closed."""
  run.start_syncer()
  crowd = Crowd(run, learners)
  try:
    run.until(
      lambda: any(len(c['shares']) == learners for c in run.closes()),
      f'a round merges all {learners} learners',
    )
    pid, before = run.processes[SYNCER].pid, len(run.closes())
    cpu_s = _cpu_s(pid)
    run.until(
      lambda: len(run.closes()) >= before + rounds, f'{rounds} rounds close'
    )
    cpu_s = _cpu_s(pid) - cpu_s
    closes = run.closes()[before:]
    return {
      'cpu_s': cpu_s / sum(len(close['shares']) for close in closes),
      'sync_s': statistics.median(close['sync_s'] for close in closes),
      'threads': float(status(pid, 'Threads')),
      'descriptors': float(len(os.listdir(f'/proc/{pid}/fd'))),
    }
  finally:
    crowd.close()


class Crowd:
  """M learners as threads of this process, of the smallest decoder.

  Args:
    run: whose syncer listens.
  """

  def __init__(self, run: RealRun, learners: int):
    self._run = run
    self._crashes: list[BaseException] = []
    self._closing = threading.Event()
    config = crowd_config(learners)
    run_spec = make_run_spec(run_config.build(config))
    device = Device(run_spec)
    self._plane = make_plane(
      PLANE, config.transport.host, OPEN, run_spec.limits.workers
    )
    self._loops, self._threads, self._ends = [], [], []
    for m in range(learners):
      self._loops.append(self._loop(run_spec, device, m))
    for loop in self._loops:
      thread = threading.Thread(target=self._train, args=(loop,), daemon=True)
      thread.start()
      self._threads.append(thread)

  def close(self):
    """Stops all learners, and ends their connections."""
    self._closing.set()
    for loop in self._loops:
      loop.stop()
    over_s = time.monotonic() + JOIN_S
    for thread in self._threads:
      thread.join(max(over_s - time.monotonic(), 0.0))
    for end in self._ends:
      end.close()
    self._plane.close()
    if self._crashes:
      raise BenchFailed(f'a learner crashed: {self._crashes[0]!r}')

  def _train(self, loop: TrainLoop):
    try:
      loop.run()
    except BaseException as error:  # noqa: BLE001 - told by `close`.
      if not self._closing.is_set():
        self._crashes.append(error)

  def _loop(self, run_spec: RunSpec, device: Device, m: int) -> TrainLoop:
    workdir, name = self._run.workdir, learner_name(m)
    records = _NothingSaved(
      workdir.checkpoints(name), m, run_spec.fingerprints, 1, 0, lambda text: 0
    )
    restored = restore.restore(run_spec, device, records)
    exchange = SyncerClient(
      run_spec,
      m,
      SyncerAddress(self._run.address, self._plane),
      device,
      restored.host,
      restored.start,
    )
    writer = JsonlWriter(workdir.metrics(name))
    tape = LearnerEventLog(
      workdir.learner_tape(m),
      lambda: exchange.process,
      describe(run_spec.config.mesh, {}),
    )
    self._ends += [exchange, writer, tape]
    outputs = Outputs(records, writer, tape)
    return TrainLoop(run_spec, m, device, restored, exchange, outputs, NOTICE_S)


class _NothingSaved(LearnerRecords):
  """Records of a learner that is over when the measurement is.

  One that stops saves first; Orbax takes minutes over many of one process.
  """

  def can_begin(self, step: int) -> bool:
    return False


def _cpu_s(pid: int) -> float:
  """Returns the CPU seconds of a process so far."""
  text = pathlib.Path(f'/proc/{pid}/stat').read_text()
  user, system = text.rpartition(')')[2].split()[11:13]
  return (int(user) + int(system)) / os.sysconf('SC_CLK_TCK')
