# SPDX-License-Identifier: Apache-2.0
"""The syncer's sessions: live learners, their reports and their offers."""

import math

from diloco.protocol import messages, timeouts
from diloco.protocol.grace import Ema
from diloco.protocol.syncer import absence, members, recovery, way_back
from diloco.protocol.syncer import bootstrap as syncer_bootstrap
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.members import LearnerAccount, Member
from diloco.protocol.syncer.rounds import HeldOffer, Stage
from diloco.protocol.syncer.state import SyncerState
from diloco.protocol.values import changed


def on_heard(state: SyncerState, event: syncer_events.Heard):
  """Handles a message; one of an ended incarnation has its session dropped."""
  if isinstance(event.message, messages.Hello):
    on_hello(state, event.message)
    return
  learner, incarnation = event.learner, event.incarnation
  if not state.is_current(learner, incarnation):
    reason = f'incarnation {incarnation} has ended'
    state.record('zombie', learner, reason)
    state.emit(syncer_events.EndSession(learner, incarnation, reason))
    return
  hear(state, learner)
  match event.message:
    case messages.Ready():
      on_ready(state, learner, event.message)
    case messages.Report():
      on_report(state, learner, event.message)
    case messages.Offer():
      on_offer(state, learner, event.message)
    case messages.WantFragment():
      on_want(state, learner, event.message)
    case messages.Alive():
      pass  # The message only shows that the learner is alive.
    case messages.HandedIn():
      on_handed_in(state, learner, event.message)
    case messages.Leaving():
      on_leaving(state, learner)
    case messages.WantState():
      on_want_state(state, learner)
    case messages.StateTaken():
      syncer_bootstrap.on_state_taken(state, learner)
    case messages.StateOffered():
      on_state_offered(state, learner, event.message)
    case messages.FragmentOffered():
      on_fragment_offered(state, learner, event.message)
    case messages.Goodbye():
      reason = members.brief(f'goodbye: {event.message.reason}')
      end_session(state, learner, reason)
    case _:
      raise TypeError(f'Not a learner message: {event.message!r}.')


def on_hello(state: SyncerState, hello: messages.Hello):
  """Accepts a learner, or refuses it with the reason."""
  if state.is_current(hello.learner, hello.incarnation):
    # The live session is not at fault and must not be dropped.
    state.record('refused', hello.learner, 'a second hello while it lives')
    return
  account = state.accounts.get(hello.learner, LearnerAccount())
  never = members.why_refused(
    hello,
    account,
    state.run,
    state.fingerprints,
    tuple(state.versions),
    state.knows_less,
  )
  reason = never or members.why_not_now(hello, account)
  if reason is not None:
    reason = members.brief(reason)
    session = hello.learner, hello.incarnation
    old = never is None and hello.incarnation <= account.incarnation
    newest = account.incarnation if old else -1
    refusal = messages.Refusal(reason, never is not None, newest)
    state.record('refused', hello.learner, reason)
    state.emit(syncer_events.Send(*session, refusal))
    state.emit(syncer_events.EndSession(*session, reason))
    return
  if hello.learner in state.members:
    end_session(state, hello.learner, 'a newer incarnation took its place')
  if recovery.knows_more(state, hello):
    for learner in sorted(state.members):
      reason = f'was told of less than learner {hello.learner} knows'
      end_session(state, learner, reason)
    recovery.adopt(state, hello)
  state.accounts[hello.learner] = changed(
    account, incarnation=hello.incarnation
  )
  state.members[hello.learner] = Member(
    hello.incarnation,
    heard_s=state.now,
    silent_at_s=state.now
    + timeouts.silence_max_s(Ema(), state.config.patience),
    versions=hello.versions,
    crcs=hello.crcs,
    partition=hello.partition,
  )
  state.record('joined', hello.learner, f'incarnation {hello.incarnation}')
  state.emit(
    syncer_events.AdmitLearner(
      hello.learner,
      hello.incarnation,
      state.pace.step,
      state.closed_round,
      tuple(state.versions),
      account.position,
      tuple(state.live()),
      clean=bool(account.quarantined),
      # If no process knows the CRC, the learner's own is used.
      lost_crcs=tuple(
        (p, hello.crcs[p] if crc is None else crc)
        for p, crc in sorted(recovery.lost_crcs(state).items())
      ),
    )
  )
  if state.finishing:
    state.send(hello.learner, finish_message(state))
  if state.ended:
    state.send(hello.learner, done_message(state))


