# SPDX-License-Identifier: Apache-2.0
"""Moves rounds from due to closed, up to and including the end of the run.

After every event each open round is advanced as far as possible. Rounds may
collect and pull concurrently; they merge and close in order.
"""

import itertools

from diloco.protocol import messages
from diloco.protocol.grace import grace_window_s
from diloco.protocol.syncer import absence, ending, pulls, way_back
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.rounds import Candidates, Round, Stage
from diloco.protocol.syncer.state import SyncerState
from diloco.protocol.weights import WEIGHTS, normalised


def advance_rounds(state: SyncerState):
  """Opens the rounds that are due and advances every open round."""
  if absence.holds_up(state):
    return  # A new process of the lead waits for its shards.
  if any(not lost.alone for lost in state.lost.values()):
    return  # Θ is not whole: a restarted syncer waits for donations.
  ending.begin_to_finish(state)
  closed_before = None
  while closed_before != state.closed_round:
    closed_before = state.closed_round
    _go_on_if_all_wait(state)
    _open_due(state)
    for number in list(state.rounds):
      if number in state.rounds:
        _advance(state, state.rounds[number])
  _refuse_last_offers(state)
  ending.end_if_over(state)


def window_deadlines(state: SyncerState) -> list[float]:
  """Returns when grace windows end and when late pulls are given up."""
  waiting = [
    r
    for r in state.rounds.values()
    if r.stage in (Stage.COLLECTING, Stage.GRACE)
    and not absence.is_away(state, r.fragment)
  ]
  late = (pulls.late_at_s(state, r) for r in state.rounds.values())
  times = [t for t in late if t is not None]
  if state.finishing:
    is_timed = waiting and state.finish_at_s is not None
    return [*times, state.finish_at_s] if is_timed else times
  graces = [r.closes_at_s for r in waiting if r.stage is Stage.GRACE]
  return [*times, *graces]


def _go_on_if_all_wait(state: SyncerState):
  """Makes the next round due at τ = 0, when no live learner would do so.

  A learner that has offered makes no step until the round has closed. After
  lost sessions its pace clock may count fewer steps than it made, and its view
  of t may be ahead of t; a round that only waiting learners could make due
  would then never come. Other learners may be training on because the shard of
  their fragment is away: they have done their part once their clocks are past
  the round. One that has just reached it is about to offer, and is waited for.
  """
  config, number = state.config, state.closed_round + 1
  if config.overlap_steps > 0 or state.finishing or number in state.rounds:
    return
  due_step = number * config.spacing_steps
  # As far past it as a clock may be; with s = 1 that is the round itself.
  past = min(due_step + 1, state.pace.step + config.clock_ahead_max)
  some_wait = False
  for learner in state.members.live:
    offers = state.members[learner].offers.values()
    waits = any(held.offer.round >= number for held in offers)
    if not waits and state.pace[learner] < past:
      return
    some_wait = some_wait or waits
  if some_wait:
    state.pace.all_reach(due_step)


def _open_due(state: SyncerState):
  """Opens rounds that are due, at most `inflight_max` at a time."""
  config = state.config
  room = config.fragments if state.finishing else config.inflight_max
  number = max(state.rounds, default=state.closed_round) + 1
  while len(state.rounds) < room and _is_due(state, number):
    fragment = config.fragment_of(number)
    state.rounds[number] = Round(number, fragment, due_s=state.now)
    number += 1


def _holds_up(state: SyncerState) -> bool:
  """Returns True if the next round is due but too many rounds are open."""
  if state.finishing or len(state.rounds) < state.config.inflight_max:
    return False
  return _is_due(state, max(state.rounds) + 1)


def _is_due(state: SyncerState, number: int) -> bool:
  if state.finishing:
    return number <= state.last_round
  return state.pace.step >= number * state.config.spacing_steps


def _advance(state: SyncerState, round_: Round):
  if absence.is_away(state, round_.fragment):
    if not state.finishing and round_.number == state.closed_round + 1:
      _skip(state, round_)
    return
  if round_.stage in (Stage.COLLECTING, Stage.GRACE):
    _collect(state, round_)
  pulls.take_last_offers(state, round_)
  pulls.give_up_late(state, round_)
  if round_.stage is Stage.PULLING:
    pulls.leave_stragglers(state, round_, _holds_up(state))
    if round_.all_pulled():
      _conclude(state, round_)


# COLLECTING, GRACE -----------------------------------------------------------


