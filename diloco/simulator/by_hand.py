# SPDX-License-Identifier: Apache-2.0
"""The machines of a run, talked to by hand under a clock that one moves.

`Cluster` runs the same machines by itself. Here each effect comes back to the
caller, who does it, later or never; what a driver would do is one call.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable

from diloco.protocol import messages
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.learner.machine import Learner
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.machine import Syncer
from diloco.protocol.syncer.state import Round
from diloco.simulator.contents import FINGERPRINTS, RUN, Backend, crc_after

SYNCER = -1  # In place of a learner id.
ADDRESSES = ('here',)
TOKENS = 1024  # Of an inner step, unless given.


@dataclasses.dataclass(frozen=True)
class Wanted:
  """An effect that waits for `ByHand.do`."""

  who: int  # Whose machine wants it: a learner id, or SYNCER.
  effect: syncer_events.Effect | learner_events.Effect


@dataclasses.dataclass(frozen=True)
class Moment:
  """An event that a machine took."""

  at_s: float
  who: int  # Whose machine: a learner id, or SYNCER.
  event: syncer_events.Event | learner_events.Event
  effects: tuple[syncer_events.Effect | learner_events.Effect, ...]
  open_rounds: tuple[Round, ...]  # Of the syncer, afterwards.


class ByHand:
  """A syncer's machine and its learners: events by hand, a manual clock.

  A learner is either a machine (`join`), or played: `says` is all that the
  syncer hears of it. Messages pass at once. All that takes time is returned as
  `Wanted`: pulls, merges, copies of fragments; `do` answers as a driver would.

  Args:
    config: of the protocol.
    tokens: of an inner step.

  Attributes:
    syncer: the syncer's machine.
    learners: the machines of learners, by id.
    now: seconds.
    history: all events, in order.
  """

  def __init__(self, config: ProtocolConfig, tokens: int = TOKENS):
    self.config = config
    self.tokens = tokens
    self.syncer = Syncer(config, RUN, FINGERPRINTS)
    self.learners: dict[int, Learner] = {}
    self.now = 0.0
    self.history: list[Moment] = []
    self.crcs = list(Backend(config.fragments).first_crcs)
    self._incarnations: collections.Counter[int] = collections.Counter()
    self._steps: collections.Counter[int] = collections.Counter()
    self._handles = itertools.count(1)
    self._coming: collections.deque = collections.deque()  # (who, event).

  # Events -------------------------------------------------------------------

  def tell(
    self,
    event: syncer_events.Event | learner_events.Event,
    at_s: float | None = None,
    who: int = SYNCER,
  ) -> list[Wanted]:
    """Hands a machine an event; returns what is wanted then, in order.

    Args:
      at_s: when, in seconds; the deadlines before it come first. None: now.
      who: whose machine takes it: the syncer's, or a learner's by id.

    Raises:
      ValueError: the clock would go back, or there is no such machine.
    """
    if who != SYNCER and who not in self.learners:
      raise ValueError(
        f'who={who}: has no machine, those here are of learners '
        f'{sorted(self.learners)}; join({who}) makes one'
      )
    wanted = [] if at_s is None else self.wait(at_s)
    self._coming.append((who, event))
    return wanted + self._pass_all()

  def wait(self, until_s: float) -> list[Wanted]:
    """Moves the clock; wakes each machine at its deadlines on the way."""
    if until_s < self.now:
      raise ValueError(f'at {until_s} s: the clock is at {self.now} s already')
    wanted = []
    while (due := self._next_deadline()) is not None and due[0] < until_s:
      self.now, who = max(due[0], self.now), due[1]
      tick = syncer_events if who == SYNCER else learner_events
      self._coming.append((who, tick.Tick()))
      wanted += self._pass_all()
    self.now = until_s
    return wanted

  def _next_deadline(self) -> tuple[float, int] | None:
    machines = {SYNCER: self.syncer, **self.learners}
    times = ((x.deadline(), who) for who, x in machines.items())
    return min(((at, who) for at, who in times if at is not None), default=None)

  # Learners that are played -------------------------------------------------

  def says(
    self, learner: int, message, at_s: float | None = None
  ) -> list[Wanted]:
    """Tells the syncer a message of a learner, in its present session."""
    session = learner, self._incarnations[learner]
    return self.tell(syncer_events.Heard(*session, message), at_s)

  def hello(self, learner: int, at_s: float | None = None) -> list[Wanted]:
    """Opens a session of a new process of a learner that is played."""
    self._incarnations[learner] += 1
    self._steps[learner] = 0
    hello = messages.Hello(
      protocol=messages.PROTOCOL_VERSION,
      run=RUN,
      learner=learner,
      incarnation=self._incarnations[learner],
      fingerprints=FINGERPRINTS,
      versions=self.syncer.snapshot().versions,
      crcs=tuple(self.crcs),
      began=False,
      addresses=ADDRESSES,
    )
    return self.says(learner, hello, at_s)

  def report(
    self, learner: int, at_s: float | None = None, step_s: float = 1.0
  ) -> list[Wanted]:
    """Says that a played learner has made one more inner step."""
    self._steps[learner] += 1
    step = self._steps[learner]
    report = messages.Report(
      step=step,
      tokens=self.tokens,
      rows=step,
      step_s=step_s,
      stall_s=0.0,
      loss=1.0,
      fetched=(),
    )
    return self.says(learner, report, at_s)

  def offer(
    self,
    learner: int,
    round_: int,
    steps: int,
    base: int = 0,
    at_s: float | None = None,
  ) -> list[Wanted]:
    """Offers what a played learner learned in so many steps since a version."""
    payload = messages.Payload(next(self._handles), 'int4', nbytes=1, crc=0)
    offer = messages.Offer(
      round=round_,
      fragment=self.config.fragment_of(round_),
      base_version=base,
      c_steps=steps,
      c_tokens=steps * self.tokens,
      step=self._steps[learner],
      payload=payload,
    )
    return self.says(learner, offer, at_s)

  def lose(
    self, learner: int, reason: str = 'stream closed', at_s: float | None = None
  ) -> list[Wanted]:
    """Breaks a learner's stream, as its death does; its machine is gone."""
    wanted = [] if at_s is None else self.wait(at_s)
    self.learners.pop(learner, None)
    session = learner, self._incarnations[learner]
    return wanted + self.tell(syncer_events.Lost(*session, reason))

  # Learners with machines ---------------------------------------------------

  def join(self, learner: int, at_s: float | None = None) -> list[Wanted]:
    """Starts a machine for a learner that holds nothing, and connects it."""
    wanted = [] if at_s is None else self.wait(at_s)
    self._incarnations[learner] += 1
    start = Start.empty(self.config.fragments)
    self.learners[learner] = Learner(
      self.config, RUN, learner, FINGERPRINTS, start
    )
    connected = learner_events.Connected(self._incarnations[learner], ADDRESSES)
    return wanted + self.tell(connected, who=learner)

  def step(
    self, learner: int, at_s: float | None = None, step_s: float = 1.0
  ) -> list[Wanted]:
    """Makes an inner step of a learner's machine: boundary and completion."""
    wanted = self.tell(learner_events.Boundary(self.tokens), at_s, learner)
    self._steps[learner] += 1
    done = learner_events.Completed(
      self.tokens, self._steps[learner], step_s, stall_s=0.0, loss=1.0
    )
    return wanted + self.tell(done, who=learner)

  # Effects ------------------------------------------------------------------

  def do(self, wanted: Wanted | Iterable[Wanted]) -> list[Wanted]:
    """Does what is wanted as a driver would; returns what is wanted then.

    Bytes arrive, merges succeed, and what only a driver knows is not done.
    """
    if not isinstance(wanted, Wanted):
      return [each for one in wanted for each in self.do(one)]
    who, effect = wanted.who, wanted.effect
    match effect:
      case syncer_events.Pull(round=n, learner=m, incarnation=i, offer=offer):
        handle = offer.payload.handle
        return self.tell(syncer_events.Pulled(n, m, i, handle, norm=1.0))
      case syncer_events.Merge(fragment=p, version=version):
        self.crcs[p] = crc_after(self.crcs[p], version)
        return self.tell(syncer_events.Merged(effect.round))
      case learner_events.Draw():
        first = Backend(self.config.fragments).first_crcs
        return self.tell(learner_events.Drawn(first), who=who)
      case learner_events.Snapshot():
        payload = messages.Payload(effect.handle, 'int4', nbytes=1, crc=0)
        return self.says(who, effect.offer(payload))
      case learner_events.HandIn():
        return self.says(who, messages.HandedIn(effect.last_round))
      case learner_events.SayLeaving():
        return self.says(who, messages.Leaving())
      case learner_events.FetchUpdates():
        return self._rebuilt(who, effect.updates[-1])
      case learner_events.FetchFragment():
        return self._rebuilt(who, effect.message)
      case learner_events.DonateState():
        return self.says(who, self._donated(who, effect))
      case learner_events.FetchState(state=state):
        fetched = learner_events.StateFetched(state.offered, state.donor)
        return self.tell(fetched, who=who)
      case learner_events.ReadStored():
        nothing = learner_events.NothingStored('nothing is stored')
        return self.tell(nothing, who=who)
    return []

  def do_all(self, wanted: Iterable[Wanted]) -> None:
    """Does what is wanted, and what is wanted then, until nothing is."""
    wanted = list(wanted)
    while wanted:
      wanted = self.do(wanted)

  def _rebuilt(self, who: int, message) -> list[Wanted]:
    rebuilt = message.fragment, message.version, message.crc
    return self.tell(learner_events.Rebuilt(*rebuilt), who=who)

  def _donated(
    self, who: int, effect: learner_events.DonateState
  ) -> messages.StateOffered:
    held = self.learners[who].snapshot().fragments
    return messages.StateOffered(
      learner=effect.learner,
      incarnation=effect.incarnation,
      versions=tuple(f.host for f in held),
      crcs=tuple(f.crc for f in held),
      step=effect.step,
      payloads=tuple(self._payload() for _ in held),
      address=ADDRESSES[0],
    )

  def _payload(self) -> messages.Payload:
    return messages.Payload(next(self._handles), 'f32', nbytes=1, crc=0)

  # Messages -----------------------------------------------------------------

  def _pass_all(self) -> list[Wanted]:
    """Has the machines take what is coming; messages are passed on."""
    wanted = []
    while self._coming:
      who, event = self._coming.popleft()
      machine = self.syncer if who == SYNCER else self.learners.get(who)
      if machine is None:
        continue  # It is gone.
      effects = machine.handle(event, self.now)
      rounds = self.syncer.snapshot().open_rounds
      moment = Moment(self.now, who, event, tuple(effects), rounds)
      self.history.append(moment)
      for effect in effects:
        passed = [*self._messages(who, effect)]
        self._coming += passed
        if not passed:
          wanted.append(Wanted(who, effect))
    return wanted

  def _messages(self, who: int, effect) -> Iterable[tuple[int, object]]:
    """Yields what an effect has other machines hear: (who, event)."""
    heard = learner_events.Heard
    match effect:
      case learner_events.Send(message=message):
        session = who, self._incarnations[who]
        yield SYNCER, syncer_events.Heard(*session, message)
      case syncer_events.Send(learner=m) if m in self.learners:
        yield m, heard(effect.message)
      case syncer_events.AdmitLearner(learner=m) if m in self.learners:
        yield m, heard(self._welcome(effect))
      case syncer_events.EndSession(learner=m) if m in self.learners:
        yield m, learner_events.Disconnected(effect.reason)
      case syncer_events.SendFull(learner=m, fragment=p) if m in self.learners:
        version = self.syncer.snapshot().versions[p]
        full = p, version, self._payload(), self.crcs[p], *effect.merged
        yield m, heard(messages.FullFragment(*full))
      case syncer_events.Publish(fragment=p):
        for recipient in effect.recipients:
          if recipient[0] in self.learners:
            update = effect.update(recipient, self._payload(), self.crcs[p])
            yield recipient[0], heard(update)

  def _welcome(self, effect: syncer_events.AdmitLearner) -> messages.Welcome:
    return messages.Welcome(
      effect.step,
      effect.closed_round,
      effect.versions,
      tuple(self.crcs),
      effect.rows,
      effect.live,
      effect.clean,
      ADDRESSES,
    )
