# SPDX-License-Identifier: Apache-2.0
"""Fragments that are not here: recovered from learners, or awaited.

The ledger is written at every close, the fragments themselves less often. So a
restarted syncer knows which version of each fragment the run had reached, but
may hold only an older one. Learners hold the newer version and donate it,
verified by its CRC. Until then no round merges; learners train on. A fragment
that no learner provides in time continues from the newest copy available, under
the version number it had: versions never fall.

A sharded syncer has one state machine, and its bytes lie in S processes. While
one of those is down, rounds of its fragments close in order without a merge, so
that later rounds are not held up; what learners have offered stays with them or
waits here. When the shard is back, it reports which versions it still has.
Versions older than the run's are lost, and are recovered as above, but no other
fragment waits for that. A run starts once all shards are there, and does not
end while one is missing.
"""

from collections.abc import Collection, Mapping

from diloco.protocol import messages, timeouts
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer import offers
from diloco.protocol.syncer.state import (
  LostFragment,
  Member,
  ShardUnavailable,
  Stage,
  SyncerState,
)
from diloco.protocol.values import replace_unchecked

# Per session and fragment: a link may fail twice, and the version is lost to
# the run if no other learner has it.
TRIES_MAX = 3


def begin(
  state: SyncerState, held: tuple[int, ...], crcs: tuple[int | None, ...]
):
  """Notes what is lost, right after a restart.

  Args:
    state: the state resumed from the ledger.
    held: the version that is here, by fragment.
    crcs: CRCs of the bytes at the ledger's versions, by fragment; None where
      the process that wrote the ledger did not know it.
  """
  for p, version in enumerate(state.versions):
    if p in state.away and crcs[p] is None:
      state.away[p] = replace_unchecked(state.away[p], adopted=True)
    if p in state.away:
      continue  # Its shard will report that.
    assert held[p] <= version, f'{held=} is newer than the ledger'
    if held[p] < version:
      state.lost[p] = LostFragment(version, crcs[p], held[p])


def knows_more(state: SyncerState, hello: messages.Hello) -> bool:
  """Returns True if a learner has seen rounds close that the ledger lacks.

  It is asked only before this process has merged anything (`why_refused`): the
  ledger was lost or is an old copy, so the learners' versions define the run.
  """
  return any(v > state.versions[p] for p, v in enumerate(hello.versions))


def adopt(
  state: SyncerState, learner: int, seen: Mapping[int, tuple[int, int | None]]
):
  """Adopts what a learner or a shard (−1) knows as what the run has reached.

  All sessions must have ended, since their learners were told of older
  versions.

  Args:
    seen: version and CRC by fragment; None where the CRC is not known.
  """
  assert state.knows_less and not state.members, f'{state.members}'
  known = (
    (v - 1) * state.config.fragments + p + 1 for p, (v, _) in seen.items()
  )
  closed = max(state.closed_round, *known)
  reason = f'round {closed} closed, not {state.closed_round} as recorded'
  state.record('adopted', learner, reason)
  before = state.versions
  state.closed_round = closed
  # A skipped round made no version.
  at_close = state.config.versions_at(closed)
  state.versions = [max(pair) for pair in zip(before, at_close)]
  state.rounds.clear()
  # That round was due; otherwise none would be for a long time.
  state.pace.at_least(closed * state.config.spacing_steps)
  state.finish_at_s = state.give_up_lost_s = None
  if state.finishing and closed > state.last_round:
    state.last_round, state.finish_was_told = None, False
  # These came from an old ledger, which does not know them.
  state.were_live = frozenset()
  for p, version in enumerate(state.versions):
    if version > before[p]:
      lost = state.lost.get(p)
      held = lost.held if lost else before[p]
      claimed, crc = seen.get(p, (None, None))
      crc = crc if claimed == version else None
      if p in state.away:
        wanted_by = state.away[p].wanted_by
        state.away[p] = ShardUnavailable(wanted_by, adopted=True, crc=crc)
        continue
      state.lost[p] = LostFragment(version, crc, held)
  # A process that dies before Θ is whole must not fall back behind this.
  state.emit(syncer_events.KeepLedger())


