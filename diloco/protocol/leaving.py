# SPDX-License-Identifier: Apache-2.0
"""A learner leaves in good order, within the notice that it was given.

At its next boundary it makes a last offer and ceases; it stays until the
round of that offer has closed, or its time is up (a preempted machine).

One that is cut off from the syncer leaves, too, once the run's steps are made:
it would train for ever.
"""

from diloco.protocol import learner_io, messages, patience
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


def wait_if_cut_off(core: Core) -> bool:
  """Whether the loop waits at its boundary: for the syncer, at the run's end.

  By its own view of t no step is left to be made. What it has goes to its
  disk; if the syncer is back in time, it says how the run goes on.
  """
  state = core.state
  if state.connected or state.global_step < core.config.total_steps:
    return False
  if state.give_up_at_s is None:
    wait_s = patience.end_wait_s(core.config.patience)
    core.set(give_up_at_s=state.now + wait_s)
    core.effects.append(learner_io.Save())
  return True


def give_up_in_time(core: Core):
  """Nobody will say how the run goes on."""
  state = core.state
  due = state.give_up_at_s is not None and state.now >= state.give_up_at_s
  if due and not state.left:
    core.leave(
      f'cut off from the syncer for {patience.end_wait_s(core.config.patience)}'
      f' s after the last step of the run, {core.config.total_steps}',
      cut_off=True,
    )


def deadline(core: Core) -> float | None:
  """When its time is up."""
  if core.state.left:
    return None
  times = core.state.leave_at_s, core.state.give_up_at_s
  return min((t for t in times if t is not None), default=None)


def _leave(core: Core, reason: str):
  if core.state.connected:
    core.send(messages.Goodbye(reason))
  core.leave(reason, stopped=True)
