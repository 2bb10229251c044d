# SPDX-License-Identifier: Apache-2.0
"""Random events against the invariants of the design, seeds printed."""

import random

import pytest

from diloco.protocol import messages
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.learner.machine import Learner
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer import offers
from diloco.protocol.syncer.machine import Syncer
from diloco.simulator.cluster import Cluster, Timing
from diloco.simulator.contents import FINGERPRINTS, RUN
from diloco.simulator.invariants import Invariants, Violation
from diloco.simulator.scenario import WIDE_FROM, draw
from diloco.simulator.swarm import Swarm
from tests.protocol.derived import check_derived
from tests.protocol.stages import config_of

SEQUENCES = 400
SWARMS = 30  # Of each kind.
EVENTS = 80


def _draw_config(rng: random.Random):
  learners = rng.randint(1, 4)
  fragments = rng.choice((1, 2, 3))
  spacing = rng.choice((1, 2))
  every = fragments * spacing
  return config_of(
    {
      'learners': learners,
      'fragments': fragments,
      'sync_every_steps': every,
      'overlap_steps': rng.randrange(every),
      'quorum': rng.randint(1, learners),
      'admission': rng.choice(('latest', 'fresh')),
      'max_staleness_versions': rng.choice((0, 1, 3)),
      'total_steps': rng.choice((6, 1000)),
      'blend': rng.choice(('replace', 'rebase')),
    }
  )


class _Storm:
  """Draws events of any kind, most of them sensible, some of them not."""

  def __init__(self, rng: random.Random, config):
    self._rng = rng
    self._config = config
    self._incarnations: dict[int, int] = {}
    self._steps: dict[int, int] = {}
    self._handle = 0
    self._pulls: list[syncer_events.Pull] = []
    self._merging: list[int] = []
    self._taking: list[syncer_events.TakeFragment] = []

  def restart(self):
    """Restarts the syncer: what was under way there has died with it."""
    self._pulls.clear()
    self._merging.clear()
    self._taking.clear()

  def learn(self, effects):
    for effect in effects:
      match effect:
        case syncer_events.Pull():
          self._pulls.append(effect)
        case syncer_events.Merge():
          self._merging.append(effect.round)
        case syncer_events.TakeFragment():
          self._taking.append(effect)

  def draw(self, snapshot) -> syncer_events.Event:
    rng = self._rng
    if self._pulls and rng.random() < 0.4:
      pull = self._pulls.pop(rng.randrange(len(self._pulls)))
      handle = pull.offer.payload.handle
      session = pull.round, pull.learner, pull.incarnation, handle
      if rng.random() < 0.2:
        return syncer_events.PullFailed(*session, 'drawn', rng.random() < 0.3)
      return syncer_events.Pulled(*session, 10.0 ** rng.choice((0, 0, 0, 1, 2)))
    if self._merging and rng.random() < 0.5:
      return syncer_events.Merged(self._merging.pop(0))
    if self._taking and rng.random() < 0.5:
      take = self._taking.pop(0)
      session = take.offered.fragment, take.learner, take.incarnation
      if rng.random() < 0.3:
        return syncer_events.FragmentFailed(*session, 'drawn')
      return syncer_events.FragmentTaken(*session)
    learner = rng.randrange(self._config.learners)
    incarnation = self._incarnations.get(learner, 0)
    member = dict(snapshot.members).get(learner)
    if member is None or rng.random() < 0.01:
      return self._hello(learner, snapshot)
    if rng.random() < 0.02:
      return syncer_events.Lost(learner, incarnation, 'drawn')
    kinds = ('report', 'offer', 'other') if member.ready else ('ready', 'other')
    kind = rng.choices(kinds, (10, 12, 1) if member.ready else (4, 1))[0]
    if snapshot.lost and rng.random() < 0.3:
      kind = 'fragment'
    if rng.random() < 0.02:
      kind, incarnation = 'offer', incarnation - 1  # A zombie.
    return syncer_events.Heard(
      learner, incarnation, self._message(kind, learner, snapshot)
    )

  def _hello(self, learner, snapshot):
    self._incarnations[learner] = self._incarnations.get(learner, 0) + 1
    self._steps[learner] = 0
    hello = messages.Hello(
      messages.PROTOCOL_VERSION,
      RUN,
      learner,
      self._incarnations[learner],
      FINGERPRINTS if self._rng.random() < 0.95 else {},
      snapshot.versions,
      (0,) * len(snapshot.versions),
      began=self._rng.random() < 0.5,
      addresses=('address',),
    )
    return syncer_events.Heard(learner, self._incarnations[learner], hello)

  def _message(self, kind, learner, snapshot):
    rng, config = self._rng, self._config
    match kind:
      case 'ready':
        away = rng.randint(0, config.spacing_steps)
        return messages.Ready(away, 'the seed')
      case 'report':
        more = 1 if rng.random() < 0.99 else 2
        self._steps[learner] = self._steps.get(learner, 0) + more
        step = self._steps[learner] - 10 * (rng.random() < 0.01)
        return messages.Report(step, 100, max(step, 0), 1.0, 0.0, 1.0, ())
      case 'offer':
        ahead = rng.choice((1, 1, 1, 2)) if rng.random() < 0.99 else 0
        round_ = snapshot.closed_round + ahead
        p = config.fragment_of(max(round_, 1))
        base = max(0, snapshot.versions[p] - rng.choice((0, 0, 0, 1, 2)))
        steps = rng.choice((0, 1, 2, 4))
        return messages.Offer(
          round_,
          p if rng.random() < 0.995 else p + 1,
          base,
          steps,
          100 * steps,
          1,
          self._payload(),
        )
      case 'fragment':
        p = rng.randrange(config.fragments)
        version = max(0, snapshot.versions[p] - rng.choice((0, 0, 1)))
        return messages.FragmentOffered(p, version, self._payload(), 0)
      case _:
        p = rng.randrange(config.fragments + 1)
        return rng.choice(
          (
            messages.FragmentOffered(p, rng.randrange(3), self._payload(), 0),
            messages.NoFragment(p, 'drawn'),
            self._state_offered(),
            messages.HandedIn(rng.randint(0, 20)),
            messages.Leaving(),
            messages.WantState('drawn'),
            messages.WantFragment(rng.randrange(config.fragments + 1), 'drawn'),
            messages.Goodbye('drawn'),
          )
        )

  def _payload(self) -> messages.Payload:
    self._handle += 1
    return messages.Payload(self._handle, 'int4', 1, 0)

  def _state_offered(self) -> messages.StateOffered:
    to = self._rng.randrange(self._config.learners)
    count = self._config.fragments - (self._rng.random() < 0.1)
    return messages.StateOffered(
      to,
      self._incarnations.get(to, 0),
      (0,) * count,
      (0,) * count,
      1,
      (self._payload(),) * (count + 1),
      'address',
    )


