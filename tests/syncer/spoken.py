# SPDX-License-Identifier: Apache-2.0
"""A real syncer in a thread, and learners of which a test says every word."""

import dataclasses
import itertools
import queue
import threading
import zlib

import grpc
import numpy as np

from diloco.config import run_config
from diloco.metrics.workdir import Workdir
from diloco.numerics import payload
from diloco.protocol import messages
from diloco.run.spec import make_run_spec
from diloco.syncer.server import SyncerServer
from diloco.transport import control_channel, wire
from diloco.transport.control_client import ControlClient
from diloco.transport.memory import MemoryNetwork, MemoryPlane
from experiments import tests_tiny

DEADLINE_S = 120.0
REPORT = messages.Report(
  step=1, tokens=8, rows=1, step_s=0.1, stall_s=0.0, loss=1.0, fetched=()
)


class Peer:
  """A learner of which the test says every word."""

  def __init__(self, stage: 'Stage', learner: int, incarnation: int = 1):
    self._stage = stage
    self._plane = MemoryPlane(stage.network)
    self._publisher = self._plane.publisher('syncer')
    self._handles = itertools.count(1)
    self._heard: queue.SimpleQueue = queue.SimpleQueue()
    self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    self._client = ControlClient(
      stage.syncing.address, self._heard.put, self._ended.put
    )
    self._client.connect(DEADLINE_S)
    self.hello = messages.Hello(
      protocol=messages.PROTOCOL_VERSION,
      run=stage.run_spec.config.name,
      learner=learner,
      incarnation=incarnation,
      fingerprints=stage.run_spec.fingerprints,
      versions=(0,) * stage.run_spec.config.protocol.fragments,
      crcs=stage.syncing._model.crcs(),
      began=False,
      addresses=(self._publisher.address,),
    )

  def say(self, *said):
    for message in said:
      self._client.send(message)

  def say_hello(self, **changes):
    self.say(dataclasses.replace(self.hello, **changes))

  def join(self) -> 'Peer':
    self.say_hello()
    self.hear(messages.Welcome)
    self.say(messages.Ready(0, 'the test'))
    return self

  def train(self, steps: int):
    for step in range(1, steps + 1):
      self.say(dataclasses.replace(REPORT, step=step, rows=step))

  def flood(self, reports: int, said: threading.Event):
    """Joins and reports as fast as the syncer reads.

    Not over `_client`, whose outbox is bounded.
    """
    self._client.close()
    bodies = itertools.chain(
      (self.hello, messages.Ready(0, 'the test')),
      (
        dataclasses.replace(REPORT, step=step, rows=step)
        for step in range(1, reports + 1)
      ),
    )
    try:
      with grpc.insecure_channel(self._stage.syncing.address) as channel:
        converse = channel.stream_stream(control_channel.METHOD)
        for _ in converse(map(wire.encode, bodies)):
          pass  # The welcome; the end, once everything was said.
    finally:
      said.set()

  def offer(self, round_: int, value: float, c_steps: int = 2):
    """Offers a delta to version 0 of which every number is `value`."""
    run_spec = self._stage.run_spec
    p = run_spec.config.protocol.fragment_of(round_)
    pieces = run_spec.layout.fragments[p]
    arrays = {x.name: np.full(x.shape, value, np.float32) for x in pieces}
    data = payload.encode(arrays, pieces, run_spec.up)
    handle = next(self._handles)
    self._publisher.offer(handle, data)
    found = messages.Payload(
      handle, run_spec.up.name, data.nbytes, zlib.crc32(data)
    )
    self.say(messages.Offer(round_, p, 0, c_steps, 16, c_steps, found))

  def hear(self, kind):
    """Returns the next message of this kind; passes over the others."""
    while True:
      message = self._heard.get(timeout=DEADLINE_S)
      if isinstance(message, kind):
        return message

  def heard(self) -> list:
    """Returns what has come so far and was not asked for."""
    return [self._heard.get() for _ in range(self._heard.qsize())]

  def end(self) -> str:
    """Waits until the syncer has ended the session; returns why."""
    return self._ended.get(timeout=DEADLINE_S)

  def close(self):
    self._client.close()
    self._plane.close()


class Stage:
  """A syncer, in a thread once it is started, and peers."""

  def __init__(self, run_spec, folder):
    self.run_spec = run_spec
    self.workdir = Workdir(folder)
    self.network = MemoryNetwork()
    self.plane = MemoryPlane(self.network)
    self.syncing = SyncerServer(
      run_spec, '127.0.0.1:0', self.plane, self.workdir
    )
    self._peers: list[Peer] = []
    self._errors: list[BaseException] = []
    self._thread = threading.Thread(target=self._run)

  def start(self):
    self._thread.start()

  def peer(self, learner: int, incarnation: int = 1) -> Peer:
    self._peers.append(Peer(self, learner, incarnation))
    return self._peers[-1]

  def close(self):
    """Raises what the syncer's thread raised."""
    self.syncing.stop()
    if self._thread.ident is not None:
      self._thread.join(DEADLINE_S)
    self.syncing.close()
    for peer in self._peers:
      peer.close()
    self.plane.close()
    if self._errors:
      raise self._errors[0]

  def steps_of(self, learner: int) -> int:
    """Returns how many steps of the learner the syncer has read of."""
    rows = self.syncing._stats.status(False).learners
    return next((row.step for row in rows if row.learner == learner), 0)

  def close_a_round(self):
    """Merges what learner 2 offers.

    Before that, any learner may end the run: the ledger may be lost.
    """
    good = self.peer(2).join()
    good.train(self.run_spec.config.protocol.spacing_steps)
    good.offer(1, 1e-3)
    good.hear(messages.Update)

  def assert_lives(self):
    """A new learner is welcome."""
    self.peer(15).join()

  def _run(self):
    try:
      self.syncing.run()
    except BaseException as error:  # noqa: BLE001 - raised by `close`.
      self._errors.append(error)


def small_run_spec(quorum: int = 1, learners: int = 2, **codec):
  config = tests_tiny.get_config()
  config.protocol.update(learners=learners, quorum=quorum, total_steps=1000)
  config.protocol.patience = 100.0  # The peers say nothing between two words.
  config.codec.update(codec)
  config.data.shards = max(config.data.shards, learners)
  return make_run_spec(run_config.build(config))
