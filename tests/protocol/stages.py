# SPDX-License-Identifier: Apache-2.0
"""Stages perform a transcript's commands: one stage per kind of subject.

Handles of offers are numbered from 1; a learner's tokens are 100 per step.
"""

from diloco.protocol import messages
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.learner.machine import Learner
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.machine import Syncer
from diloco.protocol.syncer.state import Stage
from diloco.simulator.contents import FINGERPRINTS, RUN, crc_of
from tests.protocol import reading
from tests.protocol.cluster_stage import DEFAULTS, ClusterStage, config_of  # noqa: F401 - for the tests.

TOKENS_PER_STEP = 100
KEEPS = (
  syncer_events.Publish | syncer_events.KeepLedger
)  # Written with the ledger.


class SyncerStage:
  """One syncer machine; the author of the transcript plays the learners."""

  def __init__(self, away=(), **options):
    self._config = config_of(options)
    self.machine = Syncer(self._config, RUN, FINGERPRINTS, away)
    self._now = 0.0
    self._handle = 0
    self._ledger = None  # Of the last close.
    self._steps: dict[int, int] = {}
    self._incarnations: dict[int, int] = {}
    self._pulls: dict[tuple[int, int], int] = {}  # The newest handle.

  def say(self, command: str, options: dict) -> list[str]:
    """Performs one command; what the machine wants, in lines."""
    self._now = options.pop('at', self._now)
    learners = [options['learner']] if 'learner' in options else []
    learners = options.pop('learners', learners)
    options.pop('learner', None)
    lines = []
    for learner in learners or [None]:
      for event in getattr(self, f'_{command}')(learner, **options):
        effects = self.machine.handle(event, self._now)
        if any(isinstance(e, KEEPS) for e in effects):
          self._ledger = self.machine.ledger()
        for effect in effects:
          if isinstance(effect, syncer_events.Pull):
            pulled = effect.round, effect.learner
            self._pulls[pulled] = effect.offer.payload.handle
        lines += [reading.of_syncer(effect) for effect in effects]
    return lines

  def status(self) -> list[str]:
    snapshot = self.machine.snapshot()
    clocks = ' '.join(f'{m}:{clock}' for m, clock in snapshot.clocks)
    lines = [
      f'step {snapshot.step}, round {snapshot.closed_round} closed, '
      f'versions {snapshot.versions}, clocks {clocks or "none"}'
    ]
    for r in snapshot.open_rounds:
      grace = r.stage is Stage.GRACE
      closes = f', closes at {r.closes_at_s:.2f}' if grace else ''
      lines.append(f'round {r.number} is {r.stage.value}{closes}')
    return lines

  def _join(self, learner, **fingerprints):
    """Hello and, unless it is refused, ready."""
    incarnation = self._incarnations.get(learner, 0) + 1
    self._incarnations[learner] = incarnation
    yield from self._hello(learner, incarnation, **fingerprints)
    if not fingerprints:
      yield from self._ready(learner)

  def _hello(
    self,
    learner,
    incarnation,
    versions=None,
    other=(),
    began=False,
    partition='',
    **fingerprints,
  ):
    """A new session. `other`: fragments of which it has other bytes."""
    self._steps.setdefault(learner, 0)
    versions = versions or (0,) * self._config.fragments
    crcs = [crc_of(p, v) + (p in other) for p, v in enumerate(versions)]
    hello = messages.Hello(
      messages.PROTOCOL_VERSION,
      RUN,
      learner,
      incarnation,
      {**FINGERPRINTS, **fingerprints},
      versions,
      tuple(crcs),
      began,
      addresses=('address',),
      partition=partition,
    )
    yield self._heard(learner, hello, incarnation)

  def _ready(self, learner, steps_away=0, source='the seed'):
    yield self._heard(learner, messages.Ready(steps_away, source))

  def _come(self, learner, **more):
    """A hello of the incarnation after the last."""
    incarnation = self._incarnations.get(learner, 0) + 1
    self._incarnations[learner] = incarnation
    yield from self._hello(learner, incarnation, **more)

  def _want_state(self, learner, reason='joins'):
    yield self._heard(learner, messages.WantState(reason))

  def _offer_state(self, learner, to, step=10, partition=''):
    versions = self.machine.snapshot().versions
    offered = messages.StateOffered(
      to,
      self._incarnations[to],
      versions,
      tuple(crc_of(p, v) for p, v in enumerate(versions)),
      step,
      tuple(messages.Payload(p, 'f32', 1, 0) for p in range(len(versions) + 1)),
      'address',
      partition=partition,
    )
    yield self._heard(learner, offered)

  def _state_taken(self, learner):
    yield self._heard(learner, messages.StateTaken())

  def _leave(self, learner):
    yield self._heard(learner, messages.Leaving())

  def _goodbye(self, learner, reason='stopped'):
    yield self._heard(learner, messages.Goodbye(reason))

  def _step(self, learner, count=1, step_s=1.0, fetched=()):
    """Reports; of what is fetched (p, version, fetch_s, held_s) is said."""
    named = tuple(messages.Fetched(0, *each) for each in fetched)
    for _ in range(count):
      self._steps[learner] += 1
      step = self._steps[learner]
      report = messages.Report(
        step, TOKENS_PER_STEP, step, step_s, 0.0, 1.0, named
      )
      yield self._heard(learner, report)

  def _offer(self, learner, round, steps=2, base=0, incarnation=None):
    self._handle += 1
    offer = messages.Offer(
      round=round,
      fragment=self._config.fragment_of(round),
      base_version=base,
      c_steps=steps,
      c_tokens=steps * TOKENS_PER_STEP,
      step=self._steps[learner],
      payload=messages.Payload(self._handle, 'int4', 1, 0),
    )
    yield self._heard(learner, offer, incarnation)

  def _pulled(self, learner, round, norm=1.0, handle=None):
    """The newest pull ends; that of an older offer where `handle` says so."""
    pull = self._pull(learner, round, handle)
    yield syncer_events.Pulled(*pull, norm)

  def _fail(self, learner, round, unusable=False, handle=None):
    reason = 'not finite' if unusable else 'timed out'
    pull = self._pull(learner, round, handle)
    yield syncer_events.PullFailed(*pull, reason, unusable)

  def _pull(self, learner, round, handle):
    handle = handle or self._pulls.get((round, learner), 0)
    return round, learner, self._incarnations[learner], handle

  def _restart(self, _, held=None):
    """A new process, with the ledger and a checkpoint of these versions."""
    ledger = self._ledger
    crcs = tuple(crc_of(p, v) for p, v in enumerate(ledger.versions))
    held = held or ledger.versions
    self.machine = Syncer.resume(
      self._config, RUN, FINGERPRINTS, ledger, held, crcs
    )
    return ()

  def _start_anew(self, _):
    """A new process that finds nothing on its disk."""
    self.machine = Syncer(self._config, RUN, FINGERPRINTS)
    return ()

  def _offer_fragment(self, learner, fragment, version):
    self._handle += 1
    payload = messages.Payload(self._handle, 'f32', 1, 0)
    offered = messages.FragmentOffered(
      fragment, version, payload, crc_of(fragment, version)
    )
    yield self._heard(learner, offered)

  def _no_fragment(self, learner, fragment):
    yield self._heard(learner, messages.NoFragment(fragment, 'host 1: closed'))

  def _hold(self, learner, fragment, version):
    crc = crc_of(fragment, version)
    held = messages.FragmentHeld(fragment, version, crc)
    yield self._heard(learner, held)

  def _taken(self, learner, fragment):
    incarnation = self._incarnations[learner]
    yield syncer_events.FragmentTaken(fragment, learner, incarnation)

  def _take_fails(self, learner, fragment):
    session = learner, self._incarnations[learner]
    yield syncer_events.FragmentFailed(fragment, *session, 'timed out')

  def _merged(self, _, round):
    yield syncer_events.Merged(round)

  def _absent(self, _, fragments):
    yield syncer_events.ShardLost(fragments, 'shard 1 is away')

  def _back(self, _, fragments, versions):
    """Yields these versions with the CRCs of a run that lost nothing."""
    run = self.machine.snapshot().versions
    yield syncer_events.ShardReturned(
      tuple(
        syncer_events.Held(p, version, crc_of(p, run[p]))
        for p, version in zip(fragments, versions)
      )
    )

  def _want(self, learner, fragment):
    yield self._heard(learner, messages.WantFragment(fragment, 'wrong CRC'))

  def _hand_in(self, learner, last_round=None):
    last_round = last_round or self.machine.snapshot().last_round
    yield self._heard(learner, messages.HandedIn(last_round))

  def _alive(self, learner):
    yield self._heard(learner, messages.Alive())

  def _lose(self, learner):
    incarnation = self._incarnations[learner]
    yield syncer_events.Lost(learner, incarnation, 'stream closed')

  def _tick(self, _):
    yield syncer_events.Tick()

  def _wait(self, _, until):
    """Time passes; the machine is woken up when it wants to be."""
    while self.machine.deadline() <= until:
      self._now = max(self._now, self.machine.deadline())
      yield syncer_events.Tick()
    self._now = until

  def _heard(self, learner, message, incarnation=None):
    incarnation = incarnation or self._incarnations[learner]
    return syncer_events.Heard(learner, incarnation, message)


