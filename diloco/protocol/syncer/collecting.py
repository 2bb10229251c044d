# SPDX-License-Identifier: Apache-2.0
"""A round that collects: whose offers it can merge, and how long it waits.

It waits for K offers, then for the end of the grace window. A decision returns
its reason.
"""

from collections.abc import Iterable

from diloco.protocol.round_policy import Verdict
from diloco.protocol.syncer import offers, recovery
from diloco.protocol.syncer.state import Round, Stage, SyncerState


def why_over(state: SyncerState, round_: Round) -> str | None:
  """Returns why a round collects no longer; None if it goes on waiting.

  It waits for the quorum, then for the end of the grace window.
  """
  if state.finishing:
    return _why_over_at_last(state, round_)
  pool = candidates(state, round_)
  enough = pool.enough(quorum_now(state))
  if not enough.holds:
    # This applies in GRACE, too: a learner of the quorum may have died since.
    collect_again(round_)
    return None
  if round_.stage is Stage.COLLECTING:
    if round_.quorum_at_s is None:
      state.quorum_s = state.quorum_s.add(state.now - round_.due_s)
    round_.stage = Stage.GRACE
    round_.quorum_at_s = state.now
    round_.closes_at_s = state.now + _grace_s(state)
  return state.policy.why_over(
    state.now, round_.closes_at_s, not pool.complete, enough.reason
  )


def collect_again(round_: Round):
  """Has a round wait for more offers; those whose bytes it has are kept."""
  round_.stage = Stage.COLLECTING
  round_.closes_at_s = None
  round_.waits = None


def _why_over_at_last(state: SyncerState, round_: Round) -> str | None:
  """Collects for a last round until `finish_at_s`, even below the quorum."""
  if state.finish_at_s is None:
    return None
  live = state.members.live
  all_in = bool(live) and live <= state.members.handed_in
  reason = state.policy.why_finish_over(
    state.now, state.finish_at_s, all_in and _are_all_back(state)
  )
  if reason is not None:
    round_.quorum_at_s = round_.quorum_at_s or state.now
  return reason


def _are_all_back(state: SyncerState) -> bool:
  """Returns True if all learners that were live before a restart are back.

  If the ledger was lost, the syncer cannot tell which those are: a learner that
  is back may know less than the others, and must not end the run for them.
  """
  if not state.finish_was_told:
    return True
  return bool(state.were_live) and state.were_live <= state.members.live


def has_quorum(state: SyncerState, offers: int) -> bool:
  """Returns True if a round may merge so many offers."""
  live = len(state.members.live)
  return state.policy.enough(offers, live, quorum_now(state)).holds


def quorum_now(state: SyncerState) -> int:
  """Returns K, at most the number of pullable learners and at least 1.

  A learner that has rested counts again once its bytes have arrived: until
  then its pulls are trials that no round waits for.
  """
  live = state.members.live
  return state.policy.quorum(len(live), len(live - state.resting.keys()))


# The grace window ------------------------------------------------------------


def sync_s(state: SyncerState) -> float:
  """Returns ξ_sync, the time in seconds to pull, merge and send back.

  The way back is that of the K-th fastest learner.
  """
  live = (state.members[m] for m in state.members.live)
  way_back_s = kth_s((m.way_back_s.value_s for m in live), quorum_now(state))
  return state.sync_s.or_zero() + (way_back_s or 0.0)


def _grace_s(state: SyncerState) -> float:
  """Returns ξ_grace in seconds, from ξ_step of the K-th fastest learner.

  The K-th fastest learner sets the pace of the run.
  """
  live = (state.members[m] for m in state.members.live)
  step_s = kth_s((m.step_s.value_s for m in live), quorum_now(state))
  return state.policy.window_s(step_s, state.quorum_s.or_zero(), sync_s(state))


def kth_s(averages: Iterable[float | None], k: int) -> float | None:
  """Returns the K-th smallest of the known averages; None if there is none."""
  known = sorted(x for x in averages if x is not None)
  return known[min(k, len(known)) - 1] if known else None


