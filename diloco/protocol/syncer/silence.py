# SPDX-License-Identifier: Apache-2.0
"""Learners that say nothing, and a syncer that was itself away."""

from diloco.protocol import timeouts
from diloco.protocol.syncer import sessions
from diloco.protocol.syncer.rounds import Stage
from diloco.protocol.syncer.state import SyncerState
from diloco.protocol.values import changed


def silence_deadlines(state: SyncerState) -> list[float]:
  """Returns when each session is given up, and when to look before that.

  The looks are for the syncer itself: a missed one tells it that it was
  suspended. There are none once learners hand in, as there are no more steps to
  report.
  """
  if state.finish_at_s is not None or state.ended or not state.members:
    return []
  knob = state.config.patience
  return [
    state.now + timeouts.look_s(knob),
    state.members.silent_at_s(),
  ]


def give_up_silent(state: SyncerState):
  """Ends the sessions whose deadline has passed."""
  if state.finish_at_s is not None or state.ended:
    return
  if state.now < state.members.silent_at_s():
    return
  silent = [
    learner
    for learner, member in state.members.items()
    if state.now >= member.silent_at_s
  ]
  for learner in silent:
    reason = f'silent for {sessions.silence_max_s(state, learner):.2f} s'
    sessions.end_session(state, learner, reason)


def excuse_silence(state: SyncerState, away_s: float):
  """Extends all deadlines after nothing at all happened for `away_s` seconds.

  If that is far longer than the interval between two looks, the syncer itself
  was suspended (stopped, swapped out). It must not take its own absence for the
  learners': what they sent meanwhile is still unread, and so may be the bytes
  that it was pulling.
  """
  if away_s <= 2 * timeouts.look_s(state.config.patience):
    return
  for learner, member in list(state.members.items()):
    sessions.hear(state, learner, late=member.late)
    state.change(learner, published={})  # They would seem slow.
    if member.straggler is not None:
      began_s = member.straggler.began_s + away_s
      straggler = changed(member.straggler, began_s=began_s)
      state.change(learner, straggler=straggler)
  for round_ in state.rounds.values():
    if round_.stage is Stage.PULLING:
      round_.due_s += away_s
      round_.quorum_at_s += away_s
      round_.pull_began_s += away_s
      round_.waits = None
