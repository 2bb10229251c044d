# SPDX-License-Identifier: Apache-2.0
"""Peers that break the protocol lose their session, and harm nobody else."""

import dataclasses
import itertools
import json
import math
import queue
import random
import statistics
import threading
import time
import zlib

import grpc
import numpy as np
import psutil
import pytest

from diloco import config as configs
from diloco.metrics.workdir import Workdir
from diloco.numerics import payload
from diloco.protocol import messages
from diloco.runtime import syncing as syncing_lib
from diloco.runtime.blueprint import make_blueprint
from diloco.runtime.syncing import Syncing
from diloco.transport import control_limits, wire
from diloco.transport.control_client import ControlClient
from diloco.transport.memory import MemoryNetwork, MemoryPlane
from experiments import tests_tiny
from tests.transport import malice

pytestmark = pytest.mark.alone

DEADLINE_S = 30.0
FLOOD = 25_000  # More than the inbox holds; 100,000 took 50 s, and passed.
GROWN_MAX = 64 << 20
CLOSE_S = 10.0  # Time-outs of about 3 s, on a machine that is busy.
REPORT = messages.Report(
  step=1, tokens=8, position=1, step_s=0.1, stall_s=0.0, loss=1.0, fetched=()
)


class Peer:
  """A learner of which the test says every word."""

  def __init__(self, stage: 'Stage', learner: int, incarnation: int = 1):
    self._stage = stage
    self._plane = MemoryPlane(stage.network)
    self._outlet = self._plane.outlet('syncer')
    self._handles = itertools.count(1)
    self._heard: queue.SimpleQueue = queue.SimpleQueue()
    self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    self._client = ControlClient(
      stage.syncing.address, self._heard.put, self._ended.put
    )
    self._client.connect(DEADLINE_S)
    self._hello = messages.Hello(
      protocol=messages.PROTOCOL_VERSION,
      run=stage.blueprint.config.name,
      learner=learner,
      incarnation=incarnation,
      fingerprints=stage.blueprint.fingerprints,
      versions=(0,) * stage.blueprint.config.protocol.fragments,
      crcs=stage.syncing._model.crcs(),
      began=False,
      addresses=(self._outlet.address,),
    )

  def say(self, *said):
    for message in said:
      self._client.send(message)

  def say_hello(self, **changes):
    self.say(dataclasses.replace(self._hello, **changes))

  def join(self) -> 'Peer':
    self.say_hello()
    self.hear(messages.Welcome)
    self.say(messages.Ready(0, 'the test'))
    return self

  def train(self, steps: int):
    for step in range(1, steps + 1):
      self.say(dataclasses.replace(REPORT, step=step, position=step))

  def flood(self, reports: int, said: threading.Event):
    """Joins and reports as fast as the syncer reads; not over `_client`, whose
    outbox is bounded."""
    self._client.close()
    bodies = itertools.chain(
      (self._hello, messages.Ready(0, 'the test')),
      (
        dataclasses.replace(REPORT, step=step, position=step)
        for step in range(1, reports + 1)
      ),
    )
    try:
      with grpc.insecure_channel(self._stage.syncing.address) as channel:
        converse = channel.stream_stream(control_limits.METHOD)
        for _ in converse(map(wire.encode, bodies)):
          pass  # The welcome; the end, once everything was said.
    finally:
      said.set()

  def offer(self, round_: int, value: float, c_steps: int = 2):
    """Offers a delta to version 0 of which every number is `value`."""
    blueprint = self._stage.blueprint
    p = blueprint.config.protocol.fragment_of(round_)
    pieces = blueprint.layout.fragments[p]
    arrays = {x.name: np.full(x.shape, value, np.float32) for x in pieces}
    data = payload.encode(arrays, pieces, blueprint.up)
    handle = next(self._handles)
    self._outlet.offer(handle, data)
    found = messages.Payload(
      handle, blueprint.up.name, data.nbytes, zlib.crc32(data)
    )
    self.say(messages.Offer(round_, p, 0, c_steps, 16, c_steps, found))

  def hear(self, kind):
    """The next message of this kind; passes over the others."""
    while True:
      message = self._heard.get(timeout=DEADLINE_S)
      if isinstance(message, kind):
        return message

  def end(self) -> str:
    """Waits until the syncer has ended the session; why it did."""
    return self._ended.get(timeout=DEADLINE_S)

  def close(self):
    self._client.close()
    self._plane.close()


