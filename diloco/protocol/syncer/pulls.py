# SPDX-License-Identifier: Apache-2.0
"""Pulls the bytes of a round's contributions, and handles late and bad ones."""

import bisect
import typing
from collections.abc import Iterable

from diloco.protocol import messages, outliers, timeouts
from diloco.protocol.syncer import collecting, offers, sessions
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.state import (
  AdmittedOffer,
  Round,
  Stage,
  Straggler,
  SyncerState,
)
from diloco.protocol.timeouts import TransferTime

# A learner that cannot be pulled from, or sends what cannot be merged, would
# hold up a quorum that counts it; after this many failures its session ends,
# and it may join again.
FAILED_PULLS_MAX = 3


def begin(
  state: SyncerState, round_: Round, admitted: Iterable[int], reason: str
):
  """Ends the grace window and asks for the bytes that are not here yet."""
  pulls = {m: a for m, a in round_.pulls.items() if m in round_.pulled}
  for learner in sorted(admitted):
    if learner not in pulls:
      pulls[learner] = _pull(state, round_, learner)
  round_.stage = Stage.PULLING
  round_.pull_began_s = state.now
  round_.held_s = None
  round_.pulls = dict(sorted(pulls.items()))
  round_.reason = reason
  round_.candidates = round_.waits = None


def _pull(state: SyncerState, round_: Round, learner: int) -> AdmittedOffer:
  """Asks for the bytes of a learner's newest offer of the fragment."""
  member = state.members[learner]
  held, session = member.offers[round_.fragment], member.incarnation
  state.emit(syncer_events.Pull(round_.number, learner, session, held.offer))
  return AdmittedOffer(session, held, member.step_s.or_zero())


def on_pulled(state: SyncerState, event: syncer_events.Pulled):
  """Notes the bytes of one contribution, which have arrived."""
  _end_straggler(state, event)
  pull = _awaited(state, event)
  if pull is not None:
    round_, admitted = pull
    waited_s = state.now - round_.pull_began_s
    _measure(state, event.learner, admitted.nbytes, waited_s)
    round_.pulled.add(event.learner)
    round_.norms[event.learner] = event.norm
    state.change(event.learner, failed_pulls=0)
    offers.use_up(state, event.learner, admitted, pulled=True)


def on_pull_failed(state: SyncerState, event: syncer_events.PullFailed):
  """Lets the round go on without a contribution."""
  _end_straggler(state, event)
  pull = _awaited(state, event)
  if pull is not None:
    round_, admitted = pull
    state.record('pull_failed', event.learner, event.reason)
    waited_s = state.now - round_.pull_began_s
    # Unusable bytes did arrive.
    note = _measure if event.unusable else _note_failure
    note(state, event.learner, admitted.nbytes, waited_s)
    offers.leave_out(state, round_, event.learner)
    offers.use_up(state, event.learner, admitted)
    if event.unusable and sessions.record_violation(
      state, event.learner, event.reason
    ):
      return  # Its session is over.
    _ask_again(state, round_.number, event.learner, event.reason, waited_s)


def take_last_offers(state: SyncerState, round_: Round):
  """Pulls what a leaving learner has offered since its offer was admitted.

  It makes no further offer: steps that came while the older offer was being
  pulled would be lost. Once the round merges, it is too late.
  """
  for learner in sorted(state.members.leaving & round_.pulls.keys()):
    admitted = round_.pulls[learner]
    held = state.members[learner].offers.get(round_.fragment)
    if held is None or held is admitted.held:
      continue
    offer, older = held.offer, admitted.held.offer
    has_more = offer.c_steps > older.c_steps
    if offer.base_version != older.base_version or not has_more:
      continue
    is_here = learner in round_.pulled
    offers.drop_pull(state, round_, learner)
    if not is_here:
      offers.use_up(state, learner, admitted)
    newer = {learner: _pull(state, round_, learner)}
    round_.pulls = dict(sorted((round_.pulls | newer).items()))


def give_up_late(state: SyncerState, round_: Round):
  """Gives up pulls that exceed their time limit.

  Nothing more is pulled from such a learner until it speaks again.
  """
  for learner in _waits(state, round_).late(state.now):
    admitted = round_.pulls[learner]
    waited_s = state.now - round_.pull_began_s
    _note_failure(state, learner, admitted.nbytes, waited_s)
    reason = f'not pulled in {waited_s:.2f} s'
    state.record('late', learner, f'round {round_.number}: {reason}')
    state.change(learner, late=True)
    round_.waited = True
    offers.drop_pull(state, round_, learner)
    offers.use_up(state, learner, admitted)
    _ask_again(state, round_.number, learner, reason, waited_s)


def late_deadlines(state: SyncerState) -> list[float]:
  """Returns when the next pull of each round is given up."""
  pulling = (r for r in state.rounds.values() if r.stage is Stage.PULLING)
  late = (_waits(state, round_).late_at_s for round_ in pulling)
  return [at_s for at_s in late if at_s is not None]