def _collect(state: SyncerState, round_: Round):
  """Waits for quorum, then for the end of the grace window."""
  if state.finishing:
    _collect_last(state, round_)
    return
  candidates = _candidates(state, round_)
  decision = candidates.decide(state.quorum_now())
  if not decision.reached:
    # This applies in GRACE, too: a learner of the quorum may have died since.
    _collect_again(round_)
    return
  if round_.stage is Stage.COLLECTING:
    if round_.quorum_at_s is None:
      state.quorum_s = state.quorum_s.add(state.now - round_.due_s)
    round_.stage = Stage.GRACE
    round_.quorum_at_s = state.now
    round_.closes_at_s = state.now + _grace_s(state)
  if decision.complete:
    pulls.begin(state, round_, candidates.admitted, 'everyone is in')
  elif state.now >= round_.closes_at_s:
    reason = f'window over, {decision.reason}'
    pulls.begin(state, round_, candidates.admitted, reason)


def _candidates(state: SyncerState, round_: Round) -> Candidates:
  """Returns a collecting round's candidates, up to date."""
  state.settle()
  candidates, last = round_.candidates, state.finishing
  version = state.versions[round_.fragment]
  if candidates is None or (candidates.version, candidates.last) != (
    version,
    last,
  ):
    candidates = Candidates(round_.number, version, state.config, last)
    for learner in state.members:
      candidates.put(learner, state.candidate(round_, learner))
    round_.candidates = candidates
  return candidates


def _collect_again(round_: Round):
  round_.stage = Stage.COLLECTING
  round_.closes_at_s = None
  round_.waits = None


def _collect_last(state: SyncerState, round_: Round):
  """Collects for a last round until `finish_at_s`, even below the quorum."""
  if state.finish_at_s is None:
    return
  live = state.members.live
  over = state.now >= state.finish_at_s
  all_in = live and live <= state.members.handed_in
  if not over and not (all_in and ending.are_all_back(state)):
    return
  round_.quorum_at_s = round_.quorum_at_s or state.now
  reason = 'finish, ' + ('time is over' if over else 'everyone handed in')
  pulls.begin(state, round_, _candidates(state, round_).admitted, reason)


def sync_s(state: SyncerState) -> float:
  """Returns ξ_sync, the time in seconds to pull, merge and send back.

  The way back is that of the K-th fastest learner.
  """
  ways_s = (m.way_back_s.value_s for m in state.live().values())
  return state.sync_s.or_zero() + way_back.kth_s(ways_s, state.quorum_now())


def _grace_s(state: SyncerState) -> float:
  """Returns ξ_grace in seconds, from ξ_step of the K-th fastest learner.

  The K-th fastest learner sets the pace of the run.
  """
  averages = (m.step_s.value_s for m in state.live().values())
  steps_s = sorted(s for s in averages if s is not None)
  if not steps_s:
    return 0.0  # No learner has reported a step yet.
  return grace_window_s(
    steps_s[min(state.quorum_now(), len(steps_s)) - 1],
    state.quorum_s.or_zero(),
    sync_s(state),
    state.config.overlap_steps,
    state.config.grace_safety,
    state.config.grace_cap_steps,
  )


def _refuse_last_offers(state: SyncerState):
  """Refuses offers for rounds that cannot close once every learner is leaving.

  When all learners leave, no further steps are made, so no further round
  becomes due and none that lacks offers gets any. Waiting for such a round
  would use up the notice time in vain; what was trained is in the learners'
  checkpoints.
  """
  if state.finishing or len(state.members.leaving) < len(state.members):
    return
  first = state.closed_round + 1
  stuck = next(r for r in itertools.count(first) if not _will_close(state, r))
  for number in range(stuck, first + state.config.fragments):
    p = state.config.fragment_of(number)
    for learner, member in list(state.members.items()):
      held = member.offers.get(p)
      if held is None or state.is_pulling(learner, held):
        continue
      state.members[learner] = member.without_offer(p)
      reason = f'not merged: round {number} will not close, nobody stays'
      state.record('last_steps', learner, reason)
      state.retire(learner, held.offer.payload.handle)


def _will_close(state: SyncerState, number: int) -> bool:
  """Returns True if the round can close with the offers that are there."""
  round_ = state.rounds.get(number)
  if round_ is None:
    return _is_due(state, number)
  return round_.stage is not Stage.COLLECTING


# PULLING ---------------------------------------------------------------------


