# SPDX-License-Identifier: Apache-2.0
"""The syncer's state machine: which offers are merged, when, and how weighted.

It reads no clock and touches no bytes: time and events are arguments, and
effects are the return value. An event is absorbed by the module that owns its
subject; then what is due, by that event or by time alone, is done in an order
that does not depend on the event.
"""

from collections.abc import Collection, Mapping

from diloco.protocol import messages
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.syncer import bootstrap as syncer_bootstrap
from diloco.protocol.syncer import (
  closing,
  collecting,
  offers,
  pulls,
  recovery,
  sessions,
)
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.state import (
  Ledger,
  ShardUnavailable,
  SyncerSnapshot,
  SyncerState,
)


class Syncer:
  """Deterministic machine of the syncer: events in, effects out.

  Args:
    run: the run's name; learners of other runs are refused.
    fingerprints: hashes of config, layout and data that learners must share.
    away: fragments whose bytes other shards hold; they come with those shards.
  """

  def __init__(
    self,
    config: ProtocolConfig,
    run: str,
    fingerprints: Mapping[str, str],
    away: Collection[int] = (),
  ):
    self._state = SyncerState(config, run, fingerprints)
    self._state.away = {p: ShardUnavailable() for p in sorted(away)}
    self._state.awaits_shards = bool(away)

  def handle(
    self, event: syncer_events.Event, now: float
  ) -> list[syncer_events.Effect]:
    """Advances to `now` in seconds, absorbs `event`, returns the effects."""
    state = self._state
    assert now >= state.now, f'time ran backwards: {state.now=} {now=}'
    away_s = now - state.now
    state.now = now
    state.effects = []
    sessions.excuse_silence(state, away_s)
    match event:
      case syncer_events.Heard(message=messages.Hello()):
        sessions.on_hello(state, event.message)
      case syncer_events.Heard(message=messages.Inquiry()):
        sessions.on_inquiry(state, event.message)
      case syncer_events.Heard():
        if sessions.is_heard(state, event.learner, event.incarnation):
          self._absorb(event.learner, event.message)
      case syncer_events.Lost():
        if state.is_current(event.learner, event.incarnation):
          sessions.end_session(state, event.learner, event.reason)
      case syncer_events.Pulled():
        pulls.on_pulled(state, event)
      case syncer_events.PullFailed():
        pulls.on_pull_failed(state, event)
      case syncer_events.Merged():
        closing.on_merged(state, event.round)
      case syncer_events.FragmentTaken():
        recovery.on_taken(state, event)
      case syncer_events.FragmentFailed():
        recovery.on_failed(state, event)
      case syncer_events.ShardLost():
        recovery.on_absent(state, event)
      case syncer_events.ShardReturned():
        sessions.on_back(state, event)
      case syncer_events.Tick():
        pass
      case _:
        raise TypeError(f'Not a syncer event: {event!r}.')
    sessions.give_up_silent(state)
    pulls.give_up_stragglers(state)
    syncer_bootstrap.assign_donors(state)
    recovery.ask(state)
    if not recovery.hold_up_all(state):
      closing.advance_rounds(state)
    return state.effects

  def _absorb(self, learner: int, message: object):
    """Has the module that owns a message's subject check it and take it in.

    If the message breaks the protocol, that module says how, and the session
    ends.
    """
    state, broken = self._state, None
    match message:
      case messages.Ready():
        broken = sessions.on_ready(state, learner, message)
      case messages.Report():
        broken = sessions.on_report(state, learner, message)
      case messages.Offer():
        broken = offers.on_offer(state, learner, message)
      case messages.WantFragment():
        broken = recovery.on_want(state, learner, message)
      case messages.Alive():
        pass  # The message only shows that the learner is alive.
      case messages.HandedIn():
        broken = closing.on_handed_in(state, learner, message)
      case messages.Leaving():
        broken = sessions.on_leaving(state, learner)
      case messages.WantState():
        broken = syncer_bootstrap.on_want_state(state, learner)
      case messages.StateTaken():
        syncer_bootstrap.on_state_taken(state, learner)
      case messages.StateOffered():
        broken = syncer_bootstrap.on_state_offered(state, learner, message)
      case messages.FragmentHeld():
        broken = recovery.on_fragment_held(state, learner, message)
      case messages.FragmentOffered():
        broken = recovery.on_fragment_offered(state, learner, message)
      case messages.NoFragment():
        broken = recovery.on_no_fragment(state, learner, message)
      case messages.Goodbye():
        sessions.on_goodbye(state, learner, message)
      case _:
        raise TypeError(f'Not a learner message: {message!r}.')
    if broken is not None:
      sessions.break_off(state, learner, broken)

  def deadline(self) -> float | None:
    """The earliest time at which a `Tick` would do something."""
    deadlines = [
      *sessions.silence_deadlines(self._state),
      *pulls.late_deadlines(self._state),
      *collecting.window_deadlines(self._state),
      *pulls.straggler_deadlines(self._state),
      *recovery.deadlines(self._state),
    ]
    return min(deadlines, default=None)

  @property
  def step(self) -> int:
    """The global step t."""
    return self._state.pace.step

  @property
  def whole(self) -> bool:
    """True unless a fragment of Θ is lost, as after a restart."""
    return not self._state.lost

  @property
  def away(self) -> tuple[int, ...]:
    """The fragments whose shard is away."""
    return tuple(self._state.away)

  @property
  def lost(self) -> tuple[int, ...]:
    """The fragments that are older here than in the run."""
    return tuple(self._state.lost)

  @property
  def lost_crcs(self) -> dict[int, int | None]:
    """CRCs of the run's bytes of fragments that are not here; None: unknown."""
    return recovery.lost_crcs(self._state)

  @property
  def knows_less(self) -> bool:
    """True while it trusts learners and shards that know of later rounds."""
    return self._state.knows_less

  def snapshot(self) -> SyncerSnapshot:
    """Returns an immutable copy of the state."""
    return self._state.snapshot()

  def ledger(self) -> Ledger:
    """Returns what a restarted syncer needs to go on."""
    return self._state.ledger()

  @classmethod
  def resume(
    cls,
    config: ProtocolConfig,
    run: str,
    fingerprints: Mapping[str, str],
    ledger: Ledger,
    held: tuple[int, ...],
    crcs: tuple[int | None, ...],
    away: Collection[int] = (),
  ) -> 'Syncer':
    """Returns the machine of a new process, which learners must join again.

    Args:
      fingerprints: hashes of config, layout and data.
      ledger: the ledger of the last close.
      held: the version of each fragment that is here, at most the ledger's.
      crcs: CRC of each fragment's bytes at the ledger's version; None: unknown.
      away: fragments whose shards will report what they hold; see `Syncer`.
    """
    syncer = cls(config, run, fingerprints, away)
    syncer._state.resume(ledger)
    recovery.begin(syncer._state, held, crcs)
    return syncer
