# SPDX-License-Identifier: Apache-2.0
"""A restarted syncer gets back from learners what its checkpoint lacks.

The ledger is written at every close, the fragments themselves less often. So
a restarted syncer knows which version of each fragment the run had reached
and, of some, has only an older one. Learners hold the newer: they donate it,
proven by its CRC. Until then no round merges; learners train on. A fragment
that nobody brings in time goes on from the newest copy that there is, under
the number that it had: versions never fall (design: §3, Syncer restart).
"""

import dataclasses

from diloco.protocol import messages, patience, syncer_io
from diloco.protocol.state import LostFragment, State


def begin(state: State, held: tuple[int, ...], crcs: tuple[int, ...]):
  """Right after a restart.

  Args:
    state: resumed from the ledger.
    held: the version that is here, by fragment.
    crcs: by fragment, of the bytes at the ledger's versions.
  """
  state.knows_less = True
  for p, version in enumerate(state.versions):
    assert held[p] <= version, f'{held=} is newer than the ledger'
    if held[p] < version:
      state.lost[p] = LostFragment(version, crcs[p], held[p])


def adopt(state: State, hello: messages.Hello):
  """A learner may know of rounds that the ledger does not.

  Only before this process has closed a round: the ledger was lost, or is an
  old copy, and what learners hold is the run.
  """
  if all(v <= state.versions[p] for p, v in enumerate(hello.versions)):
    return
  closed = max(
    (v - 1) * state.config.fragments + p + 1
    for p, v in enumerate(hello.versions)
  )
  reason = f'round {closed} closed, not {state.closed_round} as recorded'
  state.record('adopted', hello.learner, reason)
  before = state.versions
  state.closed_round = closed
  state.versions = list(state.config.versions_at(closed))
  state.rounds.clear()
  for p, version in enumerate(state.versions):
    if version > before[p]:
      lost = state.lost.get(p)
      held = lost.held if lost else before[p]
      here = hello.versions[p] == version
      crc = hello.crcs[p] if here else None
      wanted_by = lost.wanted_by if lost else ()
      state.lost[p] = LostFragment(version, crc, held, wanted_by=wanted_by)


def ask(state: State):
  """Asks for each lost fragment whoever holds it; gives up in time."""
  if not state.lost:
    return
  if state.give_up_lost_s is None and state.members:
    floor_s = patience.silence_floor_s(state.config.patience)
    state.give_up_lost_s = state.now + floor_s
  late = state.give_up_lost_s is not None and state.now >= state.give_up_lost_s
  for p, lost in sorted(state.lost.items()):
    if lost.asked is not None:
      continue
    version = lost.version
    holders = _holders(state, p, lost, version)
    if not holders and late:
      version = _newest_elsewhere(state, p, lost)
      holders = _holders(state, p, lost, version)
    if holders:
      state.lost[p] = dataclasses.replace(lost, asked=holders[0])
      request = messages.DonateFragment(p, version)
      state.send(holders[0][0], request)
    elif late:
      _go_on_with_less(state, p, lost)


def _holders(
  state: State, p: int, lost: LostFragment, version: int
) -> list[tuple[int, int]]:
  """The sessions that can donate that version, in ascending id."""
  return [
    (m, x.incarnation)
    for m, x in sorted(state.members.items())
    if x.versions[p] == version > lost.held
    and (m, x.incarnation) not in lost.tried
    and (version < lost.version or lost.crc in (None, x.crcs[p]))
  ]


def _newest_elsewhere(state: State, p: int, lost: LostFragment) -> int:
  """The newest version that any session may still donate, or what is here."""
  versions = [
    x.versions[p]
    for m, x in state.members.items()
    if (m, x.incarnation) not in lost.tried and x.versions[p] < lost.version
  ]
  return max([lost.held, *versions])


def _go_on_with_less(state: State, p: int, lost: LostFragment):
  reason = (
    f'fragment {p}: nobody has version {lost.version}; goes on from {lost.held}'
  )
  state.record('lost', -1, reason)
  _found(state, p)


def on_fragment_offered(
  state: State, learner: int, offered: messages.FragmentOffered
):
  """What was asked for is pulled; anything else is withdrawn."""
  member = state.members[learner]
  session = learner, member.incarnation
  lost = state.lost.get(offered.fragment)
  if lost is None or lost.asked != session:
    state.retire(learner, offered.payload.handle)
    return
  # Of an older version the learner's own word is all that there is.
  exact = offered.version == lost.version and lost.crc is not None
  crc = lost.crc if exact else member.crcs[offered.fragment]
  if offered.version < lost.version:
    reason = (
      f'fragment {offered.fragment}: nobody has version {lost.version}; goes '
      f'on from {offered.version} of learner {learner}'
    )
    state.record('lost', -1, reason)
  state.emit(syncer_io.TakeFragment(*session, lost.version, crc, offered))


def on_taken(state: State, event: syncer_io.FragmentTaken):
  """Θ_p is whole again."""
  lost = state.lost.get(event.fragment)
  if lost is None:
    return
  reason = f'fragment {event.fragment} at version {lost.version}'
  state.record('donated', lost.asked[0] if lost.asked else -1, reason)
  _found(state, event.fragment)


def on_failed(state: State, event: syncer_io.FragmentFailed):
  """Somebody else is asked."""
  lost = state.lost.get(event.fragment)
  session = event.learner, event.incarnation
  if lost is None or lost.asked != session:
    return
  state.record('pull_failed', event.learner, event.reason)
  tried = *lost.tried, session
  state.lost[event.fragment] = dataclasses.replace(
    lost, asked=None, tried=tried
  )


def on_end_of_session(state: State, session: tuple[int, int]):
  """Whoever was asked has gone: `ask` finds another.

  A pull that is under way still says how it ended; that of a session that is
  not asked any more is not listened to.
  """
  for p, lost in state.lost.items():
    if lost.asked == session:
      state.lost[p] = dataclasses.replace(
        lost, asked=None, tried=(*lost.tried, session)
      )


def postpone(state: State, learner: int, p: int) -> bool:
  """Whether a learner that wants a fragment has to wait for it."""
  lost = state.lost.get(p)
  if lost is None:
    return False
  wanted_by = *lost.wanted_by, learner
  state.lost[p] = dataclasses.replace(lost, wanted_by=wanted_by)
  return True


def _found(state: State, p: int):
  lost = state.lost.pop(p)
  state.emit(syncer_io.Relabel(p, lost.version))
  for learner in sorted(set(lost.wanted_by) & state.members.keys()):
    incarnation = state.members[learner].incarnation
    reason = f'fragment {p} is here again'
    state.emit(syncer_io.Serve(learner, incarnation, p, reason))


def deadlines(state: State) -> list[float]:
  """When lost fragments are given up."""
  if not state.lost or state.give_up_lost_s is None:
    return []
  waiting = any(lost.asked is None for lost in state.lost.values())
  later = state.give_up_lost_s > state.now
  return [state.give_up_lost_s] if waiting and later else []