def window_deadlines(state: SyncerState) -> list[float]:
  """Returns when grace windows end, or the wait for the last offers."""
  waiting = [
    r
    for r in state.rounds.values()
    if r.stage in (Stage.COLLECTING, Stage.GRACE)
    and not recovery.is_away(state, r.fragment)
  ]
  if state.finishing:
    is_timed = waiting and state.finish_at_s is not None
    return [state.finish_at_s] if is_timed else []
  return [r.closes_at_s for r in waiting if r.stage is Stage.GRACE]


# The candidates --------------------------------------------------------------


def candidates(state: SyncerState, round_: Round) -> 'Candidates':
  """Returns a collecting round's candidates, up to date."""
  settle(state)
  version = state.versions[round_.fragment]
  known, moved = round_.candidates, round_.touched
  if known is None or (known.version, known.last) != (version, state.finishing):
    known = round_.candidates = Candidates(state, round_)
    moved = state.members
  for learner in moved:
    known.look(state, round_, learner)
  round_.touched.clear()
  return known


def settle(state: SyncerState):
  """Tells the open rounds which learners have changed."""
  state.touched.update(state.resting)  # Whether one rests depends on the time.
  for round_ in state.rounds.values():
    round_.touched |= state.touched
  state.touched.clear()


def _rests(state: SyncerState, learner: int) -> bool:
  """Returns True if a learner is not pulled from now; never true for all."""
  if state.now >= state.resting.get(learner, state.now):
    return False
  live = state.members.live
  return len(live) > len(state.resting) or any(
    state.now >= state.resting.get(m, state.now) for m in live
  )


class Candidates:
  """Counts the candidates of a due round as they change.

  Attributes:
    version: the version of the fragment before the round.
    last: True if the run is finishing: no more steps are made, so clocks do not
      count.
    admitted: the learners whose offers can be merged now.
  """

  def __init__(self, state: SyncerState, round_: Round):
    self.version, self.last = state.versions[round_.fragment], state.finishing
    self.admitted: set[int] = set()
    self._policy = state.policy
    spacing_steps = state.config.spacing_steps
    self._due_step = 0 if self.last else round_.number * spacing_steps
    self._all: set[int] = set()
    self._live: set[int] = set()  # All but those that are leaving.
    self._awaited: set[int] = set()  # Live ones that hold the window open.

  def look(self, state: SyncerState, round_: Round, learner: int):
    """Counts a learner as it is now."""
    for each in self._all, self._live, self.admitted, self._awaited:
      each.discard(learner)
    member = state.members.get(learner)
    if member is None or not member.ready:
      return
    held = member.offers.get(round_.fragment)
    rests = _rests(state, learner) and not self.last
    if learner in round_.pulled:
      held = round_.pulls[learner].held
    elif member.late or member.stragglers or rests:
      return
    # A leaving learner is not waited for, and has no clock.
    clock = None if member.leaving else state.pace[learner]
    offer, policy, due_step = held and held.offer, self._policy, self._due_step
    merged = offers.merged_steps(state, learner, round_.fragment)
    self._all.add(learner)
    if (
      offer is not None
      and offer.c_steps >= 1
      and policy.admits(clock, due_step)
      and not offers.why_void(offer, merged, self.version, policy.config)
    ):
      self.admitted.add(learner)
    if clock is None:
      return
    self._live.add(learner)
    if policy.awaits(round_.number, due_step, clock, offer and offer.round):
      self._awaited.add(learner)

  @property
  def complete(self) -> bool:
    """True if there is no other learner to wait for."""
    return not self._awaited

  def enough(self, quorum: int) -> Verdict:
    """Says if those admitted suffice: K of them, K ≤ live learners."""
    if not self._all:
      return Verdict(False, 'no live learner')
    # A leaving learner is included, but the round does not close for it alone.
    admitted = self.admitted & self._live if self._live else self.admitted
    return self._policy.enough(len(admitted), len(self._live), quorum)
