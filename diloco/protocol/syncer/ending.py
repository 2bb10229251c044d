# SPDX-License-Identifier: Apache-2.0
"""The last rounds of a run, and its end."""

from diloco.protocol import timeouts
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer import sessions
from diloco.protocol.syncer.rounds import Round
from diloco.protocol.syncer.state import SyncerState


def say_what_is_left(
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


# The end of the run ----------------------------------------------------------


def begin_to_finish(state: SyncerState):
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
    sessions.begin_to_finish(state, last_round)
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
  told = state.members.handed_in
  if state.finishing or not told or len(told) < len(state.members):
    return
  until = state.told_until_round
  if until is not None and state.closed_round > until:
    return  # Others have made steps since: these are not believed any more.
  for learner in sorted(state.members):
    state.change(learner, leaving=False)
    state.pace.join(learner, 0, state.config.quorum)
  last_round = max(state.members[m].handed_in for m in told)
  sessions.finish_as_told(state, last_round)


def are_all_back(state: SyncerState) -> bool:
  """Returns True if all learners that were live before a restart are back.

  If the ledger was lost, the syncer cannot tell which those are: a learner that
  is back may know less than the others, and must not end the run for them.
  """
  if not state.finish_was_told:
    return True
  return bool(state.were_live) and state.were_live <= state.live().keys()


def end_if_over(state: SyncerState):
  if state.ended or state.closed_round != state.last_round:
    return
  state.ended = True
  # Learners that join from now on adopt what is written.
  state.knows_less = False
  for learner in sorted(state.members):
    state.send(learner, sessions.done_message(state))
  state.emit(syncer_events.End(state.pace.step, state.closed_round))
