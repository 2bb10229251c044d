# SPDX-License-Identifier: Apache-2.0
"""Lets a learner leave in good order, within the notice time it was given.

At its next boundary the learner offers its last steps and ceases. It stays
until each of these offers is merged or refused, or until its time is up (on a
preempted machine), and reports which.

A learner that is cut off from the syncer leaves, too, once the run's steps are
made; otherwise it would train for ever.
"""

from diloco.protocol import messages, timeouts
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner.state import Core, LastOffer
from diloco.protocol.values import replace_unchecked


def on_stop(core: Core, event: learner_events.Stop):
  """Sets the time to leave; a second request changes nothing."""
  if core.state.leave_at_s is not None or core.state.left:
    return
  core.set(leave_at_s=core.state.now + event.notice_s)
  if not core.state.began:
    _leave(core, 'stopped before it began')


def leave_in_time(core: Core):
  """Leaves once the outcome of its last steps is known, or time is up."""
  state = core.state
  if state.leave_at_s is None or state.left:
    return
  # At the end of the run it leaves with the others, if that is in time.
  goes = state.ceased and state.last_round is None and not state.done
  if state.now >= state.leave_at_s:
    _decide_open(core, 'not merged within the notice')
  elif not goes or _awaits_outcome(core):
    return
  _leave(core, f'stopped; {_outcomes(core)}')


# The last offers --------------------------------------------------------------


def note_last_offer(core: Core, p: int):
  """Notes the newest offer of a fragment as the last one of this session."""
  newest = core.state.fragments[p].offers[-1]
  others = (x for x in core.state.last_offers if x.fragment != p)
  last = LastOffer(p, newest.handle, newest.step)
  core.set(last_offers=(*others, last))


def on_merged(core: Core, p: int, handle: int, step: int, by: str):
  """Notes that an own offer, up to own step `step`, was merged into Θ."""
  for last in core.state.last_offers:
    if last.fragment == p:
      whole = last.handle == handle or step >= last.step
      extent = '' if whole else f'only those up to step {step} '
      _set(core, last, outcome=f'{extent}merged by {by}')


def on_retired(core: Core, retired: messages.Retired):
  """Notes that the syncer has the bytes of an offer, or does not want them."""
  for last in _open(core):
    if last.handle in retired.handles:
      fields = {'pulled': True} if retired.pulled else {'outcome': 'refused'}
      _set(core, last, **fields)


def on_offer_again(core: Core, offer_again: messages.OfferAgain):
  """Marks a pulled offer as refused, as a ceased learner makes no more."""
  p = core.config.fragment_of(offer_again.round)
  for last in _open(core):
    if last.fragment == p and last.pulled:
      _set(core, last, outcome=f'refused: {offer_again.reason}')


def on_not_offered(core: Core, handle: int):
  """Notes that an offer was not made for lack of room or of a session."""
  for last in _open(core):
    if last.handle == handle:
      _set(core, last, outcome='not offered')


def on_disconnected(core: Core):
  """Closes all open offers, which end with the session."""
  _decide_open(core, 'not merged: the session ended')


def _decide_open(core: Core, outcome: str):
  for last in _open(core):
    _set(core, last, outcome=outcome)


def _open(core: Core) -> list[LastOffer]:
  """Returns the last offers whose outcome is not known yet."""
  return [x for x in core.state.last_offers if not x.outcome]


def _set(core: Core, last: LastOffer, **fields):
  core.set(
    last_offers=tuple(
      replace_unchecked(x, **fields) if x is last else x
      for x in core.state.last_offers
    )
  )


def _awaits_outcome(core: Core) -> bool:
  """Returns True if an outcome is open, or an older offer may yet be merged."""
  state = core.state
  if not state.connected:
    return False
  for last in state.last_offers:
    fragment = state.fragments[last.fragment]
    merging = fragment.pulled and fragment.offered_round > state.closed_known
    if not last.outcome or (last.outcome == 'refused' and merging):
      return True
  return False


def _outcomes(core: Core) -> str:
  outcomes = [
    f'of fragment {x.fragment} up to step {x.step}: {x.outcome}'
    for x in sorted(core.state.last_offers, key=lambda x: x.fragment)
  ]
  text = ', '.join(outcomes)
  return f'last steps {text}' if text else 'no last steps on offer'


# The end of the run -----------------------------------------------------------


def wait_if_cut_off(core: Core) -> bool:
  """Returns True if the loop waits at the run's end for a syncer that is away.

  By the learner's own view of t, no step is left to make. It writes a
  checkpoint; if the syncer returns in time, that decides how the run goes on.
  """
  state = core.state
  if state.connected or state.global_step < core.config.total_steps:
    return False
  if state.give_up_at_s is None:
    wait_s = timeouts.end_wait_s(core.config.patience)
    core.set(give_up_at_s=state.now + wait_s)
    core.effects.append(learner_events.Save())
  return True


def give_up_in_time(core: Core):
  """Leaves when the syncer has stayed away for too long."""
  state = core.state
  due = state.give_up_at_s is not None and state.now >= state.give_up_at_s
  if due and not state.left:
    core.leave(
      f'cut off from the syncer for {timeouts.end_wait_s(core.config.patience)}'
      f' s after the last step of the run, {core.config.total_steps}',
      cut_off=True,
    )


def deadline(core: Core) -> float | None:
  """Returns the time at which the learner leaves, whatever happens."""
  if core.state.left:
    return None
  times = core.state.leave_at_s, core.state.give_up_at_s
  return min((t for t in times if t is not None), default=None)


def _leave(core: Core, reason: str):
  if core.state.connected:
    core.send(messages.Goodbye(reason))
  core.leave(reason, stopped=True)