def live_pulled(state: SyncerState, round_: Round) -> int:
  """Returns how many live learners' bytes a round has."""
  return len(round_.pulled) - len(round_.pulled & state.members.leaving)


def leave_stragglers(state: SyncerState, round_: Round, holds_up: bool) -> bool:
  """Continues without learners that are not waited for; their pulls go on.

  Args:
    holds_up: True if a later round is due, but too many are open.

  Returns:
    True if the round waits for no more bytes.
  """
  missing = [m for m in round_.pulls if m not in round_.pulled]
  if not missing:
    _account_for_hold(state, round_, holds_up)
    return True
  enough = live_pulled(state, round_)
  if state.finishing or not collecting.has_quorum(state, enough):
    return False
  left = _waits(state, round_)
  if not left.go_on(may_hold=False) and round_.held_s is None:
    round_.held_s = state.now
  may_hold = not holds_up or state.now >= state.hold_again_s
  if left.go_on(may_hold):
    return False
  for learner in missing:
    admitted = round_.pulls[learner]
    pull = admitted.handle, admitted.nbytes, round_.pull_began_s
    straggler = Straggler(round_.number, *pull)
    offers.forget(state, learner, admitted.held)
    stragglers = *state.members[learner].stragglers, straggler
    state.change(learner, stragglers=stragglers)
    state.record('left_out', learner, f'round {round_.number}: slow bytes')
    offers.leave_out(state, round_, learner)
  _account_for_hold(state, round_, holds_up)
  return True


def _account_for_hold(state: SyncerState, round_: Round, holds_up: bool):
  """Sets when a round may next wait for slow bytes, by what this one cost."""
  if round_.held_s is None:
    return
  if holds_up:
    held_s = state.now - round_.held_s
    state.hold_again_s = state.now + held_s / timeouts.HELD_SHARE
  round_.held_s = None


def give_up_stragglers(state: SyncerState):
  """Gives up the stragglers whose time is up."""
  for learner, straggler in _stragglers(state):
    if state.now < _straggler_limit_s(state, learner, straggler):
      continue
    if learner not in state.members.straggling:
      continue  # Its session ended with an earlier one.
    offers.drop_straggler(state, learner, straggler)
    waited_s = state.now - straggler.began_s
    reason = f'not pulled in {waited_s:.2f} s'
    state.record('late', learner, f'round {straggler.round}: {reason}')
    _fail_straggler(state, learner, straggler, reason)


def straggler_deadlines(state: SyncerState) -> list[float]:
  """Returns when each straggler is given up."""
  return [_straggler_limit_s(state, *each) for each in _stragglers(state)]


def _stragglers(state: SyncerState) -> list[tuple[int, Straggler]]:
  """Returns all stragglers, with their learners in ascending id."""
  members = state.members
  return [
    (m, x) for m in sorted(members.straggling) for x in members[m].stragglers
  ]


def _straggler_limit_s(
  state: SyncerState, learner: int, straggler: Straggler
) -> float:
  time, knob = _transfer_time(state, learner), state.config.patience
  return straggler.began_s + timeouts.pull_max_s(time, straggler.nbytes, knob)


def _end_straggler(
  state: SyncerState, event: syncer_events.Pulled | syncer_events.PullFailed
):
  """Ends a straggler's pull, which at least shows how long its bytes take."""
  member = state.members.get(event.learner)
  if member is None or member.incarnation != event.incarnation:
    return
  ended = event.round, event.handle
  same = (x for x in member.stragglers if (x.round, x.handle) == ended)
  straggler = next(same, None)
  if straggler is None:
    return
  if isinstance(event, syncer_events.PullFailed):
    state.record('pull_failed', event.learner, event.reason)
    offers.forget_straggler(state, event.learner, straggler)
    _fail_straggler(state, event.learner, straggler, event.reason)
    return
  waited_s = state.now - straggler.began_s
  _measure(state, event.learner, straggler.nbytes, waited_s)
  offers.drop_straggler(state, event.learner, straggler)
  state.change(event.learner, failed_pulls=0)
  state.retire(event.learner, event.handle)
  again = messages.OfferAgain(event.round, 'its bytes came too late')
  state.send(event.learner, again)


def _fail_straggler(
  state: SyncerState, learner: int, straggler: Straggler, reason: str
):
  waited_s = state.now - straggler.began_s
  _note_failure(state, learner, straggler.nbytes, waited_s)
  state.retire(learner, straggler.handle)
  _ask_again(state, straggler.round, learner, reason, waited_s)


def _transfer_time(state: SyncerState, learner: int) -> TransferTime:
  return state.transfers.get(learner, TransferTime())


def _measure(state: SyncerState, learner: int, nbytes: int, took_s: float):
  state.resting.pop(learner, None)
  state.transfers[learner] = _transfer_time(state, learner).add(nbytes, took_s)
  state.touched.add(learner)


