# SPDX-License-Identifier: Apache-2.0
"""Ten thousand hostile messages through the real server: each is accepted or
refused by name, and an honest session beside them notices nothing.

The seed is another one at each run; where a test fails, its output names it.
"""

import collections
import contextlib
import os
import random
import secrets
import statistics
import threading

import grpc
import pytest

from diloco.protocol import messages
from diloco.protocol.syncer import events as syncer_events
from diloco.transport import control_channel, wire
from tests.siege import malice, small_syncer
from tests.siege.small_syncer import CONFIG, HONEST, GoodLearner, Judge

pytestmark = pytest.mark.beside

OVER_THE_WIRE = 2_000
BY_DECODE = 8000
ATTACKERS = 4  # Threads; each is a learner id of its own,
FIRST = 10  # from here on: none that a hostile hello draws.
MEDIAN_S = 5.0  # For an answer, on a machine that is busy with other things.


@pytest.fixture
def seed() -> int:
  drawn = int(os.environ.get('DILOCO_FUZZ_SEED', secrets.randbits(32)))
  print(f'DILOCO_FUZZ_SEED={drawn}')
  return drawn


def test_fuzz_of_the_real_server_and_the_machine(seed, record_property):
  """Every message is accepted or refused; no other peer is served worse."""
  bodies = list(malice.bodies(seed, OVER_THE_WIRE))
  with (
    contextlib.closing(small_syncer.SmallSyncer()) as syncer,
    contextlib.closing(GoodLearner(syncer.address)) as good,
  ):
    # Before the first merge any of them may end the run with a `HandedIn`.
    for _ in range(CONFIG.spacing_steps):
      good.step()
    assert len(syncer.judge.published) == 1
    attackers = [
      Attacker(syncer.address, FIRST + i, bodies[i::ATTACKERS], seed)
      for i in range(ATTACKERS)
    ]
    with small_syncer.stepping(good):
      for attacker in attackers:
        attacker.start()
      for attacker in attackers:
        attacker.join()
    beside = len(good.answers_s)
    tally, ended = syncer.server.heard(), syncer.server.ended()
    judge = syncer.judge
  sent = sum(attacker.sent for attacker in attackers)
  heard = tally.accepted - messages_of(good)
  assert sent == heard + sum(tally.refused.values()), (tally, seed)
  assert sum(tally.refused.values()) == ended['malformed'], (tally, ended)
  assert set(tally.refused) == set(wire.FLAWS) - {'too late'}, tally
  assert judge.refused[HONEST] == 0, 'the honest learner was refused'
  assert judge.refused.total() > 0, 'the machine refused nothing'
  assert len(judge.published) >= beside // CONFIG.spacing_steps
  assert statistics.median(good.answers_s) < MEDIAN_S
  figures = {
    'sent': sent,
    'accepted': heard,
    'refused': dict(tally.refused),
    'refused by the machine': judge.refused.total(),
    'answers beside': beside,
    'median answer, ms': 1e3 * statistics.median(good.answers_s),
    'slowest answer, ms': 1e3 * max(good.answers_s),
  }
  record_property('figures', figures)
  print(figures)


def messages_of(good: GoodLearner) -> int:
  """Counts Hello and Ready, each step's report and question, the offers."""
  steps = len(good.answers_s)
  return 2 + 2 * steps + steps // CONFIG.spacing_steps


class Attacker(threading.Thread):
  """Opens one session after another, each ended by its last message."""

  def __init__(self, address: str, learner: int, bodies, seed: int):
    super().__init__()
    self.sent = 0
    self._address = address
    self._learner = learner
    self._bodies = bodies
    self._rng = random.Random(seed + learner)

  def run(self):
    options = (
      ('grpc.max_send_message_length', -1),
      ('grpc.use_local_subchannel_pool', 1),
    )
    with grpc.insecure_channel(self._address, options) as channel:
      converse = channel.stream_stream(control_channel.METHOD)
      for incarnation, (_, body) in enumerate(self._bodies, start=1):
        # Without a hello, right after it, or as a learner that counts.
        honest = [
          wire.encode(small_syncer.hello(self._learner, incarnation)),
          wire.encode(messages.Ready(0, 'the test')),
        ][: self._rng.randrange(3)]
        self.sent += len(honest) + 1
        with contextlib.suppress(grpc.RpcError):
          for _ in converse(iter((*honest, body))):
            pass


def test_fuzz_of_the_codec_and_the_machine(seed):
  """Each of many more messages meets at most one refusal of the machine."""
  judge, fates = Judge(), collections.Counter()
  rng = random.Random(seed)
  now_s, incarnations = 0.0, dict.fromkeys(range(1, 5), 0)

  def hear(learner, incarnation, message):
    nonlocal now_s
    now_s += rng.choice((0.0, 1e-3, 0.1))
    judge.handle(syncer_events.Heard(learner, incarnation, message), now_s)

  def hear_step(step):
    for message in small_syncer.honest_step(step):
      hear(HONEST, 1, message)

  hear(HONEST, 1, small_syncer.hello(HONEST, 1))
  hear(HONEST, 1, messages.Ready(0, 'the test'))
  before = CONFIG.spacing_steps  # As in the other test.
  for step in range(1, before + 1):
    hear_step(step)
  assert len(judge.published) == 1
  said = [messages.Ready(0, 'the test')]  # To be replayed.
  for index, (kind, body) in enumerate(malice.bodies(seed + 1, BY_DECODE)):
    hear_step(before + index + 1)
    learner = rng.choice(sorted(incarnations))
    if rng.random() < 0.3:
      incarnations[learner] += 1
      hello = small_syncer.hello(learner, incarnations[learner])
      hear(learner, hello.incarnation, hello)
      hear(learner, hello.incarnation, messages.Ready(0, 'the test'))
    try:
      message = wire.decode(body, messages.FROM_LEARNER)
    except wire.MalformedMessage as malformed:
      fates[malformed.flaw] += 1
      continue
    said.append(message)
    if kind == 'extreme' and rng.random() < 0.3:
      message = rng.choice(said)
    refused = judge.refused.total()
    stale = rng.random() < 0.2
    hear(learner, incarnations[learner] - stale, message)
    refusals = judge.refused.total() - refused
    assert refusals in (0, 1), (index, message)
    fates['refused by the machine' if refusals else 'accepted'] += 1
  assert fates.total() == BY_DECODE
  # Of 5,000 bodies 94 to 141 are, by the seed.
  assert fates['accepted'] > 100, fates
  assert fates['refused by the machine'] > 100, fates
  assert judge.refused[HONEST] == 0
  versions = [p.version for p in judge.published if p.fragment == 0]
  assert versions == list(range(1, len(versions) + 1))
  assert len(judge.published) >= BY_DECODE // CONFIG.spacing_steps - 1
  print(dict(fates), len(judge.published), 'rounds closed')
