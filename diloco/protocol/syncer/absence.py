# SPDX-License-Identifier: Apache-2.0
"""Handles fragments whose shard is away, while all others go on.

A sharded syncer has one state machine, and its bytes lie in S processes. While
one of those is down, rounds of its fragments close in order without a merge, so
that later rounds are not held up; what learners have offered stays with them or
waits here. When the shard is back, it reports which versions it still has.
Versions older than the run's are treated as lost and are recovered like those
of a restarted syncer (`recovery.py`), but no other fragment waits for that.

A run starts once all shards are there, and does not end while one is missing.
"""

from diloco.protocol import messages, timeouts
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer import offers, recovery
from diloco.protocol.syncer.state import Away, LostFragment, Stage, SyncerState
from diloco.protocol.values import changed


def on_absent(state: SyncerState, event: syncer_events.Absent):
  """Abandons everything that was in progress with these fragments."""
  for p in event.fragments:
    away, lost = Away(), state.lost.pop(p, None)
    if lost is not None:
      # Learners may have told its CRC: the shard that comes back knows another.
      away = Away(lost.wanted_by, adopted=True, crc=lost.crc)
      if lost.offered is not None:
        state.retire(lost.asked[0], lost.offered.payload.handle)
    state.away.setdefault(p, away)
  for round_ in list(state.rounds.values()):
    if round_.fragment in event.fragments:
      _give_up(state, round_.number, event.reason)
  for learner, member in list(state.members.items()):
    straggler = member.straggler
    if straggler is None:
      continue
    if state.config.fragment_of(straggler.round) in event.fragments:
      offers.drop_straggler(state, learner)
      state.retire(learner, straggler.handle)
  listed = ', '.join(str(p) for p in event.fragments)
  state.record('absent', -1, f'fragments {listed}: {event.reason}')


def _give_up(state: SyncerState, number: int, reason: str):
  """Reopens a round whose pulled bytes are gone; their learners are asked
  again.
  """
  round_ = state.rounds[number]
  given_up, pulled = round_.pulls.copy(), round_.pulled.copy()
  for learner in given_up:
    offers.drop_pull(state, round_, learner)
  round_.stage = Stage.COLLECTING
  round_.closes_at_s = None
  for learner, admitted in given_up.items():
    if not state.is_current(learner, admitted.incarnation):
      continue
    offers.forget(state, learner, admitted.held)
    if learner not in pulled:  # Otherwise it was told so already.
      state.retire(learner, admitted.held.offer.payload.handle)
    state.send(learner, messages.OfferAgain(number, reason))


def on_back(state: SyncerState, event: syncer_events.Back):
  """The bytes of these fragments are here again, possibly at old versions."""
  alone = not _others_wait(state)
  for held in event.held:
    p, version = held.fragment, state.versions[held.fragment]
    away = state.away.pop(p, Away())
    if held.version == version and held.same:
      state.record('back', -1, f'fragment {p} at version {version}')
      recovery.serve(state, p, away.wanted_by)
      continue
    # It belongs to a history that the run has left.
    left = held.version > version
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


def is_away(state: SyncerState, fragment: int) -> bool:
  """Returns True if the fragment's rounds close unmerged or wait."""
  return fragment in state.away or fragment in state.lost


def hold_up_all(state: SyncerState) -> bool:
  """Returns True while no round may proceed, whatever its fragment.

  A new lead process waits for its shards, or a restarted syncer for donations:
  Θ is not whole.
  """
  return holds_up(state) or _others_wait(state)


def holds_up(state: SyncerState) -> bool:
  """Returns True while a new lead process waits for its shards.

  Before the first round has closed it waits without limit: starting without all
  shards would be another run. Later it waits for a bounded time and then goes
  on without the shards that are not back.
  """
  if not state.awaits_shards:
    return False
  if state.closed_round and state.give_up_shards_s is None and state.members:
    floor_s = timeouts.silence_floor_s(state.config.patience)
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


def deadlines(state: SyncerState) -> list[float]:
  """Returns when a new lead process stops waiting for its shards."""
  give_up_s = state.give_up_shards_s
  if not state.awaits_shards or give_up_s is None or give_up_s <= state.now:
    return []
  return [give_up_s]


def on_want(
  state: SyncerState, learner: int, want: messages.WantFragment
) -> str | None:
  """Sends the full fragment to a learner that missed or could not apply an
  update; one that is away it has to wait for.

  One that is on its way was sent after all that the learner knew of when it
  asked, so it will do.
  """
  p = want.fragment
  if not 0 <= p < state.config.fragments:
    return f'wants fragment {p}'
  if want.received < state.members[learner].full_sent.get(p, 0):
    return None
  if not is_away(state, p):
    recovery.send_full(state, learner, p, messages.brief(want.reason))
    return None
  if p in state.away:
    away = state.away[p]
    wanted_by = tuple(sorted({*away.wanted_by, learner}))
    state.away[p] = changed(away, wanted_by=wanted_by)
  else:
    recovery.postpone(state, learner, p)
  if not _others_wait(state):
    _say_postponed(state, learner, p)
  return None


def _say_postponed(state: SyncerState, learner: int, p: int):
  """Tells the learner not to wait: at τ = 0 it would block, and all with it."""
  state.send(learner, messages.Postponed(p))


def _others_wait(state: SyncerState) -> bool:
  """Returns True while no round at all may proceed."""
  return state.awaits_shards or any(not x.alone for x in state.lost.values())


def on_end_of_session(state: SyncerState, learner: int):
  """Forgets which fragments the learner was waiting for."""
  for p, away in state.away.items():
    wanted_by = tuple(m for m in away.wanted_by if m != learner)
    state.away[p] = changed(away, wanted_by=wanted_by)