def ask(state: SyncerState):
  """Asks a holder for each lost fragment; gives up after a time limit.

  A holder is asked for one fragment at a time: it encodes a whole one beside
  its steps.
  """
  if not state.lost:
    state.give_up_lost_s = None
    return
  if state.give_up_lost_s is None and state.members:
    floor_s = timeouts.silence_floor_s(state.config.patience)
    state.give_up_lost_s = state.now + floor_s
  late = state.give_up_lost_s is not None and state.now >= state.give_up_lost_s
  late = late or _all_are_here(state)
  busy = {lost.asked for lost in state.lost.values()}
  for p, lost in sorted(state.lost.items()):
    if lost.asked is not None:
      continue
    heard = True
    if lost.alone:
      lost = state.lost[p] = _question(state, p, lost)
      heard = set(lost.questioned) <= set(lost.answered)
    # Alone: every session has said what it has.
    over = heard and (late or (lost.alone and bool(state.members)))
    version, holders = _holders(state, p, lost, older=over)
    free = [session for session in holders if session not in busy]
    if free:
      session = min(free, key=lost.tried.count)
      busy.add(session)
      state.lost[p] = replace_unchecked(lost, asked=session)
      _request(state, session[0], p, version)
    elif over and not holders:
      _go_on_with_less(state, p, f'{lost.held}', None)


def _request(state: SyncerState, learner: int, p: int, version: int):
  """Asks for a copy, unless one that was asked for before is on its way.

  A shard may die and be back several times meanwhile, or while this process is
  stopped; the learner would encode and hold a copy for each.
  """
  owes = state.members[learner].owes
  if p not in owes:
    state.change(learner, owes=(*owes, p))
    state.send(learner, messages.DonateFragment(p, version))


def _question(state: SyncerState, p: int, lost: LostFragment) -> LostFragment:
  """Asks all sessions at once which version they hold, each of them once.

  A learner answers at once, without encoding anything; one that does not is
  silent, and its session ends.
  """
  new = [
    (m, x.incarnation)
    for m, x in sorted(state.members.items())
    if (m, x.incarnation) not in lost.questioned
  ]
  for learner, _ in new:
    state.send(learner, messages.AskFragment(p))
  return replace_unchecked(lost, questioned=(*lost.questioned, *new))


def _all_are_here(state: SyncerState) -> bool:
  """Returns True if every learner of the last close has joined again.

  An update that was recorded but never reached a learner is held by no learner:
  waiting for it would delay the run in vain.
  """
  return bool(state.were_live) and state.were_live <= state.members.keys()


def _holders(
  state: SyncerState, p: int, lost: LostFragment, older: bool
) -> tuple[int, list[tuple[int, int]]]:
  """Returns a version, and the sessions that can donate it, in ascending id.

  Args:
    older: True if the newest version that there is will do.
  """
  held = {
    (m, x.incarnation): x.versions[p]
    for m, x in sorted(state.members.items())
    if lost.held < x.versions[p] <= lost.version
    and _may_donate(state, m, p, lost)
  }
  version = max(held.values(), default=lost.held) if older else lost.version
  return version, [session for session, v in held.items() if v == version]


def _may_donate(
  state: SyncerState, learner: int, p: int, lost: LostFragment
) -> bool:
  """Returns True if the learner may be asked and its version be trusted."""
  member = state.members[learner]
  if lost.tried.count((learner, member.incarnation)) >= TRIES_MAX:
    return False
  if member.versions[p] == lost.version and lost.crc is not None:
    return member.crcs[p] == lost.crc
  return not state.accounts[learner].quarantined  # There is only its own word.


def _go_on_with_less(
  state: SyncerState, p: int, newest: str, taken_of: tuple[int, int] | None
):
  lost = state.lost[p]
  nobody = f'fragment {p}: nobody has version {lost.version}'
  state.record('lost', -1, f'{nobody}; goes on from {newest}')
  # Everybody gets the bytes of now: some may hold those of before, such as a
  # learner that has just rebuilt them from what had arrived already.
  _recovered(state, p, taken_of, state.members)


def on_fragment_offered(
  state: SyncerState, learner: int, offered: messages.FragmentOffered
) -> str | None:
  """Pulls the copy that was requested; any other is withdrawn.

  The learner may by now hold a newer version than its hello said.
  """
  if not 0 <= offered.fragment < state.config.fragments:
    return f'donates fragment {offered.fragment}'
  member = _owes_no_more(state, learner, offered.fragment)
  session = learner, member.incarnation
  lost = state.lost.get(offered.fragment)
  if lost is None or lost.asked != session or lost.offered is not None:
    state.retire(learner, offered.payload.handle)
    return None
  p = offered.fragment
  if lost.alone:
    _note_held(state, learner, p, offered.version, offered.crc)
    member = state.members[learner]
  as_said = offered.version == member.versions[p] > lost.held
  exact = offered.version == lost.version and lost.crc is not None
  state.lost[p] = replace_unchecked(lost, offered=offered)
  if not exact and not as_said:
    reason = f'version {offered.version} of fragment {p} is not what was asked'
    _failed(state, p, session, reason)
    return None
  # For an older version there is only the learner's own word.
  crc = lost.crc if exact else member.crcs[p]
  state.emit(syncer_events.TakeFragment(*session, lost.version, crc, offered))
  return None


