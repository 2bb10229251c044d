# SPDX-License-Identifier: Apache-2.0
"""Fragments whose shard is away: the others go on without them.

A sharded syncer has one machine, and the bytes in S processes. Where one of
those dies, rounds of its fragments close in their turn without a merge, so
that the rounds behind them do not wait; what learners have offered stays with
them, or waits here. When the shard is back, it says what it still has: what is
older than the run's is lost, and regained like that of a restarted syncer
(`recovery.py`), only that no other fragment waits for it.

A run begins once all shards are there, and does not end without them.
"""

from diloco.protocol import messages, patience, recovery, syncer_io
from diloco.protocol.rounds import Stage
from diloco.protocol.state import Away, LostFragment, State


def on_absent(state: State, event: syncer_io.Absent):
  """What was under way with these fragments is given up, and never was."""
  for p in event.fragments:
    lost = state.lost.pop(p, None)
    wanted_by = lost.wanted_by if lost else ()
    if lost is not None and lost.offered is not None:
      state.retire(lost.asked[0], lost.offered.payload.handle)
    state.away.setdefault(p, Away(wanted_by))
  for round_ in list(state.rounds.values()):
    if round_.fragment in event.fragments:
      _give_up(state, round_.number, event.reason)
  for learner, member in list(state.members.items()):
    straggler = member.straggler
    if straggler is None:
      continue
    if state.config.fragment_of(straggler.round) in event.fragments:
      state.drop_straggler(learner)
      state.retire(learner, straggler.handle)
  listed = ', '.join(str(p) for p in event.fragments)
  state.record('absent', -1, f'fragments {listed}: {event.reason}')


def _give_up(state: State, number: int, reason: str):
  """Its bytes are gone: whoever gave some is asked for them again."""
  round_ = state.rounds[number]
  for learner, _ in round_.pulls:
    state.drop_pull(state.rounds[number], learner)
  state.put(
    round_,
    stage=Stage.COLLECTING,
    closes_at_s=None,
    pulls=(),
    pulled=frozenset(),
    norms=(),
  )
  for learner, admitted in round_.pulls:
    if not state.is_current(learner, admitted.incarnation):
      continue
    member = state.members[learner]
    offer = admitted.held.offer
    if member.offers.get(offer.fragment) is admitted.held:
      state.members[learner] = member.without_offer(offer.fragment)
    if learner not in round_.pulled:  # Else it was told so already.
      state.retire(learner, offer.payload.handle)
    state.send(learner, messages.OfferAgain(number, reason))


def on_back(state: State, event: syncer_io.Back):
  """The bytes of these fragments are here, as old as they may be."""
  alone = not _others_wait(state)
  for held in event.held:
    p, version = held.fragment, state.versions[held.fragment]
    away = state.away.pop(p, Away())
    if held.version == version and held.same:
      state.record('back', -1, f'fragment {p} at version {version}')
      recovery.serve(state, p, away.wanted_by)
      continue
    left = held.version > version  # It is of a history that the run has left.
    here = held.version if held.same and not left else -1
    state.lost[p] = LostFragment(
      version,
      away.crc if away.adopted else held.crc,
      here,
      wanted_by=away.wanted_by,
      alone=alone,
    )
    reason = f'fragment {p} at version {held.version}, the run has {version}'
    if left:
      reason += ' and has merged since its ledger was lost: those are void'
    state.record('behind', -1, reason)


def is_away(state: State, fragment: int) -> bool:
  """Whether its rounds close without a merge, or at the end wait for it."""
  return fragment in state.away or fragment in state.lost


def holds_up(state: State) -> bool:
  """Whether no round goes on: this process of the lead is new.

  For ever, before the first round has closed: what begins without all of its
  shards would be another run. Later it goes on without who is not back in
  time.
  """
  if not state.awaits_shards:
    return False
  if state.closed_round and state.give_up_shards_s is None and state.members:
    floor_s = patience.silence_floor_s(state.config.patience)
    state.give_up_shards_s = state.now + floor_s
  late = state.give_up_shards_s is not None and (
    state.now >= state.give_up_shards_s
  )
  if state.away and not late:
    return True
  state.awaits_shards = False
  for p, away in state.away.items():
    for learner in away.wanted_by:
      _say_postponed(state, learner, p)
  return False


def deadlines(state: State) -> list[float]:
  """When a new process of the lead goes on without its other shards."""
  give_up_s = state.give_up_shards_s
  if not state.awaits_shards or give_up_s is None or give_up_s <= state.now:
    return []
  return [give_up_s]


def postpone(state: State, learner: int, p: int) -> bool:
  """Whether a learner that wants a fragment has to wait for its shard."""
  if not is_away(state, p):
    return False
  if p in state.away:
    state.away[p] = state.away[p].wanted(learner)
  else:
    recovery.postpone(state, learner, p)
  if not _others_wait(state):
    _say_postponed(state, learner, p)
  return True


def _say_postponed(state: State, learner: int, p: int):
  """At τ = 0 it would wait for it, and with it all others."""
  state.send(learner, messages.Postponed(p))


def _others_wait(state: State) -> bool:
  """Whether no round goes on."""
  return state.awaits_shards or any(not x.alone for x in state.lost.values())


def on_end_of_session(state: State, learner: int):
  """It wants nothing any more."""
  for p, away in state.away.items():
    state.away[p] = away.without(learner)