class LearnerStage:
  """One learner machine, id 0; the author plays the syncer."""

  def __init__(
    self,
    saved_at=None,
    saved_versions=(),
    bootstrap='peer',
    empty=False,
    **options,
  ):
    self._config = config_of(options)
    start = self._start(saved_at, saved_versions)
    if empty:
      start = Start.empty(self._config.fragments)
    self.machine = Learner(self._config, RUN, 0, FINGERPRINTS, start, bootstrap)
    self._now = 0.0
    self._handle = 0
    self._incarnation = 0

  def say(self, command: str, options: dict) -> list[str]:
    """Performs one command; what the machine wants, in lines."""
    self._now = options.pop('at', self._now)
    lines = []
    for event in getattr(self, f'_{command}')(**options):
      effects = self.machine.handle(event, self._now)
      lines += [reading.of_learner(effect) for effect in effects]
    if self.machine.waiting:
      lines.append('wait for the update')
    return lines

  def status(self) -> list[str]:
    state = self.machine.snapshot()
    bases = tuple(f.base for f in state.fragments)
    return [
      f'own step {state.step}, global step {state.global_step}, '
      f'θ from versions {bases}, offer_ahead_steps {state.offer_ahead_steps}'
    ]

  def _start(self, saved_at: int | None, versions: tuple[int, ...]) -> Start:
    """Starts from the seed, or from the own checkpoint of step `saved_at`."""
    fragments = range(self._config.fragments)
    if saved_at is None:
      return Start.from_seed(tuple(crc_of(p, 0) for p in fragments))
    return Start(
      source=f'its checkpoint of step {saved_at}',
      crcs=tuple(crc_of(p, versions[p]) for p in fragments),
      versions=versions,
      from_steps=(saved_at,) * len(versions),
      from_tokens=(saved_at * TOKENS_PER_STEP,) * len(versions),
      step=saved_at,
      tokens=saved_at * TOKENS_PER_STEP,
      rows=saved_at,
    )

  def _connect(self):
    self._incarnation += 1
    yield learner_events.Connected(self._incarnation, ('address',))

  def _disconnect(self):
    yield learner_events.Disconnected('stream closed')

  def _welcome(
    self, step=0, closed=0, versions=None, rows=0, live=(), clean=False
  ):
    versions = versions or self._config.versions_at(closed)
    crcs = tuple(crc_of(p, v) for p, v in enumerate(versions))
    yield self._heard(
      messages.Welcome(
        step, closed, versions, crcs, rows, live, clean, ('syncer',)
      )
    )

  def _step(self, count=1):
    for rows in range(count):
      yield learner_events.Boundary(TOKENS_PER_STEP)
      yield learner_events.Completed(TOKENS_PER_STEP, rows, 1.0, 0.0, 1.0)

  def _update(
    self, round, step=None, merged=True, age=0.1, handle=1, reported=0
  ):
    self._handle += 1
    p = self._config.fragment_of(round)
    version = self._config.versions_at(round)[p]
    step = round * self._config.spacing_steps if step is None else step
    yield self._heard(
      messages.Update(
        round=round,
        fragment=p,
        version=version,
        step=step,
        reported_step=reported,
        participants=(0,) if merged else (1,),
        weights=(1.0,),
        incarnations=(self._incarnation,),
        handles=(handle,),
        ages_steps=(age,),
        payload=messages.Payload(self._handle, 'int4', 1, 0),
        crc=crc_of(p, version),
      )
    )

  def _full(self, fragment, version, crc=None, merged=0):
    self._handle += 1
    payload = messages.Payload(self._handle, 'f32', 1, 0)
    crc = crc or crc_of(fragment, version)
    merged = (self._incarnation, merged) if merged else (0, 0)
    yield self._heard(
      messages.FullFragment(fragment, version, payload, crc, *merged)
    )

  def _rebuilt(self, fragment, version, crc=None):
    crc = crc or crc_of(fragment, version)
    yield learner_events.Rebuilt(fragment, version, crc)

  def _fail(self, fragment, version):
    yield learner_events.FetchFailed(fragment, version, 'CRC 5, announced 7')

  def _state_at(self, donor, versions, step=10):
    yield self._heard(
      messages.StateAt(donor, 1, self._state_offered(versions, step))
    )

  def _state_offered(self, versions, step):
    return messages.StateOffered(
      0,
      self._incarnation,
      versions,
      tuple(crc_of(p, v) for p, v in enumerate(versions)),
      step,
      tuple(messages.Payload(p, 'f32', 1, 0) for p in range(len(versions) + 1)),
      'address',
    )

  def _state_fetched(self, donor, versions, step=10, stored=False):
    offered = self._state_offered(versions, step)
    yield learner_events.StateFetched(offered, donor, stored)

  def _nothing_stored(self):
    yield learner_events.NothingStored('no peer has saved one')

  def _state_fails(self, donor, versions, step=10):
    state = messages.StateAt(donor, 1, self._state_offered(versions, step))
    yield learner_events.StateFailed(state, 'timed out')

  def _drawn(self, other=()):
    """`other`: fragments whose drawn bytes are not the syncer's."""
    fragments = range(self._config.fragments)
    crcs = tuple(crc_of(p, 0) + (p in other) for p in fragments)
    yield learner_events.Drawn(crcs)

  def _no_state(self):
    yield self._heard(messages.NoState('no live peer is left'))

  def _donate(self, to, versions):
    yield self._heard(messages.Donate(to, 1, versions))

  def _donation_over(self, to):
    yield self._heard(messages.DonationOver(to, 1))

  def _donate_fragment(self, fragment, version):
    yield self._heard(messages.DonateFragment(fragment, version))

  def _quarantine(self):
    yield self._heard(messages.Quarantine('3 contributions refused'))

  def _stop(self, notice):
    yield learner_events.Stop(notice)

  def _again(self, round):
    yield self._heard(messages.OfferAgain(round, 'timed out'))

  def _retired(self, handles, pulled=False):
    yield self._heard(messages.Retired(handles, pulled))

  def _not_offered(self, fragment, handle):
    yield learner_events.OfferDropped(fragment, handle)

  def _finish(self, last_round):
    yield self._heard(messages.Finish(0, last_round))

  def _done(self):
    yield self._heard(messages.Done(0, 0))

  def _refuse(self):
    yield self._heard(messages.Refusal('another layout', final=True))

  def _tick(self):
    yield learner_events.Tick()

  def _heard(self, message):
    return learner_events.Heard(message)


STAGES = {
  'syncer': SyncerStage,
  'learner': LearnerStage,
  'cluster': ClusterStage,
}
