# SPDX-License-Identifier: Apache-2.0
"""A learner leaves in good order, within the notice that it was given.

At its next boundary it makes a last offer and ceases; it stays until the
round of that offer has closed, or its time is up (a preempted machine).
"""

from diloco.protocol import learner_io, messages
from diloco.protocol.learner_state import Core


def on_stop(core: Core, event: learner_io.Stop):
  """Asked once; asking again changes nothing."""
  if core.state.leave_at_s is not None or core.state.left:
    return
  core.set(leave_at_s=core.state.now + event.notice_s)
  if not core.state.began:
    _leave(core, 'stopped before it began')


def leave_in_time(core: Core):
  """Leaves once the last offer was used, or can't be, or time is up."""
  state = core.state
  if state.leave_at_s is None or state.left:
    return
  offered = max(
    f.offered_round if f.offered_step is not None else 0
    for f in state.fragments
  )
  # At the end of the run it goes with the others, if that comes in time.
  handed_in = state.ceased and state.last_round is None and not state.done
  waits = state.connected and offered > state.closed_known
  if (handed_in and not waits) or state.now >= state.leave_at_s:
    _leave(core, 'stopped')


def deadline(core: Core) -> float | None:
  """When its time is up."""
  return None if core.state.left else core.state.leave_at_s


def _leave(core: Core, reason: str):
  if core.state.connected:
    core.send(messages.Goodbye(reason))
  core.leave(reason, stopped=True)