class Stage:
  """A syncer, in a thread once it is started, and peers."""

  def __init__(self, blueprint, folder):
    self.blueprint = blueprint
    self.workdir = Workdir(folder)
    self.network = MemoryNetwork()
    self.plane = MemoryPlane(self.network)
    self.syncing = Syncing(blueprint, '127.0.0.1:0', self.plane, self.workdir)
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
    """How many the syncer has read of."""
    rows = self.syncing._board.status(False).learners
    return next(row.step for row in rows if row.learner == learner)

  def assert_lives(self):
    """Somebody new is welcome."""
    self.peer(15).join()

  def _run(self):
    try:
      self.syncing.run()
    except BaseException as error:  # noqa: BLE001 - raised by `close`.
      self._errors.append(error)


def _blueprint(quorum: int = 1, **codec):
  config = tests_tiny.get_config()
  config.protocol.update(learners=2, quorum=quorum, total_steps=1000)
  config.codec.update(codec)
  return make_blueprint(configs.build(config))


@pytest.fixture(scope='module')
def blueprint():
  return _blueprint()


@pytest.fixture
def stage(blueprint, tmp_path):
  stage = Stage(blueprint, tmp_path)
  stage.start()
  yield stage
  stage.close()


# Reports ---------------------------------------------------------------------


def test_a_diverged_loss_is_told_as_none(blueprint, tmp_path, monkeypatch):
  """NaN is no JSON: it must not end the syncer that writes the status."""
  written = queue.SimpleQueue()

  def write_status(path, status):
    write(path, status)
    written.put(status)

  write = syncing_lib.write_status
  monkeypatch.setattr(syncing_lib, 'write_status', write_status)
  stage = Stage(blueprint, tmp_path)
  stage.start()
  try:
    stage.peer(0).join().say(dataclasses.replace(REPORT, loss=math.nan))
    told = written.get(timeout=DEADLINE_S)
    while not (told.learners and told.learners[0].step):
      told = written.get(timeout=DEADLINE_S)
    found = json.loads(
      stage.workdir.status.read_text(), parse_constant=_no_constant
    )
    assert found['learners'][0]['loss'] is None
    stage.assert_lives()
  finally:
    stage.close()


def _no_constant(name: str):
  raise AssertionError(f'{name} is no JSON')


@pytest.mark.parametrize(
  'changes',
  [
    {'stall_s': 0.2, 'step_s': 0.1},
    {'tokens': -1},
    {'step': 3},
    {'step_s': -1.0, 'stall_s': -1.0},
    {'position': -1},
  ],
  ids=lambda changes: ','.join(changes),
)
def test_an_impossible_report_ends_the_session(stage, changes):
  peer = stage.peer(0).join()
  second = {'step': 2, 'position': 2, **changes}
  peer.say(REPORT, dataclasses.replace(REPORT, **second))
  assert 'impossible report' in peer.end()
  stage.assert_lives()


@pytest.mark.parametrize('seed', range(4))
def test_any_figures_harm_nobody(stage, seed):
  """Messages that the wire lets through, with the strangest values in them."""
  rng = random.Random(seed)
  good = stage.peer(0).join()
  for incarnation in range(1, 31):
    bad = stage.peer(1, incarnation)
    bad.say_hello()
    bad.say(messages.Ready(0, 'the test'), REPORT)
    for _ in range(10):
      bad.say(malice.extreme(rng.choice(messages.FROM_LEARNER[1:]), rng))
    bad.close()
  good.train(stage.blueprint.config.protocol.spacing_steps)
  good.offer(1, 1e-3)
  assert 0 in good.hear(messages.Update).participants
  status = json.dumps(
    dataclasses.asdict(stage.syncing._board.status(False)), allow_nan=False
  )
  told = json.loads(status)
  assert told['learners'][0]['state'] == 'live'
  assert told['refused'] > 0
  stage.assert_lives()


# Hellos ----------------------------------------------------------------------


def test_many_fingerprints_are_refused_in_short(stage):
  """Naming 20 000 keys would not fit the message that says so."""
  extra = {f'key-{i}': '0' for i in range(20_000)}
  peer = stage.peer(0)
  peer.say_hello(fingerprints={**stage.blueprint.fingerprints, **extra})
  refusal = peer.hear(messages.Refusal)
  assert refusal.final
  assert len(refusal.reason) <= 1100
  stage.assert_lives()


def test_a_long_run_name_is_refused_in_short(stage):
  peer = stage.peer(0)
  peer.say_hello(run='x' * 300_000)
  assert len(peer.hear(messages.Refusal).reason) <= 1100
  stage.assert_lives()


