# SPDX-License-Identifier: Apache-2.0
"""The learner's state machine: what to offer, to fetch and to take in.

The training loop reports every inner-step boundary to it and is told what to do
there; while τ > 0 the loop never waits for another process.
"""

from collections.abc import Mapping

from diloco.protocol import (
  donating,
  joining,
  learner_io,
  leaving,
  messages,
  receiving,
)
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.joining import Start
from diloco.protocol.learner_state import MADE_MAX, Core, Made, State
from diloco.protocol.offering import (
  FIRST_OFFERS_MAX,
  UNANSWERED_MAX,
  Standing,
  next_offer,
  refreshed_round,
)
from diloco.protocol.values import changed

ALIVE_S = 1.0  # A learner that waits sends `Alive` at this interval.


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
  ):
    assert len(start.crcs) == config.fragments, f'{start=} for {config}'
    if config.blend == 'mix':
      start = start.counting_anew()
    self._core = Core(config, run, learner, fingerprints, start.state())

  # The interface ------------------------------------------------------------

  def handle(
    self, event: learner_io.Event, now: float
  ) -> list[learner_io.Effect]:
    """Advances to `now` in seconds, absorbs `event`, returns the effects."""
    assert now >= self._core.state.now, (
      f'time ran backwards: {self._core.state=} {now=}'
    )
    self._core.set(now=now)
    self._core.effects = []
    match event:
      case learner_io.Connected():
        joining.on_connected(self._core, event)
      case learner_io.Disconnected():
        self._on_disconnected(event)
      case learner_io.Heard():
        self._on_heard(event.message)
      case learner_io.Boundary():
        self._on_boundary(event.tokens)
      case learner_io.Completed():
        self._on_completed(event)
      case learner_io.NotOffered():
        self._on_not_offered(event)
      case learner_io.Rebuilt():
        receiving.on_rebuilt(self._core, event)
      case learner_io.FetchFailed():
        receiving.on_fetch_failed(self._core, event)
      case learner_io.StateFetched():
        joining.on_state_fetched(self._core, event)
      case learner_io.StateFailed():
        joining.on_state_failed(self._core, event)
      case learner_io.Stop():
        leaving.on_stop(self._core, event)
      case learner_io.Tick():
        pass
      case _:
        raise TypeError(f'Not a learner event: {event!r}.')
    receiving.ask_again(self._core)
    self._say_alive()
    if joining.begin_when_complete(self._core):
      self._begin()
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
      times.append(self._core.state.said_at_s + ALIVE_S)
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

  @property
  def lag_versions(self) -> int:
    """The number of announced versions that θ has not taken in yet."""
    return sum(f.coming - f.base for f in self._core.state.fragments)

  @property
  def closed_known(self) -> int:
    """The newest round that is known to be closed."""
    return self._core.state.closed_known

  def snapshot(self) -> State:
    """Returns an immutable copy of the state."""
    return self._core.state

  @classmethod
  def restore(
    cls,
    config: ProtocolConfig,
    run: str,
    learner: int,
    fingerprints: Mapping[str, str],
    snapshot: State,
  ) -> 'Learner':
    """Returns a machine in the state of `snapshot`."""
    start = Start.from_seed(tuple(f.crc for f in snapshot.fragments))
    machine = cls(config, run, learner, fingerprints, start)
    machine._core.state = snapshot
    return machine

  # The session --------------------------------------------------------------

  def _on_disconnected(self, event: learner_io.Disconnected):
    """Forgets the offers, which end with the session; training goes on."""
    self._core.set(
      in_session=False,
      connected=False,
      again_rounds=(),
      fetched=(),
      coming_since=(),
      seeking=False,
      donations=(),
      giving=None,
    )
    self._core.effects.append(learner_io.Forget(None))
    leaving.on_disconnected(self._core)
    for p in range(self._core.config.fragments):
      self._core.set_fragment(p, wanted=False, postponed=False, ask_at_s=None)
    if self._core.state.done:
      self._core.leave(f'run is over; {event.reason}')

  def _on_heard(self, message):
    if not self._core.state.in_session:
      return  # It was under way when its session ended, and is void with it.
    match message:
      case messages.Welcome():
        joining.on_welcome(self._core, message)
        self._hand_in_again()
      case messages.Refusal():
        self._core.leave(message.reason, refused=message.final)
      case messages.Quarantine():
        self._core.leave(f'quarantined: {message.reason}')
      case messages.StateAt():
        joining.on_state_at(self._core, message)
      case messages.NoState():
        joining.on_no_state(self._core)
      case messages.Donate():
        donating.on_donate(self._core, message)
      case messages.DonationOver():
        donating.on_donation_over(self._core, message)
      case messages.DonateFragment():
        p = message.fragment
        held = self._core.state.fragments[p].host
        self._core.effects.append(learner_io.DonateFragment(p, held))
      case messages.Update():
        receiving.on_update(self._core, message)
      case messages.Skipped():
        receiving.on_skipped(self._core, message)
      case messages.Postponed():
        self._core.set_fragment(message.fragment, postponed=True)
      case messages.FullFragment():
        receiving.on_full_fragment(self._core, message)
      case messages.Retired():
        receiving.on_retired(self._core, message)
      case messages.OfferAgain():
        rounds = {*self._core.state.again_rounds, message.round}
        self._core.set(again_rounds=tuple(sorted(rounds)))
        p = self._core.config.fragment_of(message.round)
        self._core.set_fragment(p, pulled=False)
        leaving.on_offer_again(self._core, message)
      case messages.Finish():
        self._core.set(last_round=message.last_round)
        if self._core.state.connected and not self._core.state.settled:
          joining.go_on_alone(self._core)  # Its next step needs no more.
      case messages.Done():
        self._core.set(done=True)
      case _:
        raise TypeError(f'Not a syncer message: {message!r}.')

  def _leave_when_done(self):
    """Leaves after the last update, when the host holds the final Θ."""
    state = self._core.state
    if not state.done or state.left:
      return
    if not all(f.complete for f in state.fragments):
      return
    self._core.send(messages.Goodbye('run is over'))
    self._core.leave('run is over')

  def _begin(self):
    """Starts training, as bootstrap is complete."""
    if self._core.state.last_round is None:
      begin = learner_io.Begin(self._core.state.position)
      self._core.effects.append(begin)
    else:
      self._hand_in()

  # Inner steps --------------------------------------------------------------

  def _on_boundary(self, tokens: int):
    state = self._core.state
    if state.left:
      return  # The loop does not know yet; that step will not be used.
    assert state.began and not state.ceased, f'a step out of turn: {state}'
    assert not state.parked, f'a step while waiting: {state}'
    self._core.set(
      step=state.step + 1,
      tokens=state.tokens + tokens,
    )
    receiving.apply_received(self._core)
    donating.donate(self._core)
    if state.last_round is not None:
      self._hand_in()
      return
    if state.leave_at_s is not None:
      self._leave_at_boundary()
      return
    self._offer()
    self._core.set(parked=self._waits())

  def _on_completed(self, event: learner_io.Completed):
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
        position=event.position,
        step_s=event.step_s,
        stall_s=event.stall_s,
        loss=event.loss,
        fetched=tuple(
          changed(each, held_s=self._core.state.now - since_s)
          for each, since_s in self._core.state.fetched
        ),
        made_s=made_s,
        saved_step=event.saved_step,
      )
    )
    self._core.set(fetched=(), reported_step=step, reported=True)

  def _has_nothing_to_report(self) -> bool:
    """Returns True while parked, ceased, or in a session's first step."""
    state = self._core.state
    idle = state.parked or state.ceased or not state.reported
    return state.connected and idle and not state.left

  def _say_alive(self):
    """Sends `Alive`, lest the syncer take the silence for death."""
    due = self._core.state.now >= self._core.state.said_at_s + ALIVE_S
    if due and self._has_nothing_to_report():
      self._core.send(messages.Alive())

  def _go_on_if_parked(self):
    """Performs at the boundary where it waits what has become possible."""
    if not self._core.state.parked:
      return
    receiving.apply_received(self._core)
    donating.donate(self._core)
    if self._core.state.last_round is not None:
      self._hand_in()
    elif self._core.state.leave_at_s is not None:
      self._leave_at_boundary()
    elif self._core.state.again_rounds:
      self._offer()
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

  # Offers -------------------------------------------------------------------

  def _offer(self):
    """Repeats an offer or makes those that are due; else refreshes one."""
    state = self._core.state
    if not state.connected:
      return
    if self._offer_again():
      return
    offered = 0
    while offered < FIRST_OFFERS_MAX and self._offer_next():
      offered += 1
    if not offered:
      self._refresh()

  def _offer_next(self) -> bool:
    """Makes the next round's first offer, if it is time for it."""
    state = self._core.state
    choice = next_offer(
      Standing(
        t=state.view.at(state.step),
        closed_known=state.closed_known,
        last_offered=state.last_offered,
        lead=state.lead,
        refreshes=self._to_refresh(state.step) is not None,
      ),
      self._core.config,
    )
    if choice.round is None or not self._snapshot(choice.round):
      return False
    self._core.set(last_offered=choice.round)
    return True

  def _refresh(self):
    """Offers a newer copy for the first open round that can use it."""
    round_ = self._to_refresh(self._core.state.step)
    if round_ is not None:
      self._snapshot(round_)

  def _to_refresh(self, step: int) -> int | None:
    """Returns the open round whose offer gets a newer copy, if any."""
    state, rounds = self._core.state, []
    for round_ in range(state.closed_known + 1, state.last_offered + 1):
      fragment = state.fragments[self._core.config.fragment_of(round_)]
      crowded = fragment.unanswered(state.incarnation) >= UNANSWERED_MAX
      if fragment.pulled or crowded or fragment.offered_step == step:
        continue
      if fragment.can_be_offered(step):
        rounds.append(round_)
    return refreshed_round(rounds, state.view, step, self._core.config)

  def _on_not_offered(self, event: learner_io.NotOffered):
    """Forgets an offer that could not be made."""
    fragment = self._core.state.fragments[event.fragment]
    rest = fragment.without((event.handle,))
    self._core.set_fragment(event.fragment, offers=rest)
    leaving.on_not_offered(self._core, event.handle)
    self._core.effects.append(learner_io.Forget((event.handle,)))

  def _offer_again(self) -> bool:
    """Repeats the oldest offer that is asked for and possible; others wait."""
    closed = self._core.state.closed_known
    rounds = [r for r in self._core.state.again_rounds if r > closed]
    made = next((r for r in rounds if self._snapshot(r)), None)
    self._core.set(again_rounds=tuple(r for r in rounds if r != made))
    return made is not None

  def _snapshot(self, round_: int) -> bool:
    """Offers the round's fragment, unless no step was made on it."""
    p = self._core.config.fragment_of(round_)
    state, fragment = self._core.state, self._core.state.fragments[p]
    if not fragment.can_be_offered(state.step):
      return False
    c_steps = state.step - fragment.from_step
    handle = state.handles + 1
    c_tokens = state.tokens - fragment.from_tokens
    made = Made(
      handle,
      state.incarnation,
      fragment.base,
      state.step,
      state.tokens,
      c_tokens,
    )
    offers = (*fragment.offers, made)[-MADE_MAX:]
    self._core.effects.append(
      learner_io.Snapshot(
        handle=handle,
        keep=tuple(x.handle for x in offers),
        round=round_,
        fragment=p,
        base_version=fragment.base,
        c_steps=c_steps,
        c_tokens=c_tokens,
        step=state.step,
      )
    )
    self._core.set(handles=handle)
    again = fragment.offered_round == round_
    first_step = fragment.first_step if again else state.step
    self._core.set_fragment(
      p, offered_round=round_, first_step=first_step, offers=offers
    )
    return True

  def _leave_at_boundary(self):
    """Makes the last offers, for all rounds offered for, after a stop."""
    first = self._core.state.closed_known + 1
    for round_ in range(first, max(first, self._core.state.last_offered) + 1):
      self._offer_last(round_)
    self._core.effects += [learner_io.SayLeaving(), learner_io.Cease()]
    self._core.set(ceased=True, parked=False)

  def _hand_in(self):
    """Offers every fragment once more for its last round, then ceases."""
    self._offer_last_rounds()
    self._core.effects += [
      learner_io.HandIn(self._core.state.last_round),
      learner_io.Cease(),
    ]
    self._core.set(ceased=True, parked=False)

  def _hand_in_again(self):
    """Hands in again after a reconnect, as offers end with their session."""
    state = self._core.state
    if state.ceased and state.connected and state.last_round is not None:
      self._offer_last_rounds()
      self._core.effects.append(learner_io.HandIn(state.last_round))

  def _offer_last_rounds(self):
    """Offers for the last rounds that the syncer knows of."""
    state, fragments = self._core.state, self._core.config.fragments
    last = min(state.last_round, state.closed_known + fragments)
    first = max(state.closed_known, last - fragments) + 1
    for round_ in range(first, last + 1):
      self._offer_last(round_)

  def _offer_last(self, round_: int):
    """Offers a round's fragment for the last time, unless it is on offer."""
    state = self._core.state
    if not state.connected:
      return
    p = self._core.config.fragment_of(round_)
    offers = state.fragments[p].offers_in(state.incarnation)
    is_there = bool(offers) and offers[-1].step == state.step
    if is_there or self._snapshot(round_) or offers:
      leaving.note_last_offer(self._core, p)
