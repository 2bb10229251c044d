# SPDX-License-Identifier: Apache-2.0
"""The learner's state machine: what to offer, to fetch and to take in.

The training loop reports every inner-step boundary to it and is told what to do
there; while τ > 0 the loop never waits for another process.
"""

from collections.abc import Mapping

from diloco.protocol import messages, timeouts
from diloco.protocol.config import PEER, ProtocolConfig
from diloco.protocol.learner import bootstrap as learner_bootstrap
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner import leaving, offers, updates
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.learner.state import Core, LearnerState
from diloco.protocol.values import replace_unchecked


class Learner:
  """Deterministic machine of one learner: events in, effects out.

  Args:
    run: the run's name.
    learner: the learner id, which also selects the data shard.
    fingerprints: hashes of config, layout and data.
    start: what this process holds, from its seed or its own checkpoint.
  """

  def __init__(
    self,
    config: ProtocolConfig,
    run: str,
    learner: int,
    fingerprints: Mapping[str, str],
    start: Start,
    bootstrap: str = PEER,
  ):
    assert len(start.crcs) == config.fragments, f'{start=} for {config}'
    if config.blending.interpolates:
      start = start.counting_anew()
    self._core = Core(
      config, run, learner, fingerprints, start.state(), bootstrap
    )

  # The interface ------------------------------------------------------------

  def handle(
    self, event: learner_events.Event, now: float
  ) -> list[learner_events.Effect]:
    """Advances to `now` in seconds, absorbs `event`, returns the effects."""
    assert now >= self._core.state.now, (
      f'time ran backwards: {self._core.state=} {now=}'
    )
    self._core.set(now=now)
    self._core.effects = []
    match event:
      case learner_events.Connected():
        learner_bootstrap.on_connected(self._core, event)
      case learner_events.Disconnected():
        self._on_disconnected(event)
      case learner_events.Heard():
        self._on_heard(event.message)
      case learner_events.Boundary():
        self._on_boundary(event.tokens)
      case learner_events.Completed():
        self._on_completed(event)
      case learner_events.OfferDropped():
        self._on_not_offered(event)
      case learner_events.Rebuilt():
        updates.on_rebuilt(self._core, event)
      case learner_events.FetchFailed():
        updates.on_fetch_failed(self._core, event)
      case learner_events.StateFetched():
        learner_bootstrap.on_state_fetched(self._core, event)
      case learner_events.Drawn():
        learner_bootstrap.on_drawn(self._core, event)
      case learner_events.NothingStored():
        learner_bootstrap.on_nothing_stored(self._core, event)
      case learner_events.StateFailed():
        learner_bootstrap.on_state_failed(self._core, event)
      case learner_events.Stop():
        leaving.on_stop(self._core, event)
      case learner_events.Tick():
        pass
      case _:
        raise TypeError(f'Not a learner event: {event!r}.')
    updates.ask_again(self._core)
    updates.fetch_next(self._core)
    self._say_alive()
    if learner_bootstrap.begin_when_complete(self._core):
      if self._core.state.last_round is None:
        begin = learner_events.Begin(self._core.state.rows)
        self._core.effects.append(begin)
      else:
        offers.hand_in(self._core)
    self._go_on_if_parked()
    self._leave_when_done()
    leaving.leave_in_time(self._core)
    leaving.give_up_in_time(self._core)
    return self._core.effects

  def deadline(self) -> float | None:
    """The earliest time at which a `Tick` would do something."""
    times = [leaving.deadline(self._core)]
    if self._core.state.connected:
      fragments = self._core.state.fragments
      times += [fragments[p].ask_at_s for p in self._core.state.asking]
    if self._has_nothing_to_report():
      times.append(self._alive_at_s())
    return min((t for t in times if t is not None), default=None)

  @property
  def waiting(self) -> bool:
    """True while the training loop must stay at its boundary.

    At τ = 0 it waits for an update, and at the end of the run for a syncer that
    is away.
    """
    return self._core.state.parked

  @property
  def global_step(self) -> int:
    """The global step t, as this learner knows it, for schedules."""
    return self._core.state.global_step

  def snapshot(self) -> LearnerState:
    """Returns an immutable copy of the state."""
    return self._core.state

  # The session --------------------------------------------------------------

  def _on_disconnected(self, event: learner_events.Disconnected):
    """Forgets the offers, which end with the session; training goes on."""
    self._core.set(
      in_session=False,
      connected=False,
      again_rounds=(),
      fetched=(),
      coming_since=(),
      seeking=False,
      fetching=None,
      donations=(),
      giving=None,
    )
    self._core.effects.append(learner_events.Forget(None))
    leaving.on_disconnected(self._core)
    for p in range(self._core.config.fragments):
      self._core.set_fragment(
        p,
        full=None,
        updates=(),
        wanted=False,
        lags=False,
        postponed=False,
        ask_at_s=None,
      )
    if self._core.state.done:
      self._core.leave(f'run is over; {event.reason}')

  def _on_heard(self, message):
    if not self._core.state.in_session:
      return  # It was under way when its session ended, and is void with it.
    match message:
      case messages.Welcome():
        learner_bootstrap.on_welcome(self._core, message)
        offers.hand_in_again(self._core)
      case messages.Refusal():
        self._core.leave(message.reason, refused=message.final)
      case messages.Quarantine():
        self._core.leave(f'quarantined: {message.reason}')
      case messages.StateAt():
        learner_bootstrap.on_state_at(self._core, message)
      case messages.NoState():
        learner_bootstrap.on_no_state(self._core)
      case messages.Donate():
        learner_bootstrap.on_donate(self._core, message)
      case messages.DonationOver():
        learner_bootstrap.on_donation_over(self._core, message)
      case messages.AskFragment(fragment=p):
        fragment = self._core.state.fragments[p]
        self._core.send(messages.FragmentHeld(p, fragment.host, fragment.crc))
      case messages.DonateFragment(fragment=p):
        held = self._core.state.fragments[p]
        if held.crc == messages.NO_BYTES:
          self._core.send(messages.NoFragment(p, 'nothing is here yet'))
        else:
          donate = learner_events.DonateFragment(p, held.host)
          self._core.effects.append(donate)
      case messages.Update():
        updates.on_update(self._core, message)
      case messages.Skipped():
        updates.on_closed(self._core, message)
      case messages.Postponed():
        self._core.set_fragment(message.fragment, postponed=True)
      case messages.FullFragment():
        updates.on_full_fragment(self._core, message)
      case messages.Retired():
        updates.on_retired(self._core, message)
      case messages.OfferAgain():
        rounds = {*self._core.state.again_rounds, message.round}
        self._core.set(again_rounds=tuple(sorted(rounds)))
        p = self._core.config.fragment_of(message.round)
        self._core.set_fragment(p, pulled=False)
        leaving.on_offer_again(self._core, message)
      case messages.Finish():
        self._core.set(last_round=message.last_round)
        if self._core.state.connected and not self._core.state.settled:
          # Its next step needs no more.
          learner_bootstrap.go_on_alone(self._core)
      case messages.Done():
        self._core.set(done=True)
      case _:
        raise TypeError(f'Not a syncer message: {message!r}.')

  def _leave_when_done(self):
    """Leaves after the last update, when the host holds the final Θ."""
    state = self._core.state
    complete = all(f.complete for f in state.fragments)
    if state.done and not state.left and complete:
      self._core.send(messages.Goodbye('run is over'))
      self._core.leave('run is over')

  # Inner steps --------------------------------------------------------------

  def _on_boundary(self, tokens: int):
    state = self._core.state
    if state.left:
      return  # The loop does not know yet; that step will not be used.
    assert state.began and not state.ceased, f'a step out of turn: {state}'
    assert not state.parked, f'a step while waiting: {state}'
    self._core.set(step=state.step + 1, tokens=state.tokens + tokens)
    if not self._at_boundary():
      offers.offer(self._core)
    self._core.set(parked=not self._core.state.ceased and self._waits())

  def _at_boundary(self) -> bool:
    """Does what may be done at any boundary; returns True if it ceases."""
    updates.apply_received(self._core)
    learner_bootstrap.donate(self._core)
    if self._core.state.last_round is not None:
      offers.hand_in(self._core)
    elif self._core.state.leave_at_s is not None:
      offers.leave_at_boundary(self._core)
    return self._core.state.ceased

  def _on_completed(self, event: learner_events.Completed):
    step = self._core.state.completed_step + 1
    step_s = self._core.state.step_s.add(event.step_s)
    made_s = self._core.state.made_s + event.step_s - event.stall_s
    self._core.set(completed_step=step, step_s=step_s, made_s=made_s)
    if not self._core.state.connected:
      return
    self._core.send(
      messages.Report(
        step=step,
        tokens=event.tokens,
        rows=event.rows,
        step_s=event.step_s,
        stall_s=event.stall_s,
        loss=event.loss,
        fetched=tuple(
          replace_unchecked(each, held_s=self._core.state.now - since_s)
          for each, since_s in self._core.state.fetched
        ),
        made_s=made_s,
        saved_step=event.saved_step,
        link_load=self._core.state.link.ratio,
      )
    )
    self._core.set(fetched=(), reported_step=step, reported=True)

  def _has_nothing_to_report(self) -> bool:
    """Returns True while parked, ceased, or in a session's first step."""
    state = self._core.state
    idle = state.parked or state.ceased or not state.reported
    return state.connected and idle and not state.left

  def _alive_at_s(self) -> float:
    every_s = timeouts.alive_s(self._core.config.patience)
    return self._core.state.said_at_s + every_s

  def _say_alive(self):
    """Sends `Alive`, lest the syncer take the silence for death."""
    due = self._core.state.now >= self._alive_at_s()
    if due and self._has_nothing_to_report():
      self._core.send(messages.Alive())

  def _go_on_if_parked(self):
    """Performs at the boundary where it waits what has become possible."""
    if not self._core.state.parked:
      return
    if not self._at_boundary() and self._core.state.again_rounds:
      offers.offer(self._core)
    self._core.set(parked=not self._core.state.ceased and self._waits())

  def _waits(self) -> bool:
    """Returns True if the loop has to stay at its boundary."""
    if leaving.wait_if_cut_off(self._core):
      return True
    return self._core.config.overlap_steps == 0 and self._awaits_update()

  def _awaits_update(self) -> bool:
    """Returns True if the update of an offered round has not been taken in."""
    state = self._core.state
    return state.connected and (
      state.closed_known < state.last_offered
      or not all(f.current or f.postponed for f in state.fragments)
    )

  def _on_not_offered(self, event: learner_events.OfferDropped):
    """Forgets an offer that could not be made."""
    fragment = self._core.state.fragments[event.fragment]
    rest = fragment.without((event.handle,))
    self._core.set_fragment(event.fragment, offers=rest)
    leaving.on_not_offered(self._core, event.handle)
    self._core.effects.append(learner_events.Forget((event.handle,)))