def test_a_session_can_not_be_taken_over(stage):
  """By a second one that says it were the first."""
  first = stage.peer(0).join()
  second = stage.peer(0)
  second.say_hello()
  assert 'another session' in second.hear(messages.Refusal).reason
  second.end()
  first.say(messages.WantFragment(0, 'still here'))
  assert first.hear(messages.FullFragment).fragment == 0
  stage.assert_lives()


def test_an_address_of_no_use_ends_the_session(stage):
  """What is said right after the hello meets a session that has no inlet."""
  peer = stage.peer(0)
  peer.say_hello(addresses=('nonsense',))
  peer.say(messages.Ready(0, 'the test'), REPORT)
  peer.offer(1, 1e-3)
  assert 'nonsense' in peer.end()
  stage.assert_lives()


@pytest.mark.parametrize('beyond', [0, 1000])
def test_an_id_without_a_shard_is_refused(stage, beyond):
  shards = stage.blueprint.config.data.shards
  peer = stage.peer(shards + beyond)
  peer.say_hello()
  refusal = peer.hear(messages.Refusal)
  assert refusal.final
  assert f'must be in 0 … {shards - 1}' in refusal.reason
  stage.assert_lives()


# Contributions ---------------------------------------------------------------


@pytest.mark.parametrize('codec', ['f32', 'int4'])
def test_huge_values_are_not_merged(codec, tmp_path):
  """3e38 is finite; the sum of two is not. The rounds of others close."""
  stage = Stage(_blueprint(up=codec), tmp_path)
  stage.start()
  try:
    good, bad = stage.peer(0).join(), stage.peer(1).join()
    spacing_steps = stage.blueprint.config.protocol.spacing_steps
    bad.train(spacing_steps)
    for attempt in range(1, 4):
      bad.offer(1, 3e38)
      if attempt < 3:
        assert 'Unusable: ' in bad.hear(messages.OfferAgain).reason
    assert '3 contributions refused, the last: Unusable: ' in bad.end()
    good.train(spacing_steps)
    good.offer(1, 1e-3)
    assert good.hear(messages.Update).participants == (0,)
    stage.assert_lives()
  finally:
    stage.close()


# Floods ----------------------------------------------------------------------


def test_a_flood_of_reports_delays_nobody(tmp_path):
  """All as they should be, but too many: another session is answered, and what
  is unread stays bounded. K = 2: one alone can't drive the run on."""
  stage = Stage(_blueprint(quorum=2), tmp_path)
  stage.start()
  inbox, said = stage.syncing._inbox, threading.Event()
  try:
    good, flooder = stage.peer(0).join(), stage.peer(1)
    rss_before = psutil.Process().memory_info().rss
    flooding = threading.Thread(target=flooder.flood, args=(FLOOD, said))
    flooding.start()
    answers_s, unread = [], 0
    while not said.wait(0.02):
      began_s = time.monotonic()
      good.say(messages.WantFragment(0, 'beside a flood'))
      good.hear(messages.FullFragment)
      answers_s.append(time.monotonic() - began_s)
      unread = max(unread, inbox.qsize())
    flooding.join()
    grown = psutil.Process().memory_info().rss - rss_before
    print(
      f'{len(answers_s)} answers, median {statistics.median(answers_s):.4f} s, '
      f'slowest {max(answers_s):.3f} s; {unread=}, {grown >> 20} MiB grown'
    )
    assert stage.steps_of(1) == FLOOD
    assert unread <= 2 * syncing_lib.SHARE_MAX
    assert statistics.median(answers_s) < 0.5
    assert grown < GROWN_MAX
    stage.assert_lives()
  finally:
    stage.close()


# The syncer's own end --------------------------------------------------------


def test_a_full_inbox_does_not_hold_up_the_end(
  blueprint, tmp_path, monkeypatch
):
  """The machine has left, or never ran; the sessions' threads put and put."""
  monkeypatch.setattr(syncing_lib, 'INBOX_MAX', 8)
  stage = Stage(blueprint, tmp_path)
  for learner in range(4):
    peer = stage.peer(learner)
    peer.say_hello()
    peer.train(200)
  inbox = stage.syncing._inbox
  with inbox.not_empty:  # Told at each put.
    assert inbox.not_empty.wait_for(
      lambda: inbox._qsize() == inbox.maxsize, DEADLINE_S
    )
  closing = threading.Thread(target=stage.syncing.close)
  closing.start()
  closing.join(CLOSE_S)
  in_time = not closing.is_alive()
  while closing.is_alive():  # Let them go, or the test would never end.
    inbox.queue.clear()
    with inbox.not_full:
      inbox.not_full.notify_all()
    closing.join(0.1)
  stage.close()
  assert in_time, f'still closing after {CLOSE_S} s'
