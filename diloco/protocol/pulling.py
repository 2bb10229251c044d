# SPDX-License-Identifier: Apache-2.0
"""The bytes of a round's contributions: asked for, here, late, or refused."""

from diloco.protocol import messages, patience, sessions, strikes, syncer_io
from diloco.protocol.rounds import Admitted, Decision, Round, Stage
from diloco.protocol.state import State
from diloco.protocol.values import changed

# Whoever can't be pulled from, or sends what can't be merged, would hold up a
# quorum that counts it; it may join again.
FAILED_PULLS_MAX = 3
LONGER_FACTOR = 2.0  # What was given up counts as if it took so much longer.


def begin(
  state: State, round_: Round, decision: Decision, reason: str
) -> Round:
  """Ends the window; asks for the bytes that are not here yet."""
  pulls = {m: a for m, a in round_.pulls if m in round_.pulled}
  for learner in decision.admitted:
    if learner in pulls:
      continue
    member = state.members[learner]
    held = member.offers[round_.fragment]
    pulls[learner] = Admitted(member.incarnation, held, member.step_s.or_zero())
    state.emit(
      syncer_io.Pull(round_.number, learner, member.incarnation, held.offer)
    )
  return state.put(
    round_,
    stage=Stage.PULLING,
    pull_began_s=state.now,
    pulls=tuple(sorted(pulls.items())),
    reason=reason,
  )


def on_pulled(state: State, event: syncer_io.Pulled):
  """The bytes of one contribution are here."""
  found = _awaited(state, event)
  if found is not None:
    round_, admitted = found
    state.pull_s = state.pull_s.add(state.now - round_.pull_began_s)
    norms = {**dict(round_.norms), event.learner: event.norm}
    state.put(
      round_,
      pulled=round_.pulled | {event.learner},
      norms=tuple(sorted(norms.items())),
    )
    state.change(event.learner, failed_pulls=0)
    _use_up(state, event.learner, admitted)


def on_pull_failed(state: State, event: syncer_io.PullFailed):
  """The round goes on without it."""
  found = _awaited(state, event)
  if found is not None:
    round_, admitted = found
    state.record('pull_failed', event.learner, event.reason)
    state.put(round_, **round_.without(event.learner))
    _use_up(state, event.learner, admitted)
    if event.unusable and _strike(state, event.learner, event.reason):
      return  # Its session is over.
    _ask_again(state, round_, event.learner, event.reason)


def take_last_offers(state: State, round_: Round) -> Round:
  """Pulls what a learner that leaves has offered since its offer was admitted.

  It makes no other: steps that came while the older offer was under way would
  be lost. Once the round merges, it is too late.
  """
  if round_.stage is not Stage.PULLING:
    return round_
  for learner, admitted in round_.pulls:
    member = state.members[learner]
    held = member.offers.get(round_.fragment)
    if not member.leaving or held is None or held is admitted.held:
      continue
    if held.offer.base_version != admitted.held.offer.base_version:
      continue
    is_here = learner in round_.pulled
    round_ = state.drop_pull(round_, learner)
    if not is_here:
      _use_up(state, learner, admitted)
    newer = Admitted(member.incarnation, held, member.step_s.or_zero())
    pulls = {**dict(round_.pulls), learner: newer}
    round_ = state.put(round_, pulls=tuple(sorted(pulls.items())))
    state.emit(
      syncer_io.Pull(round_.number, learner, member.incarnation, held.offer)
    )
  return round_


def give_up_late(state: State, round_: Round) -> Round:
  """A learner that stopped while it was pulled from delays nobody for long.

  Nothing more is pulled from it until it speaks again.
  """
  deadline = late_at_s(state, round_)
  if deadline is None or state.now < deadline:
    return round_
  # How long it would have taken nobody knows: next time they have longer.
  waited_s = state.now - round_.pull_began_s
  state.pull_s = state.pull_s.add(LONGER_FACTOR * waited_s)
  for learner, admitted in round_.pulls:
    if learner not in round_.pulled:
      reason = f'not pulled in {waited_s:.2f} s'
      state.record('late', learner, f'round {round_.number}: {reason}')
      state.change(learner, late=True)
      round_ = state.put(state.rounds[round_.number], waited=True)
      state.drop_pull(round_, learner)
      _use_up(state, learner, admitted)
      _ask_again(state, round_, learner, reason)
  return state.rounds[round_.number]


def late_at_s(state: State, round_: Round) -> float | None:
  """When what is not pulled by then is given up; None: never."""
  if round_.stage is not Stage.PULLING or round_.all_pulled():
    return None
  wait_s = patience.pull_max_s(state.pull_s, state.config.patience)
  return None if wait_s is None else round_.pull_began_s + wait_s


def _ask_again(state: State, round_: Round, learner: int, reason: str):
  failed = state.members[learner].failed_pulls + 1
  state.change(learner, failed_pulls=failed)
  if failed >= FAILED_PULLS_MAX:
    reason = f'{failed} pulls in a row failed, the last: {reason}'
    sessions.end_session(state, learner, reason)
    return
  state.send(learner, messages.OfferAgain(round_.number, reason))


def _awaited(
  state: State, event: syncer_io.Pulled | syncer_io.PullFailed
) -> tuple[Round, Admitted] | None:
  """The round that still waits for this very pull.

  The handle decides: a pull of an older offer of the same learner, for the
  same round, may end after the round has begun to pull a newer one.
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


def _use_up(state: State, learner: int, admitted: Admitted):
  """A pull is over: an offer can be pulled once (transport contract)."""
  offer = admitted.held.offer
  member = state.members[learner]
  if member.offers.get(offer.fragment) is admitted.held:
    state.members[learner] = member.without_offer(offer.fragment)
  state.retire(learner, offer.payload.handle)


def refuse_outliers(state: State, round_: Round) -> Round:
  """Takes out of a round whose norm is no neighbour of the others'."""
  steps = {m: a.held.offer.c_steps for m, a in round_.pulls}
  norms = {m: strikes.per_root_step(norm, steps[m]) for m, norm in round_.norms}
  usual = state.usual_norms[round_.fragment]
  refused = strikes.outliers(norms, usual)
  for learner, reason in refused.items():
    round_ = state.drop_pull(round_, learner)
    state.record('outlier', learner, f'round {round_.number}: {reason}')
    if not _strike(state, learner, reason):
      # It may be what the quorum waits for, and (τ = 0) may wait itself.
      state.send(learner, messages.OfferAgain(round_.number, reason))
    round_ = state.rounds[round_.number]  # A quarantine changes it.
  # Judged once: the next time only what has come since.
  state.usual_norms[round_.fragment] = strikes.usual_after(
    usual, {m: n for m, n in norms.items() if m not in refused}, len(refused)
  )
  return state.put(round_, norms=())


def _strike(state: State, learner: int, reason: str) -> bool:
  """One more contribution refused; whether that was one too many."""
  account = state.accounts[learner]
  account = changed(account, strikes=account.strikes + 1)
  state.accounts[learner] = account
  if account.strikes < strikes.STRIKES_MAX:
    return False
  reason = f'{account.strikes} contributions refused, the last: {reason}'
  sessions.quarantine(state, learner, reason)
  return True