def on_back(state: SyncerState, event: syncer_events.Back):
  """Takes back shards; one may know of later rounds than a lost ledger.

  Once this process has merged, those rounds belong to a history that the run
  has left.
  """
  newer = [x for x in event.held if x.version > state.versions[x.fragment]]
  if newer and state.knows_less:
    for learner in sorted(state.members):
      reason = 'was told of less than a shard of the syncer has'
      end_session(state, learner, reason)
    recovery.adopt_held(state, newer)
  absence.on_back(state, event)


def on_ready(state: SyncerState, learner: int, ready: messages.Ready):
  """Makes a learner count after its bootstrap; its clock starts at t.

  Steps that it made without a session count from where its clock was, but for
  at most one round: the first round after a syncer's restart is due at once,
  and no burst of rounds follows.
  """
  if not 0 <= ready.steps_away <= state.config.spacing_steps:
    break_off(state, learner, f'steps_away={ready.steps_away}')
    return
  if state.members[learner].ready:
    return
  syncer_bootstrap.on_ready(state, learner)
  state.change(learner, ready=True)
  clock = state.left_clocks.pop(learner, 0) + ready.steps_away
  state.pace.join(learner, clock, state.config.quorum)
  if state.accounts[learner].quarantined:
    state.accounts[learner] = changed(
      state.accounts[learner], strikes=0, quarantined=''
    )
  source = members.brief(ready.source)
  reason = f'at step {state.pace.step}, inner state from {source}'
  state.record('ready', learner, reason)


def on_handed_in(
  state: SyncerState, learner: int, handed_in: messages.HandedIn
):
  """Notes that a learner makes no more steps, as it was told to finish.

  If this syncer did not tell it so, it has lost its ledger, which would say
  when the finish began. The learner is believed before the first merge; from
  then on the process's own count decides when the run is over, as long as any
  other learner makes steps (`ending.begin_to_finish`).
  """
  if not state.members[learner].ready:
    break_off(state, learner, 'hands in before it was ready')
    return
  if state.finishing:
    state.change(learner, handed_in=handed_in.last_round)
    return
  # A finish gives every fragment one more round after those that closed.
  closed = state.closed_round if state.knows_less else 0
  if handed_in.last_round < max(state.config.fragments, closed):
    said = f'last_round={handed_in.last_round}'
    break_off(state, learner, f'{said}, round {state.closed_round} closed')
    return
  state.change(learner, handed_in=handed_in.last_round)
  if state.knows_less:
    finish_as_told(state, handed_in.last_round)
  else:
    _stop_counting(state, learner)  # Its clock would hold up t for good.


def finish_as_told(state: SyncerState, last_round: int):
  """Finishes with the last round that an earlier process has announced."""
  state.pace.at_least(state.config.total_steps)
  state.finish_was_told = True
  least = max(state.rounds, default=state.closed_round)  # They are open.
  most = state.closed_round + state.config.fragments
  begin_to_finish(state, min(max(least, last_round), most))


def begin_to_finish(state: SyncerState, last_round: int):
  """Announces the last rounds; a restarted syncer will know of them."""
  state.last_round = last_round
  state.emit(syncer_events.KeepLedger())
  state.record('finishing', -1, f'last round {last_round}')
  for learner in sorted(state.members):
    state.send(learner, finish_message(state))


def on_leaving(state: SyncerState, learner: int):
  """Stops waiting for a leaving learner; its offers may still be merged."""
  if not state.members[learner].ready:
    break_off(state, learner, 'leaves before it was ready')
    return
  _stop_counting(state, learner)


def _stop_counting(state: SyncerState, learner: int):
  """Waits no longer for a learner that makes no more steps."""
  state.change(learner, leaving=True)
  state.pace.leave(learner, state.config.quorum)
  state.record('leaving', learner, 'makes no more steps')
  # It reaches no further boundary at which it could donate its state.
  syncer_bootstrap.on_end_of_session(
    state, learner, state.members[learner].incarnation
  )


def on_want_state(state: SyncerState, learner: int):
  """Looks for a donor for a newcomer."""
  if state.members[learner].ready:
    break_off(
      state, learner, 'wants a state though it has said that it is ready'
    )
    return
  syncer_bootstrap.on_want_state(state, learner)


def on_state_offered(
  state: SyncerState, learner: int, offered: messages.StateOffered
):
  """Forwards a donor's offer to its newcomer."""
  fragments = state.config.fragments
  whole = (
    len(offered.versions) == len(offered.crcs) == fragments
    and len(offered.payloads) >= fragments
  )
  if not whole or not state.members[learner].ready:
    reason = f'an impossible donation to learner {offered.learner}'
    break_off(state, learner, reason)
    return
  syncer_bootstrap.on_state_offered(state, learner, offered)


