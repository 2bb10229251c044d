# SPDX-License-Identifier: Apache-2.0
"""Pulls the bytes of a round's contributions, and handles late and bad ones."""

from collections.abc import Collection, Mapping

from diloco.protocol import messages, outliers, timeouts
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer import sessions
from diloco.protocol.syncer.members import Straggler
from diloco.protocol.syncer.rounds import (
  AdmittedOffer,
  MergeDecision,
  Round,
  Stage,
)
from diloco.protocol.syncer.state import SyncerState
from diloco.protocol.timeouts import TransferTime
from diloco.protocol.values import changed

# A learner that cannot be pulled from, or sends what cannot be merged, would
# hold up a quorum that counts it; after this many failures its session ends,
# and it may join again.
FAILED_PULLS_MAX = 3


def begin(
  state: SyncerState, round_: Round, decision: MergeDecision, reason: str
) -> Round:
  """Ends the grace window and asks for the bytes that are not here yet."""
  pulls = {m: a for m, a in round_.pulls if m in round_.pulled}
  for learner in decision.admitted:
    if learner in pulls:
      continue
    member = state.members[learner]
    held = member.offers[round_.fragment]
    pulls[learner] = AdmittedOffer(
      member.incarnation, held, member.step_s.or_zero()
    )
    state.emit(
      syncer_events.Pull(round_.number, learner, member.incarnation, held.offer)
    )
  return state.put(
    round_,
    stage=Stage.PULLING,
    pull_began_s=state.now,
    held_s=None,
    pulls=tuple(sorted(pulls.items())),
    reason=reason,
  )


def on_pulled(state: SyncerState, event: syncer_events.Pulled):
  """Notes the bytes of one contribution, which have arrived."""
  _end_straggler(state, event)
  found = _awaited(state, event)
  if found is not None:
    round_, admitted = found
    nbytes = admitted.held.offer.payload.nbytes
    _measure(state, event.learner, nbytes, state.now - round_.pull_began_s)
    norms = {**dict(round_.norms), event.learner: event.norm}
    state.put(
      round_,
      pulled=round_.pulled | {event.learner},
      norms=tuple(sorted(norms.items())),
    )
    state.change(event.learner, failed_pulls=0)
    _use_up(state, event.learner, admitted, pulled=True)


def on_pull_failed(state: SyncerState, event: syncer_events.PullFailed):
  """Lets the round go on without a contribution."""
  _end_straggler(state, event)
  found = _awaited(state, event)
  if found is not None:
    round_, admitted = found
    state.record('pull_failed', event.learner, event.reason)
    nbytes = admitted.held.offer.payload.nbytes
    waited_s = state.now - round_.pull_began_s
    if event.unusable:  # The bytes did arrive.
      _measure(state, event.learner, nbytes, waited_s)
    else:
      _note_failure(state, event.learner, nbytes, waited_s)
    state.put(round_, **round_.without(event.learner))
    _use_up(state, event.learner, admitted)
    if event.unusable and _strike(state, event.learner, event.reason):
      return  # Its session is over.
    _ask_again(state, round_.number, event.learner, event.reason, waited_s)


def take_last_offers(state: SyncerState, round_: Round) -> Round:
  """Pulls what a leaving learner has offered since its offer was admitted.

  It makes no further offer: steps that came while the older offer was being
  pulled would be lost. Once the round merges, it is too late.
  """
  if round_.stage is not Stage.PULLING:
    return round_
  for learner, admitted in round_.pulls:
    member = state.members[learner]
    held = member.offers.get(round_.fragment)
    if not member.leaving or held is None or held is admitted.held:
      continue
    offer, older = held.offer, admitted.held.offer
    if offer.base_version != older.base_version:
      continue
    if offer.c_steps <= older.c_steps:
      continue  # It has no more to give.
    is_here = learner in round_.pulled
    round_ = state.drop_pull(round_, learner)
    if not is_here:
      _use_up(state, learner, admitted)
    newer = AdmittedOffer(member.incarnation, held, member.step_s.or_zero())
    pulls = {**dict(round_.pulls), learner: newer}
    round_ = state.put(round_, pulls=tuple(sorted(pulls.items())))
    state.emit(
      syncer_events.Pull(round_.number, learner, member.incarnation, held.offer)
    )
  return round_


def give_up_late(state: SyncerState, round_: Round) -> Round:
  """Gives up pulls that exceed their time limit.

  Nothing more is pulled from such a learner until it speaks again.
  """
  limits_s = _limits_s(state, round_)
  for learner, admitted in round_.pulls:
    if limits_s.get(learner, float('inf')) > state.now:
      continue
    waited_s = state.now - round_.pull_began_s
    nbytes = admitted.held.offer.payload.nbytes
    _note_failure(state, learner, nbytes, waited_s)
    reason = f'not pulled in {waited_s:.2f} s'
    state.record('late', learner, f'round {round_.number}: {reason}')
    state.change(learner, late=True)
    round_ = state.put(state.rounds[round_.number], waited=True)
    state.drop_pull(round_, learner)
    _use_up(state, learner, admitted)
    _ask_again(state, round_.number, learner, reason, waited_s)
  return state.rounds[round_.number]