def on_no_fragment(
  state: SyncerState, learner: int, answer: messages.NoFragment
) -> str | None:
  """Notes that a learner which was asked has failed, as a try in vain.

  It happens where one of its hosts has lost the syncer and the others have not.
  """
  p = answer.fragment
  if not 0 <= p < state.config.fragments:
    return f'has no fragment {p}'
  session = learner, _owes_no_more(state, learner, p).incarnation
  lost = state.lost.get(p)
  if lost is not None and lost.asked == session and lost.offered is None:
    _failed(state, p, session, messages.brief(answer.reason))
  return None


def _owes_no_more(state: SyncerState, learner: int, p: int) -> Member:
  owes = tuple(owed for owed in state.members[learner].owes if owed != p)
  state.change(learner, owes=owes)
  return state.members[learner]


def on_fragment_held(
  state: SyncerState, learner: int, held: messages.FragmentHeld
) -> str | None:
  """Notes the version that a learner holds now instead of that in its hello."""
  p = held.fragment
  if not 0 <= p < state.config.fragments:
    return f'holds fragment {p}'
  session = learner, state.members[learner].incarnation
  lost = state.lost.get(p)
  if lost is not None and session in lost.questioned:
    _note_held(state, learner, p, held.version, held.crc)
    answered = tuple(dict.fromkeys((*lost.answered, session)))
    state.lost[p] = replace_unchecked(lost, answered=answered)
  return None


def _note_held(
  state: SyncerState, learner: int, p: int, version: int, crc: int
):
  versions = list(state.members[learner].versions)
  crcs = list(state.members[learner].crcs)
  versions[p], crcs[p] = version, crc
  state.change(learner, versions=tuple(versions), crcs=tuple(crcs))


def on_taken(state: SyncerState, event: syncer_events.FragmentTaken):
  """Θ_p is whole again, if the copy is the one requested last."""
  lost = state.lost.get(event.fragment)
  if lost is None or lost.asked != (event.learner, event.incarnation):
    return
  p, version = event.fragment, lost.offered.version
  state.retire(event.learner, lost.offered.payload.handle)
  if version < lost.version and _holders(state, p, lost, older=False)[1]:
    # A session with the version itself has joined meanwhile: `ask` turns to it.
    state.lost[p] = replace_unchecked(lost, asked=None, offered=None)
  elif version < lost.version:
    newest = f'{version} of learner {event.learner}'
    _go_on_with_less(state, p, newest, lost.asked)
  else:
    reason = f'fragment {p} at version {version}'
    state.record('donated', event.learner, reason)
    serve_to = set(lost.wanted_by)
    if lost.crc is None:  # Each was told its own: some may have other bytes.
      here = version, lost.offered.crc
      for learner, member in state.members.items():
        if (member.versions[p], member.crcs[p]) != here:
          serve_to.add(learner)
    _recovered(state, p, lost.asked, serve_to)


def on_failed(state: SyncerState, event: syncer_events.FragmentFailed):
  """Notes the failure, so that another session is asked."""
  lost = state.lost.get(event.fragment)
  session = event.learner, event.incarnation
  if lost is not None and lost.asked == session:
    _failed(state, event.fragment, session, event.reason)


def _failed(state: SyncerState, p: int, session: tuple[int, int], reason: str):
  lost = state.lost[p]
  state.record('pull_failed', session[0], reason)
  if lost.offered is not None:
    state.retire(session[0], lost.offered.payload.handle)
  tried = *lost.tried, session
  state.lost[p] = replace_unchecked(lost, asked=None, offered=None, tried=tried)


def on_end_of_session(state: SyncerState, session: tuple[int, int]):
  """Forgets an ended session, so that `ask` finds another.

  Newcomers are asked again, since a donor may have left its copy with one. The
  answers of learners that train stand. A pull in progress still reports how it
  ended; the result of a session that is no longer asked is ignored.
  """
  for p, lost in state.lost.items():
    gone = lost.asked == session
    stands = {
      key
      for key in lost.questioned
      if state.is_current(*key) and state.members[key[0]].ready
    }
    state.lost[p] = replace_unchecked(
      lost,
      asked=None if gone else lost.asked,
      offered=None if gone else lost.offered,
      tried=tuple(s for s in lost.tried if s != session),
      wanted_by=tuple(m for m in lost.wanted_by if m != session[0]),
      questioned=tuple(x for x in lost.questioned if x in stands),
      answered=tuple(x for x in lost.answered if x in stands),
    )
  for p, away in state.away.items():
    wanted_by = tuple(m for m in away.wanted_by if m != session[0])
    state.away[p] = replace_unchecked(away, wanted_by=wanted_by)


