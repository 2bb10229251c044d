# SPDX-License-Identifier: Apache-2.0
"""The syncer's sessions: who is here, what they report and offer."""

import dataclasses
import math

from diloco.protocol import members as members_lib
from diloco.protocol import messages, syncer_io
from diloco.protocol.members import Account, Member
from diloco.protocol.rounds import HeldOffer, Stage
from diloco.protocol.state import State

LOOK_FLOORS = 0.25  # Between two looks at the clock, in silence floors.


def on_heard(state: State, event: syncer_io.Heard):
  """A message arrived; whoever is not the current incarnation is dropped."""
  if isinstance(event.message, messages.Hello):
    on_hello(state, event.message)
    return
  learner, incarnation = event.learner, event.incarnation
  if not state.is_current(learner, incarnation):
    reason = f'incarnation {incarnation} has ended'
    state.record('zombie', learner, reason)
    state.emit(syncer_io.Drop(learner, incarnation, reason))
    return
  state.change(learner, heard_s=state.now)
  match event.message:
    case messages.Ready():
      on_ready(state, learner)
    case messages.Report():
      on_report(state, learner, event.message)
    case messages.Offer():
      on_offer(state, learner, event.message)
    case messages.WantFragment():
      on_want(state, learner, event.message)
    case messages.Alive():
      pass  # That it spoke is all that it says.
    case messages.HandedIn():
      state.change(learner, handed_in=True)
    case messages.Goodbye():
      reason = members_lib.brief(f'goodbye: {event.message.reason}')
      end_session(state, learner, reason)
    case _:
      raise TypeError(f'Not a learner message: {event.message!r}.')


def on_hello(state: State, hello: messages.Hello):
  """Accepts a learner, or refuses it with the reason."""
  if state.is_current(hello.learner, hello.incarnation):
    # Not the live session's doing: it must not be dropped for it.
    state.record('refused', hello.learner, 'a second hello while it lives')
    return
  account = state.accounts.get(hello.learner, Account())
  never = members_lib.why_refused(
    hello, account, state.run, state.fingerprints, tuple(state.versions)
  )
  reason = never or members_lib.why_too_old(hello, account)
  if reason is not None:
    reason = members_lib.brief(reason)
    session = hello.learner, hello.incarnation
    refusal = messages.Refusal(reason, final=never is not None)
    state.record('refused', hello.learner, reason)
    state.emit(syncer_io.Send(*session, refusal))
    state.emit(syncer_io.Drop(*session, reason))
    return
  if hello.learner in state.members:
    end_session(state, hello.learner, 'a newer incarnation took its place')
  state.accounts[hello.learner] = dataclasses.replace(
    account, incarnation=hello.incarnation
  )
  state.members[hello.learner] = Member(hello.incarnation, state.now)
  state.record('joined', hello.learner, f'incarnation {hello.incarnation}')
  state.emit(
    syncer_io.Greet(
      hello.learner,
      hello.incarnation,
      state.pace.step,
      state.closed_round,
      tuple(state.versions),
      account.position,
      tuple(state.live()),
    )
  )
  if state.finishing:
    state.send(hello.learner, finish_message(state))
  if state.ended:
    state.send(hello.learner, done_message(state))


def on_ready(state: State, learner: int):
  """Bootstrap is complete: the learner counts, its clock starts at t."""
  if not state.members[learner].ready:
    state.change(learner, ready=True)
    state.pace.join(learner)
    state.record('ready', learner, f'starts at step {state.pace.step}')


def on_report(state: State, learner: int, report: messages.Report):
  """One inner step more on the learner's clock."""
  member = state.members[learner]
  steps = report.step - member.step
  first = member.step == 0
  possible = (
    member.ready
    and (first or steps == 1)  # The stream loses nothing: one a step.
    and report.step >= 1
    and report.position >= 0
    and report.tokens >= 0
    and math.isfinite(report.step_s)
    and 0.0 <= report.stall_s <= report.step_s
  )
  if not possible:
    break_off(state, learner, f'impossible report: {report}')
    return
  sample_s = members_lib.believable(report.step_s, member.step_s)
  state.change(learner, step=report.step, step_s=member.step_s.add(sample_s))
  state.accounts[learner] = dataclasses.replace(
    state.accounts[learner], position=report.position
  )
  # One step, whatever its number: after a reconnect the learner's own count
  # holds steps that an earlier session has reported.
  state.pace.advance(learner, 1, state.config.quorum)
  if report.fetched:
    state.emit(syncer_io.Retire(learner, member.incarnation, report.fetched))