def late_at_s(state: SyncerState, round_: Round) -> float | None:
  """Returns when the next open pull is given up; None if there is none."""
  return min(_limits_s(state, round_).values(), default=None)


def _limits_s(state: SyncerState, round_: Round) -> dict[int, float]:
  """Returns when each contribution that is being pulled is given up."""
  if round_.stage is not Stage.PULLING:
    return {}
  knob = state.config.patience
  return {
    m: round_.pull_began_s
    + timeouts.pull_max_s(
      state.transfer_time(m), a.held.offer.payload.nbytes, knob
    )
    for m, a in round_.pulls
    if m not in round_.pulled
  }


def waited_for(
  times: Mapping[int, tuple[TransferTime, int]],
  missing: Collection[int],
  may_hold: bool,
) -> tuple[int, ...]:
  """Returns the learners whose bytes a round with a quorum still waits for.

  It does not wait for a learner whose last pull failed, which gets only as long
  as the others take. For a learner far slower than the rest it waits only if
  that holds up no other round, or if slow ones have not done so for a while.

  Args:
    times: per contribution, the learner's transfer time and the byte count.
    missing: the learners whose bytes are not here.
    may_hold: True if the round may wait for slow learners.
  """
  usual_s = {m: time.usual_s(nbytes) for m, (time, nbytes) in times.items()}
  known_s = sorted(s for s in usual_s.values() if s is not None)
  median_s = known_s[(len(known_s) - 1) // 2] if known_s else 0.0
  most_s = timeouts.SLOW_FACTOR * median_s
  return tuple(
    m
    for m in sorted(missing)
    if not times[m][0].failed
    and (may_hold or usual_s[m] is None or usual_s[m] <= most_s)
  )


def leave_stragglers(
  state: SyncerState, round_: Round, holds_up: bool
) -> Round:
  """Continues without learners that are not waited for; their pulls go on."""
  missing = [m for m, _ in round_.pulls if m not in round_.pulled]
  if not missing:
    return _account_for_hold(state, round_, holds_up)
  enough = round_.pulled & state.live().keys()
  if state.finishing or len(enough) < state.quorum_now():
    return round_
  times = {
    m: (state.transfer_time(m), a.held.offer.payload.nbytes)
    for m, a in round_.pulls
  }
  if not waited_for(times, missing, may_hold=False) and round_.held_s is None:
    round_ = state.put(round_, held_s=state.now)
  may_hold = not holds_up or state.now >= state.hold_again_s
  if waited_for(times, missing, may_hold):
    return round_
  for learner in missing:
    admitted = dict(round_.pulls)[learner]
    offer = admitted.held.offer
    straggler = Straggler(
      round_.number,
      offer.payload.handle,
      offer.payload.nbytes,
      round_.pull_began_s,
    )
    if state.members[learner].offers.get(offer.fragment) is admitted.held:
      state.members[learner] = state.members[learner].without_offer(
        offer.fragment
      )
    state.change(learner, straggler=straggler)
    state.record('left_out', learner, f'round {round_.number}: slow bytes')
    round_ = state.put(round_, **round_.without(learner))
  return _account_for_hold(state, round_, holds_up)


def _account_for_hold(
  state: SyncerState, round_: Round, holds_up: bool
) -> Round:
  """Sets when a round may next wait for slow bytes, by what this one cost."""
  if round_.held_s is None:
    return round_
  if holds_up:
    held_s = state.now - round_.held_s
    state.hold_again_s = state.now + held_s / timeouts.HELD_SHARE
  return state.put(round_, held_s=None)


def give_up_stragglers(state: SyncerState):
  """Gives up the stragglers whose time is up."""
  for learner, member in list(state.members.items()):
    straggler = member.straggler
    if straggler is None or state.now < _straggler_limit_s(state, learner):
      continue
    state.drop_straggler(learner)
    waited_s = state.now - straggler.began_s
    reason = f'not pulled in {waited_s:.2f} s'
    state.record('late', learner, f'round {straggler.round}: {reason}')
    _fail_straggler(state, learner, straggler, reason)


def straggler_deadlines(state: SyncerState) -> list[float]:
  """Returns when each straggler is given up."""
  return [
    _straggler_limit_s(state, learner)
    for learner, member in state.members.items()
    if member.straggler is not None
  ]


def _straggler_limit_s(state: SyncerState, learner: int) -> float:
  straggler = state.members[learner].straggler
  time, knob = state.transfer_time(learner), state.config.patience
  return straggler.began_s + timeouts.pull_max_s(time, straggler.nbytes, knob)


def _end_straggler(
  state: SyncerState, event: syncer_events.Pulled | syncer_events.PullFailed
):
  """Ends a straggler's pull, which at least shows how long its bytes take."""
  member = state.members.get(event.learner)
  straggler = member.straggler if member else None
  if straggler is None or member.incarnation != event.incarnation:
    return
  if (straggler.round, straggler.handle) != (event.round, event.handle):
    return
  if isinstance(event, syncer_events.PullFailed):
    state.record('pull_failed', event.learner, event.reason)
    _fail_straggler(state, event.learner, straggler, event.reason)
    return
  waited_s = state.now - straggler.began_s
  _measure(state, event.learner, straggler.nbytes, waited_s)
  state.drop_straggler(event.learner)
  state.change(event.learner, failed_pulls=0)
  state.retire(event.learner, event.handle)
  state.send(
    event.learner, messages.OfferAgain(event.round, 'its bytes came too late')
  )


def _fail_straggler(
  state: SyncerState, learner: int, straggler: Straggler, reason: str
):
  waited_s = state.now - straggler.began_s
  _note_failure(state, learner, straggler.nbytes, waited_s)
  state.change(learner, straggler=None)
  state.retire(learner, straggler.handle)
  _ask_again(state, straggler.round, learner, reason, waited_s)


def _measure(state: SyncerState, learner: int, nbytes: int, took_s: float):
  state.resting.pop(learner, None)
  time = state.transfer_time(learner).add(nbytes, took_s)
  state.transfers[learner] = time


def _note_failure(
  state: SyncerState, learner: int, nbytes: int, waited_s: float
):
  time, knob = state.transfer_time(learner), state.config.patience
  time = timeouts.after_pull_failed(time, nbytes, waited_s, knob)
  state.transfers[learner] = time


def _ask_again(
  state: SyncerState, number: int, learner: int, reason: str, waited_s: float
):
  failed = state.members[learner].failed_pulls + 1
  state.change(learner, failed_pulls=failed)
  if failed >= FAILED_PULLS_MAX:
    reason = f'{failed} pulls in a row failed, the last: {reason}'
    rest_s = timeouts.rest_s(waited_s, state.config.patience)
    state.resting[learner] = state.now + rest_s
    sessions.end_session(state, learner, reason)
    return
  state.send(learner, messages.OfferAgain(number, reason))


def _awaited(
  state: SyncerState, event: syncer_events.Pulled | syncer_events.PullFailed
) -> tuple[Round, AdmittedOffer] | None:
  """Returns the round that still waits for this very pull, if any.

  The handle decides: a pull of an older offer of the same learner, for the same
  round, may end after the round has begun to pull a newer one.
  """
  round_ = state.rounds.get(event.round)
  if round_ is None or round_.stage is not Stage.PULLING:
    return None
  admitted = dict(round_.pulls).get(event.learner)
  if admitted is None or event.learner in round_.pulled:
    return None
  pulled = admitted.incarnation, admitted.held.offer.payload.handle
  if pulled != (event.incarnation, event.handle):
    return None
  return round_, admitted


def _use_up(
  state: SyncerState,
  learner: int,
  admitted: AdmittedOffer,
  pulled: bool = False,
):
  """Drops an offer whose pull is over: it can be pulled only once."""
  offer = admitted.held.offer
  member = state.members[learner]
  if member.offers.get(offer.fragment) is admitted.held:
    state.members[learner] = member.without_offer(offer.fragment)
  state.retire(learner, offer.payload.handle, pulled)


def refuse_outliers(state: SyncerState, round_: Round) -> Round:
  """Removes contributions whose norm is far from the others' from a round."""
  steps = {m: a.held.offer.c_steps for m, a in round_.pulls}
  norms = {
    m: outliers.per_root_step(norm, steps[m]) for m, norm in round_.norms
  }
  usual = state.usual_norms[round_.fragment]
  refused = outliers.outliers(norms, usual)
  for learner, reason in refused.items():
    round_ = state.drop_pull(round_, learner)
    state.record('outlier', learner, f'round {round_.number}: {reason}')
    if not _strike(state, learner, reason):
      # The quorum may need it, and at τ = 0 the learner may be waiting.
      state.send(learner, messages.OfferAgain(round_.number, reason))
    round_ = state.rounds[round_.number]  # A quarantine changes it.
  # Judged once: the next time only what has come since.
  state.usual_norms[round_.fragment] = outliers.usual_after(
    usual, {m: n for m, n in norms.items() if m not in refused}, len(refused)
  )
  return state.put(round_, norms=())


def _strike(state: SyncerState, learner: int, reason: str) -> bool:
  """Counts a refused contribution; returns True on a quarantine."""
  account = state.accounts[learner]
  account = changed(account, strikes=account.strikes + 1)
  state.accounts[learner] = account
  if account.strikes < outliers.STRIKES_MAX:
    return False
  reason = f'{account.strikes} contributions refused, the last: {reason}'
  sessions.quarantine(state, learner, reason)
  return True