def _note_failure(
  state: SyncerState, learner: int, nbytes: int, waited_s: float
):
  time, knob = _transfer_time(state, learner), state.config.patience
  state.transfers[learner] = timeouts.after_pull_failed(
    time, nbytes, waited_s, knob
  )
  state.touched.add(learner)


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
  admitted = round_.pulls.get(event.learner)
  if admitted is None or event.learner in round_.pulled:
    return None
  pulled = admitted.incarnation, admitted.handle
  same = pulled == (event.incarnation, event.handle)
  return (round_, admitted) if same else None


def refuse_outliers(state: SyncerState, round_: Round):
  """Removes contributions whose norm is far from the others' from a round."""
  norms = {
    m: outliers.per_root_step(norm, round_.pulls[m].held.offer.c_steps)
    for m, norm in sorted(round_.norms.items())
  }
  if not norms:
    return  # All were judged before.
  usual = state.usual_norms[round_.fragment]
  refused = outliers.outliers(norms, usual)
  for learner, reason in refused.items():
    offers.drop_pull(state, round_, learner)
    state.record('outlier', learner, f'round {round_.number}: {reason}')
    if not sessions.record_violation(state, learner, reason):
      # The quorum may need it, and at τ = 0 the learner may be waiting.
      state.send(learner, messages.OfferAgain(round_.number, reason))
  # Judged once: the next time only what has come since.
  state.usual_norms[round_.fragment] = outliers.usual_after(
    usual, {m: n for m, n in norms.items() if m not in refused}, len(refused)
  )
  round_.norms.clear()


# What a round waits for ------------------------------------------------------


def _waits(state: SyncerState, round_: Round) -> 'Waits':
  """Returns what a pulling round waits for, up to date."""
  collecting.settle(state)
  moved = round_.touched
  if round_.waits is None:
    round_.waits, moved = Waits(), set(round_.pulls)
  for learner in moved:
    round_.waits.put(learner, _awaited_pull(state, round_, learner))
  round_.touched.clear()
  return round_.waits


class AwaitedPull(typing.NamedTuple):
  """The facts about one contribution on which a pulling round decides."""

  usual_s: float | None  # Its bytes usually take so long; None: unknown.
  failed: bool  # The last pull from its learner failed.
  late_at_s: float | None  # When it is given up; None: its bytes are here.


class Waits:
  """Keeps what a pulling round waits for sorted as it changes.

  With a quorum it does not wait for a learner whose last pull failed, which
  gets only as long as the others take. For a learner far slower than the rest
  it waits only if that holds up no other round, or if slow ones have not done
  so for a while.
  """

  def __init__(self):
    self._pulls: dict[int, AwaitedPull] = {}
    self._usual_s: list[float] = []  # Ascending, like the two below.
    self._late_at_s: list[tuple[float, int]] = []
    self._hoped_s: list[float] = []  # Usual times of those worth a wait.

  def put(self, learner: int, pull: AwaitedPull | None):
    """Notes a contribution as it is now; None: it is none of the round."""
    before = self._pulls.pop(learner, None)
    if before is not None:
      for times, value in self._places(learner, before):
        del times[bisect.bisect_left(times, value)]
    if pull is not None:
      self._pulls[learner] = pull
      for times, value in self._places(learner, pull):
        bisect.insort(times, value)

  def _places(self, learner: int, pull: AwaitedPull):
    """Yields the lists that a pull is in, each with its value there."""
    if pull.usual_s is not None:
      yield self._usual_s, pull.usual_s
    if pull.late_at_s is not None:
      yield self._late_at_s, (pull.late_at_s, learner)
      if not pull.failed:
        usual_s = float('-inf') if pull.usual_s is None else pull.usual_s
        yield self._hoped_s, usual_s

  @property
  def late_at_s(self) -> float | None:
    """Returns when the next pull is given up; None if there is none."""
    return self._late_at_s[0][0] if self._late_at_s else None

  def late(self, now: float) -> list[int]:
    """Returns the learners whose pulls have taken too long, in ascending id."""
    end = bisect.bisect_right(self._late_at_s, (now, float('inf')))
    return sorted(m for _, m in self._late_at_s[:end])

  def go_on(self, may_hold: bool) -> bool:
    """Returns True if a round with a quorum still waits for bytes.

    Args:
      may_hold: True if it may wait for slow learners.
    """
    if may_hold or not self._hoped_s:
      return bool(self._hoped_s)
    known = len(self._usual_s)
    median_s = self._usual_s[(known - 1) // 2] if known else 0.0
    return self._hoped_s[0] <= timeouts.SLOW_FACTOR * median_s


def _awaited_pull(
  state: SyncerState, round_: Round, learner: int
) -> AwaitedPull | None:
  """Returns what a round knows of a contribution; None: it has none."""
  admitted = round_.pulls.get(learner)
  if admitted is None:
    return None
  time = _transfer_time(state, learner)
  limit_s = timeouts.pull_max_s(time, admitted.nbytes, state.config.patience)
  late_at_s = round_.pull_began_s + limit_s
  if learner in round_.pulled:
    late_at_s = None
  return AwaitedPull(time.usual_s(admitted.nbytes), time.failed, late_at_s)