def _recovered(
  state: SyncerState,
  p: int,
  taken_of: tuple[int, int] | None,
  serve_to: Collection[int],
):
  lost = state.lost.pop(p)
  state.emit(syncer_events.AdoptVersion(p, lost.version, taken_of))
  serve(state, p, serve_to)


def lost_crcs(state: SyncerState) -> dict[int, int | None]:
  """Returns the CRCs of fragments that are not here, None where unknown."""
  lost = {p: lost.crc for p, lost in state.lost.items()}
  return lost | {p: x.crc for p, x in state.away.items() if x.adopted}


def serve(state: SyncerState, p: int, learners: Collection[int]):
  """Sends a fragment to the learners that had to wait for it."""
  for learner in sorted(learners):
    send_full(state, learner, p, f'fragment {p} is here again')


def send_full(state: SyncerState, learner: int, fragment: int, reason: str):
  """Has the full fragment sent to a learner's session."""
  merged = state.accounts[learner].merged_offers.get(fragment, (0, 0))
  member = state.members[learner]
  sent = member.full_sent.get(fragment, 0) + 1
  state.change(learner, full_sent={**member.full_sent, fragment: sent})
  session = learner, member.incarnation
  state.emit(syncer_events.SendFull(*session, fragment, reason, merged))
  # It is delivered another way.
  state.forget_published(learner, fragment)


def deadlines(state: SyncerState) -> list[float]:
  """Returns when lost fragments, and shards that are awaited, are given up."""
  times = []
  if any(lost.asked is None for lost in state.lost.values()):
    times.append(state.give_up_lost_s)
  if state.awaits_shards:
    times.append(state.give_up_shards_s)
  return [t for t in times if t is not None and t > state.now]


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
    send_full(state, learner, p, messages.brief(want.reason))
    return None
  missing = state.away if p in state.away else state.lost
  wanted_by = tuple(sorted({*missing[p].wanted_by, learner}))
  missing[p] = replace_unchecked(missing[p], wanted_by=wanted_by)
  if not _others_wait(state):
    _say_postponed(state, learner, p)
  return None


def _say_postponed(state: SyncerState, learner: int, p: int):
  """Tells the learner not to wait: at τ = 0 it would block, and all with it."""
  state.send(learner, messages.Postponed(p))


# Fragments whose shard is away ------------------------------------------------


def on_absent(state: SyncerState, event: syncer_events.ShardLost):
  """Abandons everything that was in progress with these fragments."""
  for p in event.fragments:
    away, lost = ShardUnavailable(), state.lost.pop(p, None)
    if lost is not None:
      # Learners may have told its CRC: the shard that comes back knows another.
      away = ShardUnavailable(lost.wanted_by, adopted=True, crc=lost.crc)
      if lost.offered is not None:
        state.retire(lost.asked[0], lost.offered.payload.handle)
    state.away.setdefault(p, away)
  for round_ in list(state.rounds.values()):
    if round_.fragment in event.fragments:
      _give_up(state, round_.number, event.reason)
  for learner, member in list(state.members.items()):
    for straggler in member.stragglers:
      if state.config.fragment_of(straggler.round) in event.fragments:
        offers.drop_straggler(state, learner, straggler)
        state.retire(learner, straggler.handle)
  listed = ', '.join(str(p) for p in event.fragments)
  state.record('absent', -1, f'fragments {listed}: {event.reason}')


def _give_up(state: SyncerState, number: int, reason: str):
  """Reopens a round whose pulled bytes are gone: it asks its learners again."""
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
      state.retire(learner, admitted.handle)
    state.send(learner, messages.OfferAgain(number, reason))


def on_back(state: SyncerState, event: syncer_events.ShardReturned):
  """The bytes of these fragments are here again, possibly at old versions."""
  alone = not _others_wait(state)
  for held in event.held:
    p, version = held.fragment, state.versions[held.fragment]
    away = state.away.pop(p, ShardUnavailable())
    if held.version == version and held.same:
      state.record('back', -1, f'fragment {p} at version {version}')
      told_own = away.adopted and away.crc is None
      serve(state, p, state.members if told_own else away.wanted_by)
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

  A new leader process waits for its shards, or a restarted syncer for
  donations: Θ is not whole.
  """
  return holds_up(state) or _others_wait(state)


def holds_up(state: SyncerState) -> bool:
  """Returns True while a new leader process waits for its shards.

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


def _others_wait(state: SyncerState) -> bool:
  """Returns True while no round at all may proceed."""
  return state.awaits_shards or any(not x.alone for x in state.lost.values())
