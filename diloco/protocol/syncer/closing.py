# SPDX-License-Identifier: Apache-2.0
"""Moves rounds from due to closed, up to and including the end of the run.

After every event each open round is advanced as far as possible. Rounds may
collect and pull concurrently; they merge and close in order.
"""

import itertools

from diloco.protocol import messages, timeouts
from diloco.protocol.syncer import collecting, offers, pulls, recovery, sessions
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.state import Round, Stage, SyncerState
from diloco.protocol.values import replace_unchecked


def advance_rounds(state: SyncerState):
  """Opens the rounds that are due and advances every open round."""
  _begin_to_finish_in_time(state)
  closed_before = None
  while closed_before != state.closed_round:
    closed_before = state.closed_round
    _go_on_if_all_wait(state)
    _open_due(state)
    for number in list(state.rounds):
      if number in state.rounds:
        _advance(state, state.rounds[number])
  _refuse_last_offers(state)
  _end_if_over(state)


def _go_on_if_all_wait(state: SyncerState):
  """Brings all clocks to the next round at τ = 0, when no step would do so.

  A learner that has offered makes no step until the round has closed. After
  lost sessions its pace clock may count fewer steps than it made, and its view
  of t may be ahead of t. A round that only waiting learners could make due, or
  that takes them by their clocks, would then never come. Other learners may be
  training on because the shard of their fragment is away: they have done their
  part once their clocks are past the round. One that has just reached it is
  about to offer, and is waited for.
  """
  config, number = state.config, state.closed_round + 1
  if config.overlap_steps > 0 or state.finishing:
    return
  due_step = number * config.spacing_steps
  # As far past it as a clock may be; with s = 1 that is the round itself.
  past = min(due_step + 1, state.pace.step + config.clock_ahead_max)
  some_wait = False
  for learner in state.members.live:
    held = state.members[learner].offers.values()
    waits = any(each.offer.round >= number for each in held)
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
  if recovery.is_away(state, round_.fragment):
    if not state.finishing and round_.number == state.closed_round + 1:
      _skip(state, round_)
    return
  if round_.stage in (Stage.COLLECTING, Stage.GRACE):
    reason = collecting.why_over(state, round_)
    if reason is not None:
      admitted = collecting.candidates(state, round_).admitted
      pulls.begin(state, round_, admitted, reason)
  if round_.stage is Stage.PULLING:
    pulls.take_last_offers(state, round_)
    pulls.give_up_late(state, round_)
    if pulls.leave_stragglers(state, round_, _holds_up(state)):
      pulls.refuse_outliers(state, round_)
      _conclude(state, round_)


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
      if held is None or offers.is_pulling(state, learner, held):
        continue
      offers.forget(state, learner, held)
      reason = f'not merged: round {number} will not close, nobody stays'
      state.record('last_steps', learner, reason)
      state.retire(learner, held.offer.payload.handle)


def _will_close(state: SyncerState, number: int) -> bool:
  """Returns True if the round can close with the offers that are there."""
  round_ = state.rounds.get(number)
  if round_ is None:
    return _is_due(state, number)
  return round_.stage is not Stage.COLLECTING


# Pulled, MERGING -------------------------------------------------------------


def _conclude(state: SyncerState, round_: Round):
  """Merges if it is the round's turn, or collects again without a quorum."""
  enough = len(round_.pulled)
  if state.members.live:
    enough = pulls.live_pulled(state, round_)
  if not state.finishing and not collecting.has_quorum(state, enough):
    collecting.collect_again(round_)
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


def _shares(
  state: SyncerState, round_: Round
) -> tuple[syncer_events.Share, ...]:
  """Returns the contributions and their weights (Alg. 2, line 9)."""
  offered = {m: a.held.offer for m, a in round_.pulls.items()}
  weights = state.policy.shares(offered)
  shares = []
  for m, admitted in round_.pulls.items():
    offer, step_s = offered[m], admitted.step_s
    # 0 if the offer came later.
    age_s = max(0.0, round_.pull_began_s - admitted.held.arrived_s)
    shares.append(
      syncer_events.Share(
        learner=m,
        incarnation=admitted.incarnation,
        weight=weights[m],
        handle=offer.payload.handle,
        age_s=age_s,
        age_steps=age_s / step_s if step_s else 0.0,
        **offer.facts(messages.Contribution),
      )
    )
  return tuple(shares)


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
    _note_merged(state, fragment, share)
  _say_what_is_left(state, round_, shares)
  state.versions[fragment] += 1
  sync_s = state.now - round_.pull_began_s
  if not round_.waited:  # Otherwise it would shorten later grace windows.
    state.sync_s = state.sync_s.add(sync_s)
  _close(state, round_)
  for learner in state.members:
    offers.discard_void(state, learner, fragment)
  _note_published(state, fragment)
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


def _note_published(state: SyncerState, fragment: int):
  """Notes when a fragment's new version was announced to the sessions.

  For each fragment, the oldest update that a session has not reported is kept:
  over a slow link a newer one would otherwise always replace it.
  """
  version = state.versions[fragment]
  for learner, member in list(state.members.items()):
    if fragment not in member.published:
      published = {**member.published, fragment: (version, state.now)}
      state.change(learner, published=published)


