# SPDX-License-Identifier: Apache-2.0
"""The syncer's choice of the learner that gives its state to a newcomer.

The bytes go from peer to peer; the syncer only introduces the two. A learner
that has not completed its own bootstrap never donates, so that a fresh learner
cannot become "the state". Donor and newcomer learn how the other one's hosts
share its state: any learner can donate to any other.
"""

from diloco.protocol import messages
from diloco.protocol.syncer.state import Member, SyncerState


def on_want_state(state: SyncerState, learner: int) -> str | None:
  """A newcomer asks for a donor, for the first time or after one has failed."""
  if state.members[learner].ready:
    return 'wants a state though it has said that it is ready'
  _dismiss(state, learner, state.members[learner])
  _seek(state, learner)
  return None


def _seek(state: SyncerState, learner: int):
  """Puts the newcomer at the end of the queue and drops its current donor."""
  member = state.members[learner]
  tried = dict(member.tried)  # Of each learner its last session.
  if member.donor is not None:
    tried.update([member.donor])
  tried = tuple(tried.items())
  state.change(learner, donor=None, tried=tried, seeks_since_s=state.now)


def assign_donors(state: SyncerState):
  """Gives each waiting newcomer a free donor, in order of arrival.

  A donor serves one newcomer at a time: two copies of a state at once could
  exceed its memory. A newcomer that has completed its bootstrap donates as
  well, so n newcomers need about log2(n) donations in sequence.
  """
  waiting = sorted(
    (state.members[m].seeks_since_s, m) for m in state.members.seeking
  )
  for _, learner in waiting:
    _introduce(state, learner)


def _introduce(state: SyncerState, learner: int):
  member = state.members[learner]
  donors = [
    (m, state.members[m].incarnation) for m in sorted(state.members.live)
  ]
  donors = [donor for donor in donors if donor not in member.tried]
  if not donors:
    state.change(learner, seeks_since_s=None)
    state.send(learner, messages.NoState(_why_none(member)))
    return
  busy = _busy(state)
  free = [donor for donor in donors if donor not in busy]
  if not free:
    return  # Every donor serves another newcomer; a turn will come.
  # One that has failed, and is back in a new session, comes after the others.
  failed = dict(member.tried)
  donor, incarnation = min(free, key=lambda session: session[0] in failed)
  state.change(
    learner, donor=(donor, incarnation), state_offered=False, seeks_since_s=None
  )
  state.record('donor', learner, f'learner {donor} is asked for its state')
  request = messages.Donate(
    learner, member.incarnation, tuple(state.versions), member.partition
  )
  state.send(donor, request)


def _busy(state: SyncerState) -> set[tuple[int, int] | None]:
  """Returns the sessions that are giving their state to a newcomer."""
  return {x.donor for x in state.members.values()}


def _why_none(member: Member) -> str:
  if member.tried:
    return f'no live peer is left, {len(member.tried)} failed'
  return 'no peer'


def on_state_offered(
  state: SyncerState, donor: int, offered: messages.StateOffered
) -> str | None:
  """Forwards the offer to the newcomer, if that still waits for this donor."""
  fragments = state.config.fragments
  whole = (
    len(offered.versions) == len(offered.crcs) == fragments
    and len(offered.payloads) >= fragments
  )
  if not whole or not state.members[donor].ready:
    return f'an impossible donation to learner {offered.learner}'
  if offered.partition != state.members[donor].partition:
    return 'a donation with another partition than its hello'
  session = donor, state.members[donor].incarnation
  newcomer = state.members.get(offered.learner)
  waits = (
    newcomer is not None
    and newcomer.incarnation == offered.incarnation
    and newcomer.donor == session
    and not newcomer.ready
  )
  if not waits:
    over = messages.DonationOver(offered.learner, offered.incarnation)
    state.send(donor, over)
    return None
  state.change(offered.learner, state_offered=True)
  state.send(offered.learner, messages.StateAt(*session, offered))
  return None


def on_state_taken(state: SyncerState, learner: int):
  """Frees the donor: its copy has arrived."""
  _dismiss(state, learner, state.members[learner])
  state.change(learner, donor=None)


def on_ready(state: SyncerState, learner: int):
  """Frees the newcomer's donor: the newcomer has what it needs."""
  _dismiss(state, learner, state.members[learner])
  state.change(learner, donor=None, tried=(), seeks_since_s=None)


def on_end_of_session(state: SyncerState, learner: int, member: Member):
  """Frees the donor of a newcomer that is gone; finds others for its own.

  It is called after the session has been removed.
  """
  _dismiss(state, learner, member)
  find_others(state, learner, member.incarnation)


def find_others(state: SyncerState, learner: int, incarnation: int):
  """Finds other donors for the newcomers of a session that donates no more.

  It is called after that has stopped being live. A newcomer that was
  already told where to pull notices the failure itself and asks again.
  """
  session = learner, incarnation
  for m, member in sorted(state.members.items()):
    if member.donor == session and not member.state_offered:
      _seek(state, m)


def _dismiss(state: SyncerState, learner: int, member: Member):
  """Tells a newcomer's donor, if it has one, that it is no longer needed."""
  if member.donor is None:
    return
  donor, incarnation = member.donor
  if state.is_current(donor, incarnation):
    over = messages.DonationOver(learner, member.incarnation)
    state.send(donor, over)
