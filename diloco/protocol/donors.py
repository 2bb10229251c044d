# SPDX-License-Identifier: Apache-2.0
"""Who gives its state to a newcomer: chosen, and found again, by the syncer.

The bytes go from peer to peer; the syncer only introduces the two. Whoever
has not completed a bootstrap never donates, so that a fresh learner can't
become "the state". Of a learner of several hosts each has but a part, and gives
it to the host of the same number: so only learners of one partition give to
each other.
"""

from diloco.protocol import messages
from diloco.protocol.members import Member
from diloco.protocol.state import State


def on_want_state(state: State, learner: int):
  """A newcomer asks, for the first time or because a donor failed it."""
  dismiss(state, learner)
  _seek(state, learner)


def _seek(state: State, learner: int):
  """To the end of the queue, without the donor of now."""
  member = state.members[learner]
  tried = member.tried
  if member.donor is not None:
    # Without those that have gone: at most M.
    tried = tuple(
      session
      for session in (*member.tried, member.donor)
      if state.is_current(*session)
    )
  state.change(learner, donor=None, tried=tried, seeks_since_s=state.now)


def introduce(state: State):
  """Gives each newcomer that waits a donor that is free, the first first.

  A donor has one newcomer at a time: two copies of a state at once could be
  more than its memory holds. Whoever has completed its bootstrap donates too,
  so that n newcomers need about log2(n) donations one after another.
  """
  waiting = sorted(
    (member.seeks_since_s, m)
    for m, member in state.members.items()
    if member.seeks_since_s is not None
  )
  for _, learner in waiting:
    _introduce(state, learner)


def _introduce(state: State, learner: int):
  member = state.members[learner]
  donors = [
    (m, x.incarnation)
    for m, x in state.live().items()
    if (m, x.incarnation) not in member.tried and not why_unlike(x, member)
  ]
  if not donors:
    state.change(learner, seeks_since_s=None)
    state.send(learner, messages.NoState(_why_none(state, member)))
    return
  busy = _busy(state)
  free = [donor for donor in donors if donor not in busy]
  if not free:
    return  # Each of them serves another: its turn will come.
  donor, incarnation = free[0]
  state.change(
    learner,
    donor=(donor, incarnation),
    state_offered=False,
    seeks_since_s=None,
  )
  state.record('donor', learner, f'learner {donor} is asked for its state')
  request = messages.Donate(learner, member.incarnation, tuple(state.versions))
  state.send(donor, request)


def _busy(state: State) -> set[tuple[int, int]]:
  """The sessions that give their state to a newcomer now."""
  return {x.donor for x in state.members.values() if x.donor is not None}


def why_unlike(donor: Member, newcomer: Member) -> str:
  """Why a donor's state does not fit a newcomer; '' where it does."""
  if donor.partition == newcomer.partition:
    return ''
  return 'no live peer has the same hosts and mesh'


def _why_none(state: State, member: Member) -> str:
  if member.tried:
    return f'no live peer is left, {len(member.tried)} failed'
  unlike = [why_unlike(x, member) for x in state.live().values()]
  return next(filter(None, unlike), 'no peer')


def on_state_offered(state: State, donor: int, offered: messages.StateOffered):
  """Hands it on to the newcomer, if that still waits for this donor."""
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
    return
  state.change(offered.learner, state_offered=True)
  state.send(offered.learner, messages.StateAt(*session, offered))


def on_state_taken(state: State, learner: int):
  """The donor's copy has come: the donor is free for another."""
  dismiss(state, learner)
  state.change(learner, donor=None)


def on_ready(state: State, learner: int):
  """The newcomer has what it needs."""
  dismiss(state, learner)
  state.change(learner, donor=None, tried=(), seeks_since_s=None)


def on_end_of_session(state: State, learner: int, incarnation: int):
  """A donor's newcomers get another.

  Called once it is not live any more. A newcomer that was told where to pull
  finds out by itself, and asks again.
  """
  session = learner, incarnation
  for m, member in sorted(state.members.items()):
    if member.donor == session and not member.state_offered:
      _seek(state, m)


def dismiss(state: State, learner: int):
  """Tells the donor of a newcomer, if it has one, that it is not needed."""
  member = state.members[learner]
  if member.donor is None:
    return
  donor, incarnation = member.donor
  if state.is_current(donor, incarnation):
    over = messages.DonationOver(learner, member.incarnation)
    state.send(donor, over)