def on_offer(state: State, learner: int, offer: messages.Offer):
  """Keeps it for its round; the newest of a fragment replaces the older."""
  member = state.members[learner]
  broken = _broken_rule(state, offer)
  if broken or not member.ready:
    break_off(state, learner, broken or 'an offer before it was ready')
    return
  superseded = member.offers.get(offer.fragment)
  state.members[learner] = member.with_offer(HeldOffer(offer, state.now))
  if superseded and not state.is_pulling(learner, superseded):
    state.retire(learner, superseded.offer.payload.handle)
  state.discard_void(learner, offer.fragment)


def _broken_rule(state: State, offer: messages.Offer) -> str | None:
  """What no learner that keeps the protocol would offer."""
  config = state.config
  if not 1 <= offer.round <= state.closed_round + config.fragments:
    return (
      f'an offer for round {offer.round}, round {state.closed_round} closed'
    )
  if offer.fragment != config.fragment_of(offer.round):
    return (
      f'fragment {offer.fragment} for round {offer.round}, which concerns '
      f'fragment {config.fragment_of(offer.round)}'
    )
  if not 0 <= offer.base_version <= state.versions[offer.fragment]:
    return (
      f'base version {offer.base_version} of fragment {offer.fragment}, '
      f'which is at {state.versions[offer.fragment]}'
    )
  if offer.c_steps < 0 or offer.c_tokens < 0:
    return f'c_steps={offer.c_steps}, c_tokens={offer.c_tokens}'
  return None


def on_want(state: State, learner: int, want: messages.WantFragment):
  """A learner missed an update, or could not rebuild it."""
  if not 0 <= want.fragment < state.config.fragments:
    break_off(state, learner, f'wants fragment {want.fragment}')
    return
  incarnation = state.members[learner].incarnation
  reason = members_lib.brief(want.reason)
  state.emit(syncer_io.Serve(learner, incarnation, want.fragment, reason))


def break_off(state: State, learner: int, reason: str):
  """A peer that breaks the protocol is not argued with."""
  reason = members_lib.brief(reason)
  state.record('refused', learner, reason)
  end_session(state, learner, reason)


def end_session(state: State, learner: int, reason: str):
  """The incarnation is over: nothing of it is merged from now on."""
  member = state.members.pop(learner)
  state.pace.leave(learner, state.config.quorum)
  for round_ in list(state.rounds.values()):
    if round_.stage is not Stage.MERGING:
      state.put(round_, **round_.without(learner))
  state.record('left', learner, reason)
  state.emit(syncer_io.Drop(learner, member.incarnation, reason))


def silence_deadlines(state: State) -> list[float]:
  """When each live learner will be given up, and the next look before.

  The looks are for the syncer's own sake: by the one that it misses it knows
  that it was away. None once the run is finishing: there are no more steps to
  report.
  """
  if state.finishing or not state.live():
    return []
  look = state.now + LOOK_FLOORS * state.config.silence_floor_s
  return [
    look,
    *(
      member.heard_s + members_lib.silence_max_s(member, state.config)
      for member in state.live().values()
    ),
  ]


def give_up_silent(state: State):
  """Ends the sessions whose deadline has passed."""
  if state.finishing:
    return
  for learner, member in state.live().items():
    silence_max_s = members_lib.silence_max_s(member, state.config)
    if state.now >= member.heard_s + silence_max_s:
      reason = f'silent for {silence_max_s:.2f} s'
      end_session(state, learner, reason)


def excuse_silence(state: State, away_s: float):
  """Nothing at all happened at the syncer for `away_s`.

  Where that is far more than from one look to the next, the syncer itself was
  away (stopped, swapped out). It must not take its own absence for the
  learners': what they said in the meantime is still unread.
  """
  if away_s > 2 * LOOK_FLOORS * state.config.silence_floor_s:
    for learner in list(state.members):
      state.change(learner, heard_s=state.now)


def finish_message(state: State) -> messages.Finish:
  return messages.Finish(state.pace.step, state.last_round)


def done_message(state: State) -> messages.Done:
  return messages.Done(state.pace.step, state.closed_round)
