# SPDX-License-Identifier: Apache-2.0
"""The whole runtime in one process, over data planes that fail."""

import pathlib
import random
import threading

import pytest

from diloco import config as configs
from diloco.metrics.summary import read_summary
from diloco.metrics.workdir import Workdir
from diloco.metrics.writer import JsonlWriter, read_jsonl
from diloco.runtime.blueprint import make_blueprint
from diloco.runtime.device import Device
from diloco.runtime.exchange import Exchange
from diloco.runtime.host_copy import HostCopy
from diloco.runtime.syncing import Syncing
from diloco.runtime.training import Training
from diloco.transport.faulty import Faults, faulty
from diloco.transport.memory import MemoryNetwork, MemoryPlane
from experiments import tests_tiny

LEARNERS = 2
DEADLINE_S = 120.0


class _Run:
  """Syncer and learners as threads, on one memory network."""

  def __init__(self, folder: pathlib.Path, faults: Faults, **protocol):
    config = tests_tiny.get_config()
    config.protocol.update(
      learners=LEARNERS, quorum=1, total_steps=100, **protocol
    )
    config.transport.update(timeout_s=0.5)
    self.blueprint = make_blueprint(configs.build(config))
    self.workdir = Workdir(folder)
    self._network = MemoryNetwork()
    self._faults = faults
    self._planes = []
    self.syncing = Syncing(
      self.blueprint, '127.0.0.1:0', self._plane(0), self.workdir
    )
    self.hosts, self.left, self._errors = [], [], []
    self._trainings = []

  def _plane(self, seed: int):
    plane = faulty(
      MemoryPlane(self._network), self._faults, random.Random(seed)
    )
    self._planes.append(plane)
    return plane

  def finish(self):
    """Trains to the end; raises what any thread raised."""
    device = Device(self.blueprint)
    threads = [threading.Thread(target=self._guard(self.syncing.run))]
    for learner in range(LEARNERS):
      host = HostCopy(self.blueprint, self.blueprint.initial_fragments())
      self.hosts.append(host)
      threads.append(
        threading.Thread(target=self._guard(self._train, learner, device, host))
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

  def _train(self, learner: int, device: Device, host: HostCopy):
    plane = self._plane(1 + learner)
    exchange = Exchange(
      self.blueprint, learner, self.syncing.address, device, host, plane
    )
    writer = JsonlWriter(self.workdir.metrics(f'learner-{learner}'))
    training = Training(self.blueprint, learner, device, host, exchange, writer)
    self._trainings.append(training)
    try:
      self.left.append(training.run())
    finally:
      exchange.close()
      writer.close()


@pytest.fixture(scope='module')
def broken(tmp_path_factory):
  """A run in which a quarter of all pulls bring a flipped byte or nothing."""
  faults = Faults(corrupt=0.15, lost=0.1)
  run = _Run(tmp_path_factory.mktemp('broken'), faults)
  run.finish()
  return run


def test_the_run_ends_in_good_order_all_the_same(broken):
  assert [left.reason for left in broken.left] == ['run is over'] * LEARNERS


def test_every_learner_holds_the_final_bytes(broken):
  """Also after mismatches: these are mended by full fragments."""
  expected = broken.syncing._model.crcs()
  assert [host.crcs() for host in broken.hosts] == [expected] * LEARNERS


def test_refused_payloads_are_counted(broken):
  assert read_summary(broken.workdir.summary).refused > 0


def test_refused_payloads_are_named_on_the_tape(broken):
  reasons = ' '.join(
    line['reason']
    for line in read_jsonl(broken.workdir.tape)
    if line['kind'] == 'pull_failed'
  )
  assert 'Corrupt: ' in reasons
  assert 'PeerLost: ' in reasons


def test_rounds_close_with_the_rest(broken):
  assert read_summary(broken.workdir.summary).rounds > 5


def test_synchronous_diloco_in_the_real_runtime(tmp_path):
  """τ = 0, P = 1, K = M: each learner waits, and nobody waits for ever."""
  run = _Run(
    tmp_path, Faults(), overlap_steps=0, fragments=1, sync_every_steps=4
  )
  run.finish()
  merges = [m for m in read_jsonl(run.workdir.tape) if m['kind'] == 'Merge']
  assert len(merges) > 20
  assert {s['c_steps'] for m in merges[:20] for s in m['shares']} == {4}
