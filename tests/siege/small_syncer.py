# SPDX-License-Identifier: Apache-2.0
"""A syncer without arrays for the tests: the real server, the real machine."""

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Iterator

from diloco.protocol import messages
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.machine import Syncer
from diloco.transport import control_client, control_server, wire
from diloco.transport.control_channel import ControlLimits

RUN, PRINTS = 'run', {'config': 'c0ffee'}
CONFIG = ProtocolConfig(
  learners=2,
  fragments=2,
  sync_every_steps=4,
  overlap_steps=2,
  quorum=1,
  grace_safety=0.5,
  grace_cap_steps=0.0,
  admission='latest',
  max_staleness_versions=4,
  weighting='tokens',
  patience=100.0,
  total_steps=1_000_000_000,
  blend='replace',
)
IDS = 16
# Frozen with the machine, it is no session that never says hello.
PATIENT = ControlLimits(handshake_s=600.0)
HONEST = 9  # No attacker says that it were this one.
PAUSE_S = 0.005  # Between two steps of an honest learner.
WAIT_S = 60.0
PAYLOAD = messages.Payload(handle=1, codec='int4', nbytes=10, crc=1)


def hello(learner: int, incarnation: int) -> messages.Hello:
  """Returns a hello that the machine accepts."""
  return messages.Hello(
    protocol=messages.PROTOCOL_VERSION,
    run=RUN,
    learner=learner,
    incarnation=incarnation,
    fingerprints=PRINTS,
    versions=(0,) * CONFIG.fragments,
    crcs=(0,) * CONFIG.fragments,
    began=False,
    addresses=('memory://x/1',),
  )


def machine() -> Syncer:
  return Syncer(CONFIG, RUN, PRINTS)


def honest_step(step: int) -> Iterator[wire.Message]:
  """Yields what a learner that keeps the protocol says at one step."""
  yield messages.Report(step, 8, step, 0.1, 0.0, 1.0, ())
  if step % CONFIG.spacing_steps == 0:
    round_ = step // CONFIG.spacing_steps
    fragment = CONFIG.fragment_of(round_)
    base = (round_ - 1) // CONFIG.fragments
    yield messages.Offer(round_, fragment, base, 2, 16, step, PAYLOAD)


class Judge:
  """Feeds a machine, answers what it asks for, counts what it refused."""

  def __init__(self):
    self.machine = machine()
    self.refused: collections.Counter[int] = collections.Counter()  # By id.
    self.published: list[syncer_events.Publish] = []

  def handle(self, event: syncer_events.Event, now: float) -> list:
    """Returns what the machine wanted done and what came of it, in order."""
    wanted = []
    events = collections.deque([event])
    while events:
      for effect in self.machine.handle(events.popleft(), now):
        wanted.append(effect)
        match effect:
          case syncer_events.Pull():
            handle = effect.offer.payload.handle
            key = effect.round, effect.learner, effect.incarnation, handle
            # Per √step all alike, whatever number of steps is claimed.
            norm = max(effect.offer.c_steps, 1) ** 0.5
            events.append(syncer_events.Pulled(*key, norm))
          case syncer_events.Merge():
            events.append(syncer_events.Merged(effect.round))
          case syncer_events.Publish():
            self.published.append(effect)
          case syncer_events.LogDecision(kind='refused' | 'zombie'):
            self.refused[effect.learner] += 1
    return wanted


class SmallSyncer:
  """Listens, and lets the machine decide about whatever is accepted."""

  def __init__(self, **options):
    self.judge = Judge()
    self.strangers = 0  # Hellos that did not reach the machine.
    self._lock = threading.Lock()
    self._sessions: dict[tuple[int, int], control_server.ControlSession] = {}
    self._keys: dict[control_server.ControlSession, tuple[int, int]] = {}
    options.setdefault('limits', PATIENT)
    self.server = control_server.ControlServer(
      '127.0.0.1:0', self._on_message, self._on_closed, **options
    )
    self.address = self.server.address

  def close(self):
    self.server.close()

  def _on_message(self, session, message):
    with self._lock:
      if isinstance(message, messages.Hello):
        key = message.learner, message.incarnation
        if not 0 <= message.learner < IDS or key in self._sessions:
          self.strangers += 1
          session.close('not you')
          return
        self._keys[session], self._sessions[key] = key, session
      key = self._keys.get(session)
      if key is not None:
        self._handle(syncer_events.Heard(*key, message))

  def _on_closed(self, session, reason):
    with self._lock:
      key = self._keys.pop(session, None)
      if key is not None:
        del self._sessions[key]
        self._handle(syncer_events.Lost(*key, reason))

  def _handle(self, event):
    for effect in self.judge.handle(event, time.monotonic()):
      match effect:
        case syncer_events.EndSession():
          self._to(effect, lambda s, reason=effect.reason: s.close(reason))
        case syncer_events.Send():
          self._to(effect, lambda s, said=effect.message: s.send(said))
        case syncer_events.SendFull():
          said = messages.FullFragment(effect.fragment, 0, PAYLOAD, 0)
          self._to(effect, lambda s, said=said: s.send(said))

  def _to(self, effect, act):
    session = self._sessions.get((effect.learner, effect.incarnation))
    if session is not None:
      act(session)


class GoodLearner:
  """Keeps the protocol, asks and is answered; measures how long that takes."""

  def __init__(self, address: str, learner: int = HONEST, **options):
    self.answers_s: list[float] = []
    self._answers: queue.SimpleQueue = queue.SimpleQueue()
    self._steps = 0
    self._client = control_client.ControlClient(
      address, self._answers.put, self._answers.put, **options
    )
    self._client.connect(WAIT_S)
    self._client.send(hello(learner, 1))
    self._client.send(messages.Ready(0, 'the test'))

  def step(self):
    """Reports a step, offers, asks for a fragment and waits for the answer."""
    self._steps += 1
    for message in honest_step(self._steps):
      self._client.send(message)
    began_s = time.monotonic()
    received = len(self.answers_s)
    self._client.send(messages.WantFragment(0, 'to be answered', received))
    answer = None
    while not isinstance(answer, messages.FullFragment):
      answer = self._answers.get(timeout=WAIT_S)
      assert not isinstance(answer, str), f'the session ended: {answer}'
    self.answers_s.append(time.monotonic() - began_s)

  def close(self):
    self._client.close()


@contextlib.contextmanager
def stepping(learner: GoodLearner):
  """Steps all the time, on a thread; raises what went wrong there."""
  over, errors = threading.Event(), []

  def run():
    try:
      while not over.wait(PAUSE_S):
        learner.step()
    except BaseException as error:  # noqa: BLE001 - raised below.
      errors.append(error)

  thread = threading.Thread(target=run)
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join()
  if errors:
    raise errors[0]
