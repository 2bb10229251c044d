# SPDX-License-Identifier: Apache-2.0
"""The whole runtime in one process: what a test of it starts and ends."""

import faulthandler
import pathlib
import random
import threading
from collections.abc import Callable, Mapping
from unittest import mock

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.config import run_config
from diloco.learner import restore
from diloco.learner.connection import SyncerAddress
from diloco.learner.programs import LearnerPrograms
from diloco.learner.syncer_client import SyncerClient
from diloco.learner.train_loop import TrainLoop
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir, learner_name
from diloco.metrics.writer import JsonlWriter, MultiWriter
from diloco.protocol import timeouts
from diloco.protocol.incarnation import process_of
from diloco.protocol.learner import events as learner_events
from diloco.run.environment import describe
from diloco.run.event_log import LearnerEventLog
from diloco.run.spec import make_run_spec
from diloco.syncer.server import SyncerServer
from diloco.syncer.shard_server import ShardServer
from diloco.transport.auth import OPEN
from diloco.transport.memory import MemoryNetwork, MemoryPlane
from experiments import tests_tiny
from tests.transport.faulty import Faults, FaultyPlane
from tests.waiting import until

LEARNERS = 2
DEADLINE_S = 120.0
NOTICE_S = 5.0
PATIENCE = 10.0  # No test here waits for silence: it is a busy machine's.
PULL_S = 0.5


class Killed(Exception):
  """Ends a learner's threads where a process would get SIGKILL."""


class Living:
  """A learner, in threads, that stands for its process; see `Run.start`.

  Attributes:
    training: its loop.
    exchange: with the syncer.
    restored: what it had at its start.
    left: why it left, once it has.
  """

  def __init__(self, run: 'Run', learner: int, plane, programs):
    run_spec, workdir = run.run_spec, run.workdir
    checkpoint = run_spec.config.checkpoint
    self._plane = plane
    self.learner = learner
    self.left: learner_events.Leave | None = None
    records = LearnerRecords(
      workdir.checkpoints(learner_name(learner)),
      learner,
      run_spec.fingerprints,
      checkpoint.keep_latest,
      say=run.said.append,
    )
    self.restored = restore.restore(run_spec, programs, records)
    self.exchange = SyncerClient(
      run_spec,
      learner,
      SyncerAddress(run.syncing.address, plane),
      programs,
      self.restored.host,
      self.restored.start,
    )
    self._writer = JsonlWriter(workdir.metrics(learner_name(learner)))
    self._tape = LearnerEventLog(
      workdir.learner_tape(learner),
      lambda: self.exchange.process,
      describe(run_spec.config, {}),
    )
    self.training = TrainLoop(
      run_spec,
      learner,
      programs,
      self.restored,
      self.exchange,
      records,
      self._writer,
      self._tape,
      NOTICE_S,
    )
    self.thread = threading.Thread(target=run.guard(self.train))

  def train(self):
    """Trains to the end of the run, or until it is killed."""
    try:
      self.left = self.training.run()
    except Killed:
      pass
    finally:
      self.exchange.close()
      self._writer.close()
      self._tape.close()

  def kill(self):
    """Silences a process from one moment to the next: no message, no byte."""
    self._plane.close()
    self.exchange.crash(Killed())