def _conclude(state: SyncerState, round_: Round):
  """Merges once all pulls are over and it is the round's turn, or collects
  again.
  """
  pulls.refuse_outliers(state, round_)
  enough = len(round_.pulled)
  if state.members.live:
    enough = pulls.live_pulled(state, round_)
  if not state.finishing and enough < state.quorum_now():
    _collect_again(round_)
    return
  if round_.number != state.closed_round + 1:
    return  # Its turn will come: rounds close in order.
  if not round_.pulled:
    state.record('skipped', -1, f'round {round_.number}: nobody answered')
    _close(state, round_)
    return
  round_.stage = Stage.MERGING
  state.knows_less = False
  if state.told_until_round is None:
    state.told_until_round = state.closed_round + state.config.fragments
  state.emit(
    syncer_events.Merge(
      round=round_.number,
      fragment=round_.fragment,
      version=state.versions[round_.fragment] + 1,
      step=state.pace.step,
      shares=_shares(state, round_),
      quorum_s=round_.quorum_at_s - round_.due_s,
      grace_s=round_.pull_began_s - round_.quorum_at_s,
      reason=round_.reason,
    )
  )


# MERGING, closed -------------------------------------------------------------


def _shares(
  state: SyncerState, round_: Round
) -> tuple[syncer_events.Share, ...]:
  """Returns the contributions and their weights (Alg. 2, line 9)."""
  offers = {m: a.held.offer for m, a in round_.pulls.items()}
  weigh = WEIGHTS[state.config.weighting]
  weights = normalised(
    {m: weigh(o.c_tokens, o.c_steps) for m, o in offers.items()}
  )
  return tuple(
    syncer_events.Share(
      learner=m,
      incarnation=a.incarnation,
      weight=weights[m],
      handle=offers[m].payload.handle,
      age_s=a.age_s(round_.pull_began_s),
      age_steps=a.age_steps(round_.pull_began_s),
      base_version=offers[m].base_version,
      c_steps=offers[m].c_steps,
      c_tokens=offers[m].c_tokens,
      step=offers[m].step,
    )
    for m, a in round_.pulls.items()
  )


def _skip(state: SyncerState, round_: Round):
  """Closes a round unmerged: its fragment is away, and later rounds wait."""
  reason = f'round {round_.number}: fragment {round_.fragment} is away'
  state.record('skipped', -1, reason)
  _close(state, round_)
  for learner in sorted(state.members):
    reported_step = state.members[learner].step
    skipped = messages.Skipped(round_.number, state.pace.step, reported_step)
    state.send(learner, skipped)


def on_merged(state: SyncerState, number: int):
  """Closes the round after its outer step, and tells every learner."""
  round_ = state.rounds[number]
  assert round_.stage is Stage.MERGING, f'not merging: {round_}'
  fragment = round_.fragment
  shares = _shares(state, round_)
  for share in shares:
    account = state.accounts[share.learner]
    session = share.learner, share.incarnation
    state.accounts[share.learner] = account.merged(
      fragment,
      share.base_version,
      share.c_tokens,
      (share.incarnation, share.handle),
    )
    if state.is_current(*session):
      state.members[share.learner] = state.members[share.learner].with_merged(
        fragment, share.step
      )
  ending.say_what_is_left(state, round_, shares)
  state.versions[fragment] += 1
  sync_s = state.now - round_.pull_began_s
  if not round_.waited:  # Otherwise it would shorten later grace windows.
    state.sync_s = state.sync_s.add(sync_s)
  _close(state, round_)
  for learner in state.members:
    state.discard_void(learner, fragment)
  way_back.on_published(state, fragment)
  state.emit(
    syncer_events.Publish(
      round=number,
      fragment=fragment,
      version=state.versions[fragment],
      step=state.pace.step,
      shares=shares,
      recipients=tuple(
        (m, member.incarnation) for m, member in state.members.items()
      ),
      reported_steps=_reported_steps(state, shares),
      sync_s=sync_s,
    )
  )


def _reported_steps(
  state: SyncerState, shares: tuple[syncer_events.Share, ...]
) -> tuple[int, ...]:
  """Returns the receivers' own steps that are included in t, by recipient.

  At τ = 0 an offer implies that its step was made, although the report of that
  step may arrive after it.
  """
  waits = state.config.overlap_steps == 0
  offered = {s.learner: s.step for s in shares} if waits else {}
  return tuple(
    max(member.step, offered.get(m, 0)) for m, member in state.members.items()
  )


def _close(state: SyncerState, round_: Round):
  assert round_.number == state.closed_round + 1, f'out of order: {round_}'
  del state.rounds[round_.number]
  state.closed_round = round_.number
  state.pace.close()
