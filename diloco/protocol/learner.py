# SPDX-License-Identifier: Apache-2.0
"""The learner's machine: what to offer, what to fetch, what to take in.

The training loop tells it of every inner-step boundary and is told what to do
there; while τ > 0 the loop never waits for another process.
"""

import dataclasses
from collections.abc import Mapping

from diloco.protocol import learner_io, messages
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.learner_state import Fragment, State
from diloco.protocol.offering import NextOffer, Standing, next_lead, next_offer

RETRY_S = 0.5  # Between two requests for the same fragment.
ALIVE_S = 1.0  # A learner that waits at its boundary speaks this often.


class Learner:
  """Events in, effects out; the same events give the same effects.

  Args:
    config: of the run.
    run: its name.
    learner: the id, which also names the data shard.
    fingerprints: config, layout, data.
    crcs: of the fragments as this process initialised them, at version 0.
  """

  def __init__(
    self,
    config: ProtocolConfig,
    run: str,
    learner: int,
    fingerprints: Mapping[str, str],
    crcs: tuple[int, ...],
  ):
    assert len(crcs) == config.fragments, f'{len(crcs)=} for {config}'
    self._config = config
    self._run = run
    self._learner = learner
    self._fingerprints = dict(fingerprints)
    self._state = State(tuple(Fragment(crc=crc) for crc in crcs))
    self._effects: list[learner_io.Effect] = []

  # The interface ------------------------------------------------------------

  def handle(
    self, event: learner_io.Event, now: float
  ) -> list[learner_io.Effect]:
    """Advances to `now` in seconds, absorbs `event`, returns the effects."""
    assert now >= self._state.now, f'time ran backwards: {self._state=} {now=}'
    self._set(now=now)
    self._effects = []
    match event:
      case learner_io.Connected():
        self._on_connected(event)
      case learner_io.Disconnected():
        self._on_disconnected(event)
      case learner_io.Heard():
        self._on_heard(event.message)
      case learner_io.Boundary():
        self._on_boundary(event.tokens)
      case learner_io.Completed():
        self._on_completed(event)
      case learner_io.Rebuilt():
        self._on_rebuilt(event)
      case learner_io.FetchFailed():
        self._on_fetch_failed(event)
      case learner_io.Tick():
        pass
      case _:
        raise TypeError(f'Not a learner event: {event!r}.')
    self._ask_again()
    self._say_alive()
    self._begin_when_complete()
    self._go_on_if_parked()
    self._leave_when_done()
    return self._effects

  def deadline(self) -> float | None:
    """The earliest time at which a `Tick` would do something."""
    if not self._state.connected:
      return None
    times = [f.ask_at_s for f in self._state.fragments]
    if self._state.parked:
      times.append(self._state.said_at_s + ALIVE_S)
    return min((t for t in times if t is not None), default=None)

  @property
  def waiting(self) -> bool:
    """Whether the loop must stay at its boundary (only at τ = 0)."""
    return self._state.parked

  @property
  def global_step(self) -> int:
    """t as far as this learner knows; schedules are functions of it."""
    return self._state.global_step

  @property
  def lag_versions(self) -> int:
    """How many announced versions θ has not taken in yet."""
    return sum(f.coming - f.base for f in self._state.fragments)

  @property
  def closed_known(self) -> int:
    """The newest round that is known to be closed."""
    return self._state.closed_known

  def snapshot(self) -> State:
    """A value; nothing that happens later changes it."""
    return self._state

  @classmethod
  def restore(
    cls,
    config: ProtocolConfig,
    run: str,
    learner: int,
    fingerprints: Mapping[str, str],
    snapshot: State,
  ) -> 'Learner':
    """The machine that gave `snapshot`."""
    crcs = tuple(f.crc for f in snapshot.fragments)
    machine = cls(config, run, learner, fingerprints, crcs)
    machine._state = snapshot
    return machine

  # The session --------------------------------------------------------------

  def _on_connected(self, event: learner_io.Connected):
    self._emit_send(
      messages.Hello(
        protocol=messages.PROTOCOL_VERSION,
        run=self._run,
        learner=self._learner,
        incarnation=event.incarnation,
        fingerprints=self._fingerprints,
        versions=tuple(f.host for f in self._state.fragments),
        address=event.address,
      )
    )

  def _on_disconnected(self, event: learner_io.Disconnected):
    """Offers die with the session; training goes on."""
    self._set(connected=False, again_round=0, fetched=())
    self._effects.append(learner_io.Forget(None))
    for p in range(self._config.fragments):
      self._set_fragment(p, wanted=False, ask_at_s=None)
    if self._state.done:
      self._leave(f'run is over; {event.reason}')

  def _on_heard(self, message):
    match message:
      case messages.Welcome():
        self._on_welcome(message)
      case messages.Refusal():
        self._leave(message.reason, refused=message.final)
      case messages.Update():
        self._on_update(message)
      case messages.FullFragment():
        self._set_fragment(
          message.fragment,
          coming=message.version,
          wanted=False,
          ask_at_s=None,
        )
        self._effects.append(learner_io.FetchFragment(message))
      case messages.Retired():
        self._effects.append(learner_io.Forget(message.handles))
      case messages.OfferAgain():
        self._set(again_round=message.round)
      case messages.Finish():
        self._set(last_round=message.last_round)
        if self._state.ceased:  # Before a reconnect; the syncer forgot it.
          self._effects.append(learner_io.HandIn())
      case messages.Done():
        self._set(done=True)
      case _:
        raise TypeError(f'Not a syncer message: {message!r}.')

  def _on_welcome(self, welcome: messages.Welcome):
    closed = max(self._state.closed_known, welcome.closed_round)
    self._set(
      connected=True,
      closed_known=closed,
      last_offered=closed,  # Of what was offered before, nothing is left.
      lead=0,
      global_step=welcome.step,
    )
    if self._state.began:
      self._emit_send(messages.Ready())
    else:
      self._set(position=welcome.position)
    for p, fragment in enumerate(self._state.fragments):
      self._set_fragment(p, coming=fragment.host)
      if welcome.versions[p] > fragment.host:
        self._want(p, f'at version {fragment.host} on joining')
      elif welcome.crcs[p] != fragment.crc:
        self._want(p, f'other bytes at version {fragment.host} on joining')

  def _begin_when_complete(self):
    state = self._state
    if state.began or state.ceased or not state.connected:
      return
    if any(f.wanted or f.host != f.coming for f in state.fragments):
      return
    self._emit_send(messages.Ready())
    self._apply_received()
    self._set(began=True)
    if state.last_round is None:
      self._effects.append(learner_io.Begin(state.position))
    else:
      self._hand_in()

  def _leave_when_done(self):
    """After the last update is here: the host holds the final Θ."""
    state = self._state
    if not state.done or state.left:
      return
    if any(f.wanted or f.host != f.coming for f in state.fragments):
      return
    self._emit_send(messages.Goodbye('run is over'))
    self._leave('run is over')

  def _leave(self, reason: str, refused: bool = False):
    if not self._state.left:
      self._set(left=True, ceased=True, parked=False)
      self._effects.append(
        learner_io.Leave(reason, done=self._state.done, refused=refused)
      )

  # Inner steps --------------------------------------------------------------

  def _on_boundary(self, tokens: int):
    state = self._state
    if state.left:
      return  # The loop has not heard of it yet: that step is for nobody.
    assert state.began and not state.ceased, f'a step out of turn: {state}'
    assert not state.parked, f'a step while waiting: {state}'
    self._set(
      step=state.step + 1,
      tokens=state.tokens + tokens,
      global_step=state.global_step + 1,
    )
    self._apply_received()
    if state.last_round is not None:
      self._hand_in()
      return
    self._offer()
    if self._config.overlap_steps == 0:
      self._set(parked=self._awaits_update())

  def _on_completed(self, event: learner_io.Completed):
    step = self._state.completed_step + 1
    self._set(completed_step=step, step_s=self._state.step_s.add(event.step_s))
    if not self._state.connected:
      return
    self._emit_send(
      messages.Report(
        step=step,
        tokens=event.tokens,
        position=event.position,
        step_s=event.step_s,
        stall_s=event.stall_s,
        loss=event.loss,
        fetched=self._state.fetched,
      )
    )
    self._set(fetched=())

  def _say_alive(self):
    """Whoever waits reports no step; silence would be taken for death."""
    state = self._state
    due = state.now >= state.said_at_s + ALIVE_S
    if state.parked and state.connected and due:
      self._emit_send(messages.Alive())

  def _go_on_if_parked(self):
    """τ = 0: does at the boundary what has become possible there."""
    if not self._state.parked:
      return
    self._apply_received()
    if self._state.last_round is not None:
      self._hand_in()
    elif self._state.again_round:
      self._offer()
    self._set(parked=not self._state.ceased and self._awaits_update())

  def _awaits_update(self) -> bool:
    """Whether a round that was offered is neither closed nor taken in."""
    state = self._state
    return state.connected and (
      state.closed_known < state.last_offered
      or any(f.wanted or f.coming > f.base for f in state.fragments)
    )

  # Offers -------------------------------------------------------------------

  def _offer(self):
    """At most one snapshot of one fragment per boundary."""
    state = self._state
    if not state.connected:
      return
    self._set(again_round=0)
    if state.again_round > state.closed_known:
      self._snapshot(state.again_round)
      return
    choice = next_offer(
      Standing(
        step=state.step,
        closed_known=state.closed_known,
        last_offered=state.last_offered,
        offered_at_step=state.offered_at_step,
        lead=state.lead,
      ),
      self._config,
    )
    if choice.round is None or (choice.refresh and self._keeps_offer(choice)):
      return
    if not self._snapshot(choice.round):
      return
    if not choice.refresh:
      self._set(last_offered=choice.round, offered_at_step=state.step)

  def _keeps_offer(self, choice: NextOffer) -> bool:
    """With carry, what counts as taken is the *newest* snapshot: the older
    one, which may be merged, must not be replaced."""
    p = self._config.fragment_of(choice.round)
    offered = self._state.fragments[p].offered_step is not None
    return self._config.blend == 'carry' and offered

  def _snapshot(self, round_: int) -> bool:
    """Offers the round's fragment, unless no step was made on it."""
    p = self._config.fragment_of(round_)
    state, fragment = self._state, self._state.fragments[p]
    c_steps = state.step - fragment.from_step
    if c_steps < 1:
      return False
    if fragment.wanted or fragment.coming > fragment.base:
      return False  # What was merged of this base may be on its way back.
    self._effects.append(
      learner_io.Snapshot(
        round=round_,
        fragment=p,
        base_version=fragment.base,
        c_steps=c_steps,
        c_tokens=state.tokens - fragment.from_tokens,
        step=state.step,
      )
    )
    self._set_fragment(
      p,
      offered_round=round_,
      offered_step=state.step,
      offered_tokens=state.tokens,
    )
    return True

  def _hand_in(self):
    """Finishing: every fragment once, for its last round; then no more."""
    state = self._state
    first = state.last_round - self._config.fragments + 1
    for round_ in range(first, state.last_round + 1):
      if state.connected and round_ > state.closed_known:
        self._snapshot(round_)
    self._effects += [learner_io.HandIn(), learner_io.Cease()]
    self._set(ceased=True, parked=False)

  # Updates ------------------------------------------------------------------

  def _on_update(self, update: messages.Update):
    self._adapt_lead(update)
    self._set(
      closed_known=max(self._state.closed_known, update.round),
      global_step=update.step,
    )
    p = update.fragment
    fragment = self._state.fragments[p]
    if fragment.wanted or update.version <= fragment.coming:
      return  # The full fragment that will come is at least as new.
    if update.version == fragment.coming + 1:
      self._set_fragment(p, coming=update.version)
      self._effects.append(learner_io.FetchUpdate(update))
    else:
      self._want(p, f'missed version {fragment.coming + 1}')

  def _adapt_lead(self, update: messages.Update):
    fragment = self._state.fragments[update.fragment]
    if fragment.offered_round != update.round:
      return
    merged = self._learner in update.participants
    age_s = 0.0
    if merged:
      age_s = update.ages_s[update.participants.index(self._learner)]
    lead = next_lead(
      self._state.lead,
      merged,
      age_s,
      self._state.step_s.or_zero(),
      self._config,
    )
    self._set(lead=lead)

  def _on_rebuilt(self, event: learner_io.Rebuilt):
    self._set(fetched=(*self._state.fetched, event.handle))
    fragment = self._state.fragments[event.fragment]
    if event.version < fragment.host:
      return
    self._set_fragment(
      event.fragment,
      host=event.version,
      coming=max(event.version, fragment.coming),
      crc=event.crc,
      applied=False,
    )

  def _on_fetch_failed(self, event: learner_io.FetchFailed):
    fragment = self._state.fragments[event.fragment]
    if event.version < fragment.coming or event.version <= fragment.host:
      return  # A later fetch is under way, or has been done.
    self._set_fragment(event.fragment, coming=fragment.host)
    if self._state.connected:
      self._want(event.fragment, event.reason)

  def _want(self, p: int, reason: str):
    """Asks for the full fragment: now, or `RETRY_S` after the last time."""
    fragment = self._state.fragments[p]
    ask_at_s = fragment.asked_at_s + RETRY_S
    if self._state.now < ask_at_s:
      self._set_fragment(p, wanted=True, ask_at_s=ask_at_s)
      return
    self._set_fragment(
      p, wanted=True, ask_at_s=None, asked_at_s=self._state.now
    )
    self._emit_send(messages.WantFragment(p, reason))

  def _ask_again(self):
    for p, fragment in enumerate(self._state.fragments):
      due = fragment.ask_at_s
      if self._state.connected and due is not None and due <= self._state.now:
        self._want(p, 'the last attempt failed')

  def _apply_received(self):
    """Takes in what the host has newer than θ."""
    for p, fragment in enumerate(self._state.fragments):
      if fragment.applied:
        continue
      carry = (
        self._config.blend == 'carry' and fragment.offered_step is not None
      )
      self._effects.append(learner_io.Apply(p, fragment.host, carry))
      state = self._state
      self._set_fragment(
        p,
        base=fragment.host,
        applied=True,
        from_step=fragment.offered_step if carry else state.step,
        from_tokens=fragment.offered_tokens if carry else state.tokens,
        offered_step=None,
      )

  # Small things -------------------------------------------------------------

  def _set(self, **fields):
    self._state = dataclasses.replace(self._state, **fields)

  def _set_fragment(self, p: int, **fields):
    fragments = list(self._state.fragments)
    fragments[p] = dataclasses.replace(fragments[p], **fields)
    self._set(fragments=tuple(fragments))

  def _emit_send(self, message):
    self._set(said_at_s=self._state.now)
    self._effects.append(learner_io.Send(message))