class Run:
  """Syncer and learners as threads, on one memory network.

  Args:
    folder: the workdir.
    faults: of every data plane.
    step_floor_s: of `config.run`.
    checkpoint: what differs from `tests_tiny` in its section.
    shards: of the syncer.
    embedding: of the section `fragments`; '': of a model without one.
    progress: of the section `inner`.
    **protocol: what differs from `tests_tiny` in its section `protocol`.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    faults: Faults,
    step_floor_s: float = 0.0,
    checkpoint: Mapping | None = None,
    shards: int = 1,
    embedding: str = '',
    progress: str = 'global',
    **protocol,
  ):
    config = tests_tiny.get_config()
    if embedding:
      config.fragments.embedding = embedding
    else:  # Compiled in no time, where what is looked at is not the model.
      config.model.update(kind='bowl', layers=2, d_ff=128)
    config.protocol.update(learners=LEARNERS, quorum=1, total_steps=100)
    config.protocol.patience = PATIENCE
    config.protocol.update(protocol)
    config.checkpoint.update(checkpoint or {})
    config.run.step_floor_s = step_floor_s
    config.syncer.shards = shards
    config.inner.progress = progress
    self.run_spec = make_run_spec(run_config.build(config))
    # Its planes lose bytes on purpose: pulls must time out soon.
    floor_s = PULL_S / config.protocol.patience
    self._quick = mock.patch.object(timeouts, 'TRANSFER_FLOOR_S', floor_s)
    self._quick.start()
    self.programs = LearnerPrograms(self.run_spec)
    self.workdir = Workdir(folder)
    self._network = MemoryNetwork()
    self._faults = faults
    self._planes = []
    self.syncing = SyncerServer(
      self.run_spec, '127.0.0.1:0', self.plane(0), self.workdir
    )
    self._syncer = threading.Thread(target=self.guard(self.syncing.run))
    self.shardings = [
      ShardServer(
        self.run_spec,
        shard,
        self.syncing.address,
        self.plane(100 + shard),
        self.workdir,
        OPEN,
        MultiWriter([]),
      )
      for shard in range(1, shards)
    ]
    self._shards = [
      threading.Thread(target=self.guard(each.run)) for each in self.shardings
    ]
    self.said: list[str] = []  # Of checkpoints.
    self.learners: list[Living] = []  # Of all that were started.
    self._errors = []

  @property
  def hosts(self):
    """The learners' copies of Θ."""
    return [each.restored.host for each in self.learners]

  @property
  def left(self) -> list[learner_events.Leave]:
    """Why learners left."""
    return [each.left for each in self.learners if each.left is not None]

  def plane(self, seed: int):
    """Makes one more plane on the run's network."""
    plane = FaultyPlane(
      MemoryPlane(self._network), self._faults, random.Random(seed)
    )
    self._planes.append(plane)
    return plane

  def start_syncer(self):
    for thread in (self._syncer, *self._shards):
      thread.start()

  def start(self, learner: int, plane=None, programs=None) -> Living:
    """Starts a learner, beside whatever runs."""
    living = self._make(learner, plane, programs)
    living.thread.start()
    return living

  def finish(self):
    """Trains to the end; raises what any thread raised."""
    self.start_syncer()
    # Else one would train alone while the other is made.
    for living in [self._make(learner) for learner in range(LEARNERS)]:
      living.thread.start()
    self.join()

  def join(self):
    """Waits for the end; raises what any thread raised."""
    threads = [
      self._syncer,
      *self._shards,
      *(each.thread for each in self.learners),
    ]
    for thread in threads:
      thread.join(DEADLINE_S)
    late = [thread for thread in threads if thread.is_alive()]
    self.close()
    assert not late, f'{len(late)} threads did not end in {DEADLINE_S} s'

  def close(self):
    """Stops whatever still runs; raises what any thread raised."""
    for each in self.learners:
      each.training.stop()
    self.syncing.stop()
    for each in self.shardings:
      each.stop()
    for thread in (
      self._syncer,
      *self._shards,
      *(each.thread for each in self.learners),
    ):
      if thread.ident is not None:
        thread.join(DEADLINE_S)
        if thread.is_alive():
          faulthandler.dump_traceback()
          self._errors.append(TimeoutError(f'{thread.name} does not end'))
    self.syncing.close()
    for each in self.shardings:
      each.close()
    for plane in self._planes:
      plane.close()
    self._quick.stop()
    if self._errors:
      raise self._errors[0]

  def until(self, holds: Callable[[], bool], what: str):
    """Waits until `holds()`; raises what any thread raised."""

    def holds_or_raises() -> bool:
      if self._errors:
        raise self._errors[0]
      return holds()

    until(holds_or_raises, DEADLINE_S, what)

  def until_merged(self, living: Living, rounds: int = 3):
    """Waits until so many rounds have merged this very process."""

    def merged() -> int:
      shares = [
        share
        for line in self.tape('Publish')
        for share in line['shares']
        if share['learner'] == living.learner
      ]
      processes = [process_of(share['incarnation']) for share in shares]
      return processes.count(living.exchange.process)

    self.until(
      lambda: merged() >= rounds, f'learner {living.learner} is merged'
    )

  def tape(self, kind: str) -> list[dict]:
    """The syncer's decisions of one kind so far."""
    lines = read_jsonl(self.workdir.tape)
    return [line for line in lines if line['kind'] == kind]

  def _make(self, learner: int, plane=None, programs=None) -> Living:
    plane = plane or self.plane(1 + learner)
    living = Living(self, learner, plane, programs or self.programs)
    self.learners.append(living)
    return living

  def guard(self, target):
    """Wraps `target` so that `finish` raises what it raised."""

    def run():
      try:
        target()
      except BaseException as error:  # noqa: BLE001 - raised by `finish`.
        self._errors.append(error)

    return run