def _note_merged(state: SyncerState, fragment: int, share: syncer_events.Share):
  """Notes in a learner's account and session what was merged of it."""
  learner, session = share.learner, (share.learner, share.incarnation)
  account = state.accounts[learner]
  merged_offer = share.incarnation, share.handle
  state.accounts[learner] = replace_unchecked(
    account,
    merged_bases={**account.merged_bases, fragment: share.base_version},
    merged_offers={**account.merged_offers, fragment: merged_offer},
    merged_tokens=account.merged_tokens + share.c_tokens,
    strikes=0,
  )
  if state.is_current(*session):
    merged_steps = state.members[learner].merged_steps
    state.change(learner, merged_steps={**merged_steps, fragment: share.step})


def _say_what_is_left(
  state: SyncerState, round_: Round, shares: tuple[syncer_events.Share, ...]
):
  """Records for learners that leave whether their last steps were merged."""
  for share in shares:
    if not state.is_current(share.learner, share.incarnation):
      continue
    member = state.members[share.learner]
    if not member.leaving:
      continue
    held = member.offers.get(round_.fragment)
    reason = f'round {round_.number} has merged it up to step {share.step}'
    if held is not None and held.offer.step > share.step:
      reason += f', not to step {held.offer.step}: it was merging already'
    state.record('last_steps', share.learner, reason)


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


# The end of the run ----------------------------------------------------------


def on_handed_in(
  state: SyncerState, learner: int, handed_in: messages.HandedIn
) -> str | None:
  """Notes that a learner makes no more steps, as it was told to finish.

  If this syncer did not tell it so, it has lost its ledger, which would say
  when the finish began. The learner is believed before the first merge, unless
  the rounds that others know of have overtaken that finish: its process knew
  less. From then on the process's own count decides when the run is over, as
  long as any other learner makes steps.
  """
  if not state.members[learner].ready:
    return 'hands in before it was ready'
  if state.finishing:
    state.change(learner, handed_in=handed_in.last_round)
    return None
  # A finish gives every fragment one more round after those that closed.
  least = state.config.fragments
  if handed_in.last_round < least:
    return f'last_round={handed_in.last_round}, must be {least} or more'
  state.change(learner, handed_in=handed_in.last_round)
  if state.knows_less and handed_in.last_round >= state.closed_round:
    _finish_as_told(state, handed_in.last_round)
  else:
    # Its clock would hold up t for good.
    sessions.stop_counting(state, learner)
  return None


def _finish_as_told(state: SyncerState, last_round: int):
  """Finishes with the last round that an earlier process has announced."""
  state.pace.at_least(state.config.total_steps)
  state.finish_was_told = True
  least = max(state.rounds, default=state.closed_round)  # They are open.
  most = state.closed_round + state.config.fragments
  _begin_to_finish(state, min(max(least, last_round), most))


def _begin_to_finish(state: SyncerState, last_round: int):
  """Announces the last rounds; a restarted syncer will know of them."""
  state.last_round = last_round
  state.emit(syncer_events.KeepLedger())
  state.record('finishing', -1, f'last round {last_round}')
  finish = messages.Finish(state.pace.step, last_round)
  for learner in sorted(state.members):
    state.send(learner, finish)


def _begin_to_finish_in_time(state: SyncerState):
  """Announces, at the last step, one more round per fragment.

  Learners have as long to answer as it takes to give up a silent one. A
  restarted syncer grants that time anew, counted from the first learner's
  return.
  """
  _finish_if_none_steps(state)
  live = state.members.live
  if state.finish_at_s is not None or state.ended or not live:
    return
  if not state.finishing:
    if state.pace.step < state.config.total_steps:
      return
    last_round = state.closed_round + state.config.fragments
    _begin_to_finish(state, last_round)
  state.finish_at_s = state.now + max(
    timeouts.silence_max_s(state.members[m].step_s, state.config.patience)
    for m in live
  )


def _finish_if_none_steps(state: SyncerState):
  """Finishes once every learner that is here has been told to, and none steps.

  An earlier process told them so. Its ledger is lost, and this process had
  merged before they said it: at most a round per fragment, since each of them
  makes one last offer of each.
  """
  learners = state.members.handed_in
  if state.finishing or not learners or len(learners) < len(state.members):
    return
  until = state.told_until_round
  if until is not None and state.closed_round > until:
    return  # Others have made steps since: these are not believed any more.
  for learner in sorted(state.members):
    state.change(learner, leaving=False)
    state.pace.join(learner, 0, state.config.quorum)
  last_round = max(state.members[m].handed_in for m in learners)
  _finish_as_told(state, last_round)


def _end_if_over(state: SyncerState):
  if state.ended or state.closed_round != state.last_round:
    return
  state.ended = True
  # Learners that join from now on adopt what is written.
  state.knows_less = False
  done = messages.Done(state.pace.step, state.closed_round)
  for learner in sorted(state.members):
    state.send(learner, done)
  state.emit(syncer_events.End(state.pace.step, state.closed_round))