def _storm(seed: int):
  rng = random.Random(seed)
  config = _draw_config(rng)
  machine = Syncer(config, RUN, FINGERPRINTS)
  invariants = Invariants(config)
  storm = _Storm(rng, config)
  now = 0.0
  for _ in range(EVENTS):
    last = now
    now += rng.choice((0.0, 0.1, 0.3, 6.0 if rng.random() < 0.05 else 0.2))
    deadline = machine.deadline()
    if deadline is not None and deadline <= now:
      now = max(deadline, last)
      event = syncer_events.Tick()
    else:
      event = storm.draw(machine.snapshot())
    effects = machine.handle(event, now)
    storm.learn(effects)
    snapshot = machine.snapshot()
    invariants.check(event, effects, snapshot)
    check_derived(machine)
    if rng.random() < 0.01 and not snapshot.lost:
      ledger = machine.ledger()
      held = tuple(max(0, v - rng.choice((0, 1))) for v in ledger.versions)
      crcs = (0,) * config.fragments
      machine = Syncer.resume(config, RUN, FINGERPRINTS, ledger, held, crcs)
      invariants.restarted(ledger)
      storm.restart()
    elif rng.random() < 0.1:
      machine = Syncer(config, RUN, FINGERPRINTS)
      machine._state.load(snapshot)
      assert machine.snapshot() == snapshot


def test_random_event_sequences_keep_the_invariants():
  for seed in range(SEQUENCES):
    try:
      _storm(seed)
    except (AssertionError, KeyError, TypeError) as error:
      raise AssertionError(
        f'FAILED seed={seed}; rerun: python -c "from tests.protocol import '
        f'test_protocol_random as t; t._storm({seed})"'
      ) from error
  print(f'seeds 0 to {SEQUENCES - 1}, {EVENTS} events each')


@pytest.mark.parametrize('first', [0, WIDE_FROM])
def test_what_is_kept_up_to_date_is_what_would_be_rebuilt(first):
  for seed in range(first, first + SWARMS):
    swarm = Swarm(draw(seed))
    swarm.observer.at_syncer = _checking(swarm.observer.at_syncer, seed)
    swarm.run()


def _checking(at_syncer, seed: int):
  def checked(syncer, event, effects):
    at_syncer(syncer, event, effects)
    try:
      check_derived(syncer.machine)
    except AssertionError as error:
      raise AssertionError(f'{seed=}, after {event}') from error

  return checked


def _finds(words, seeds=300) -> bool:
  """Returns whether some seed shows a violation in these words."""
  for seed in range(seeds):
    try:
      _storm(seed)
    except Violation as violation:
      if words in str(violation):
        return True
    except KeyError:
      continue  # It trips over itself before anything is wrong outside.
  return False


def test_a_merge_from_the_dead_would_be_caught(monkeypatch):
  monkeypatch.setattr(offers, 'leave_out', lambda *_: None)
  assert _finds('incarnation ended')


def test_a_learner_machine_can_be_restored():
  cluster = Cluster(config_of({}), Timing({0: 1.0, 1: 1.0}), seed=0)
  cluster.start(0)
  cluster.start(1)
  cluster.run(7.3)
  machine = cluster.learners[0].machine
  start = Start.from_seed(cluster.contents.first_crcs)
  twin = Learner(cluster.config, RUN, 0, FINGERPRINTS, start)
  twin._core.state = machine.snapshot()
  event = learner_events.Boundary(100)
  assert twin.handle(event, 9.0) == machine.handle(event, 9.0)
  assert twin.snapshot() == machine.snapshot()
