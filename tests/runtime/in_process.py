# SPDX-License-Identifier: Apache-2.0
"""The whole runtime in one process: what a test of it starts and ends."""

import pathlib
import random
import threading
from unittest import mock

from diloco import config as configs
from diloco.checkpoint.learner_records import LearnerRecords
from diloco.metrics.workdir import Workdir, learner_name
from diloco.metrics.writer import JsonlWriter
from diloco.protocol import patience
from diloco.runtime import beginning as beginnings
from diloco.runtime.blueprint import make_blueprint
from diloco.runtime.device import Device
from diloco.runtime.exchange import Exchange
from diloco.runtime.machine import describe
from diloco.runtime.outputs import Outputs
from diloco.runtime.syncing import Syncing
from diloco.runtime.tape import LearnerTape
from diloco.runtime.training import Training
from diloco.transport.faulty import Faults, faulty
from diloco.transport.memory import MemoryNetwork, MemoryPlane
from experiments import tests_tiny

LEARNERS = 2
DEADLINE_S = 120.0
NOTICE_S = 5.0
PULL_S = 0.5


class Run:
  """Syncer and learners as threads, on one memory network.

  Args:
    folder: the workdir.
    faults: of every data plane.
    step_floor_s: of `config.run`.
    **protocol: what differs from `tests_tiny` in its section `protocol`.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    faults: Faults,
    step_floor_s: float = 0.0,
    **protocol,
  ):
    config = tests_tiny.get_config()
    config.protocol.update(learners=LEARNERS, quorum=1, total_steps=100)
    config.protocol.update(protocol)
    config.run.step_floor_s = step_floor_s
    self.blueprint = make_blueprint(configs.build(config))
    # Its planes lose bytes on purpose: nobody is to wait long for them.
    self._quick = mock.patch.object(patience, 'TRANSFER_FLOOR_S', PULL_S)
    self._quick.start()
    self.device = Device(self.blueprint)
    self.workdir = Workdir(folder)
    self._network = MemoryNetwork()
    self._faults = faults
    self._planes = []
    self.syncing = Syncing(
      self.blueprint, '127.0.0.1:0', self._plane(0), self.workdir
    )
    self.hosts, self.left, self._errors = [], [], []
    self.said: list[str] = []  # Of checkpoints.
    self._trainings = []

  def _plane(self, seed: int):
    plane = faulty(
      MemoryPlane(self._network), self._faults, random.Random(seed)
    )
    self._planes.append(plane)
    return plane

  def finish(self):
    """Trains to the end; raises what any thread raised."""
    device = self.device
    threads = [threading.Thread(target=self._guard(self.syncing.run))]
    for learner in range(LEARNERS):
      threads.append(
        threading.Thread(target=self._guard(self._train, learner, device))
      )
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(DEADLINE_S)
    late = [thread for thread in threads if thread.is_alive()]
    for training in self._trainings:
      training.stop()
    self.syncing.stop()
    self.syncing.close()
    for plane in self._planes:
      plane.close()
    self._quick.stop()
    if self._errors:
      raise self._errors[0]
    assert not late, f'{len(late)} threads did not end in {DEADLINE_S} s'

  def _guard(self, target, *arguments):
    def run():
      try:
        target(*arguments)
      except BaseException as error:  # noqa: BLE001 - raised by `finish`.
        self._errors.append(error)

    return run

  def _train(self, learner: int, device: Device):
    checkpoint = self.blueprint.config.checkpoint
    records = LearnerRecords(
      self.workdir.checkpoints(learner_name(learner)),
      learner,
      self.blueprint.fingerprints,
      checkpoint.keep_latest,
      checkpoint.keep_best,
      say=self.said.append,
    )
    beginning = beginnings.begin(self.blueprint, device, records)
    self.hosts.append(beginning.host)
    plane = self._plane(1 + learner)
    exchange = Exchange(
      self.blueprint,
      learner,
      self.syncing.address,
      device,
      beginning.host,
      plane,
      beginning.start,
    )
    writer = JsonlWriter(self.workdir.metrics(f'learner-{learner}'))
    tape = LearnerTape(
      self.workdir.learner_tape(learner),
      exchange.process,
      describe(self.blueprint.config.mesh, {}),
    )
    training = Training(
      self.blueprint,
      learner,
      device,
      beginning,
      exchange,
      Outputs(records, writer, tape),
      NOTICE_S,
    )
    self._trainings.append(training)
    try:
      self.left.append(training.run())
    finally:
      exchange.close()
      writer.close()
      tape.close()