def on_fragment_offered(
  state: SyncerState, learner: int, offered: messages.FragmentOffered
):
  """Handles a copy of a fragment that this syncer has lost."""
  if not 0 <= offered.fragment < state.config.fragments:
    break_off(state, learner, f'donates fragment {offered.fragment}')
    return
  recovery.on_fragment_offered(state, learner, offered)


def on_report(state: SyncerState, learner: int, report: messages.Report):
  """Advances the learner's clock by one inner step."""
  member = state.members[learner]
  steps = report.step - member.step
  first = member.step == 0
  possible = (
    member.ready
    and (first or steps == 1)  # The stream loses nothing: one report a step.
    and report.step >= max(1, report.saved_step)
    and report.position >= 0
    and report.tokens >= 0
    and math.isfinite(report.step_s)
    and 0.0 <= report.stall_s <= report.step_s
    and 0.0 <= report.made_s < math.inf
    and all(map(way_back.is_possible, report.fetched))
  )
  if not possible:
    break_off(state, learner, f'impossible report: {report}')
    return
  sample_s = members.believable(report.step_s, member.step_s)
  state.change(learner, step=report.step, step_s=member.step_s.add(sample_s))
  hear(state, learner)
  state.accounts[learner] = changed(
    state.accounts[learner], position=report.position
  )
  # One step, whatever its number: after a reconnect the learner's own count
  # includes steps that an earlier session has reported.
  if not member.leaving:
    state.pace.advance(learner, 1, state.config.quorum)
  way_back.on_fetched(state, learner, report.fetched)


def on_offer(state: SyncerState, learner: int, offer: messages.Offer):
  """Keeps an offer for its round; a newer one of the fragment replaces it."""
  member = state.members[learner]
  broken = _broken_rule(state, offer)
  if broken or learner not in state.members.live:
    break_off(state, learner, broken or 'an offer from one that does not count')
    return
  superseded = member.offers.get(offer.fragment)
  state.members[learner] = member.with_offer(HeldOffer(offer, state.now))
  if superseded and not state.is_pulling(learner, superseded):
    state.retire(learner, superseded.offer.payload.handle)
  state.discard_void(learner, offer.fragment)


def _broken_rule(state: SyncerState, offer: messages.Offer) -> str | None:
  """Returns which protocol rule the offer breaks; None if it breaks none."""
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


def on_want(state: SyncerState, learner: int, want: messages.WantFragment):
  """Sends the full fragment to a learner that missed or could not apply an
  update.
  """
  if not 0 <= want.fragment < state.config.fragments:
    break_off(state, learner, f'wants fragment {want.fragment}')
    return
  if absence.postpone(state, learner, want.fragment):
    return
  state.serve(learner, want.fragment, members.brief(want.reason))


def break_off(state: SyncerState, learner: int, reason: str):
  """Ends the session of a peer that breaks the protocol."""
  reason = members.brief(reason)
  state.record('refused', learner, reason)
  end_session(state, learner, reason)


def end_session(state: SyncerState, learner: int, reason: str):
  """Ends a session: nothing of that incarnation is merged from now on."""
  syncer_bootstrap.dismiss(state, learner)
  state.drop_straggler(learner)
  member = state.members.pop(learner)
  state.left_clocks |= state.pace.leave(learner, state.config.quorum)
  for round_ in list(state.rounds.values()):
    if round_.stage is not Stage.MERGING:
      state.drop_pull(round_, learner)
  state.record('left', learner, reason)
  state.emit(syncer_events.EndSession(learner, member.incarnation, reason))
  syncer_bootstrap.on_end_of_session(state, learner, member.incarnation)
  recovery.on_end_of_session(state, (learner, member.incarnation))
  absence.on_end_of_session(state, learner)


def quarantine(state: SyncerState, learner: int, reason: str):
  """Ends the session; only a process that starts clean may come back."""
  reason = members.brief(reason)
  state.accounts[learner] = changed(state.accounts[learner], quarantined=reason)
  state.record('quarantined', learner, reason)
  state.send(learner, messages.Quarantine(reason))
  end_session(state, learner, f'quarantined: {reason}')


def silence_max_s(state: SyncerState, learner: int) -> float | None:
  """Returns the seconds a learner may be silent; None: it has no session."""
  member = state.members.get(learner)
  if member is None:
    return None
  return timeouts.silence_max_s(member.step_s, state.config.patience)


def hear(state: SyncerState, learner: int, late: bool = False):
  """Restarts a learner's silence deadline."""
  silence_s = silence_max_s(state, learner)
  state.change(
    learner, heard_s=state.now, silent_at_s=state.now + silence_s, late=late
  )


def finish_message(state: SyncerState) -> messages.Finish:
  return messages.Finish(state.pace.step, state.last_round)


def done_message(state: SyncerState) -> messages.Done:
  return messages.Done(state.pace.step, state.closed_round)
