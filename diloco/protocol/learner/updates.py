# SPDX-License-Identifier: Apache-2.0
"""A learner's updates: announced, fetched, rebuilt on the host, taken in."""

from diloco.protocol import messages
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner import leaving
from diloco.protocol.learner.offers import next_lead
from diloco.protocol.learner.state import Core, Fragment

RETRY_S = 0.5  # Between two requests for the same fragment.


def on_update(core: Core, update: messages.Update):
  """Notes a closed round, what it means for offers, and fetches its update."""
  _adapt_lead(core, update)
  _note_merged(core, update)
  _on_closed(core, update)
  p = update.fragment
  fragment = core.state.fragments[p]
  core.set_fragment(p, announced=max(fragment.announced, update.version))
  if not core.state.settled and not core.state.began:
    return  # A donor may bring it; what is then missing is requested.
  if fragment.wanted or update.version <= fragment.coming:
    return  # The full fragment that will come is at least as new.
  if update.version == fragment.coming + 1:
    core.set_fragment(p, coming=update.version)
    _expect(core, p, update.version)
    core.effects.append(learner_events.FetchUpdate(update))
  else:
    want(core, p, f'missed version {fragment.coming + 1}')


def on_skipped(core: Core, skipped: messages.Skipped):
  """Notes a round that closed without an update; offers remain valid."""
  _on_closed(core, skipped)


def on_full_fragment(core: Core, message: messages.FullFragment):
  """Fetches a whole fragment and notes the own offer that it includes."""
  p = message.fragment
  named = message.merged_incarnation, message.merged_handle
  fragment = core.state.fragments[p]
  held_otherwise = (
    fragment.host == message.version and fragment.crc != message.crc
  )
  core.set_fragment(
    p,
    told=(message.version, message.crc),
    # The syncer has gone on with other bytes of a version that is here: nothing
    # may begin with these, nor be offered or donated, until the others arrive.
    unlike=fragment.unlike or held_otherwise,
  )
  if not core.state.settled:
    # It was not asked for: its shard is here again. A donor's whole state may
    # be older and would replace it; what is then missing is requested.
    announced = max(fragment.announced, message.version)
    core.set_fragment(p, announced=announced)
    return
  made = fragment.found(*named)
  if made is not None:
    core.set_fragment(p, merged=made)
    by = f'version {message.version}'
    leaving.on_merged(core, p, made.handle, made.step, by)
  core.set_fragment(
    p, coming=message.version, wanted=False, postponed=False, ask_at_s=None
  )
  _expect(core, p, message.version)
  core.effects.append(learner_events.FetchFragment(message))


def on_retired(core: Core, retired: messages.Retired):
  """Drops offers that are of no more use, except those that a round pulled."""
  core.effects.append(learner_events.Forget(retired.handles))
  leaving.on_retired(core, retired)
  for p, fragment in enumerate(core.state.fragments):
    rest = fragment.without(retired.handles)
    if len(rest) == len(fragment.offers):
      continue
    if retired.pulled:
      core.set_fragment(p, pulled=True)
    else:
      core.set_fragment(p, offers=rest)


def _on_closed(core: Core, message: messages.Update | messages.Skipped):
  """Updates the estimate of t from the syncer's view at the close."""
  own_step = message.reported_step or core.state.completed_step
  due_step = message.round * core.config.spacing_steps
  view = core.state.view.moved(message.step, own_step)
  core.set(
    closed_known=max(core.state.closed_known, message.round),
    view=view.closed(message.step - due_step),
  )


def _note_merged(core: Core, update: messages.Update):
  """Notes which of its own offers of the fragment was merged, if any."""
  i = update.index_of(core.learner)
  if i is None:
    return
  p = update.fragment
  made = core.state.fragments[p].found(
    update.incarnations[i], update.handles[i]
  )
  if made is not None:
    core.set_fragment(p, merged=made)
    by = f'round {update.round}'
    leaving.on_merged(core, p, made.handle, made.step, by)
  else:
    core.set_fragment(p, merged_other=True)


def _adapt_lead(core: Core, update: messages.Update):
  """Adapts the lead after a round it offered for, or was about to."""
  fragment = core.state.fragments[update.fragment]
  i = update.index_of(core.learner)
  if i is None:
    if core.state.began and fragment.can_be_offered(core.state.step):
      core.set(lead=next_lead(core.state.lead, None, core.config))
    return
  made = fragment.found(update.incarnations[i], update.handles[i])
  begun = fragment.offered_round == update.round
  if made is None:
    if not begun:
      return  # Another process of the learner made it.
    waited = update.ages_steps[i]
  elif begun and made.step >= fragment.first_step:
    waited = update.ages_steps[i] + made.step - fragment.first_step
  else:
    waited = None  # It was made for an earlier round, which closed without it.
  core.set(lead=next_lead(core.state.lead, waited, core.config))


def _expect(core: Core, p: int, version: int):
  """Notes when a fetch begins; its duration goes into a report."""
  rest = [x for x in core.state.coming_since if x[:2] != (p, version)]
  core.set(coming_since=(*rest, (p, version, core.state.now)))


def _arrived(
  core: Core, event: learner_events.Rebuilt | learner_events.FetchFailed
) -> float | None:
  """Returns the duration of a finished fetch; None if its session has ended."""
  named = event.fragment, event.version
  rest = tuple(x for x in core.state.coming_since if x[:2] != named)
  began_s = [x[2] for x in core.state.coming_since if x[:2] == named]
  core.set(coming_since=rest)
  return core.state.now - began_s[0] if began_s else None


def on_rebuilt(core: Core, event: learner_events.Rebuilt):
  """Notes a version on the host; it is taken in at the next boundary."""
  fetch_s = _arrived(core, event)
  if fetch_s is not None:
    fetched = messages.Fetched(
      event.handle, event.fragment, event.version, fetch_s, held_s=0.0
    )
    core.set(fetched=(*core.state.fetched, (fetched, core.state.now)))
  fragment = core.state.fragments[event.fragment]
  if event.version < fragment.host:
    return
  # A fragment that was sent twice is taken in once: progress made on it stays.
  arrived = event.version, event.crc
  same = arrived == (fragment.host, fragment.crc) and not fragment.unlike
  # Bytes that the syncer gave up while they were on their way, and its new ones
  # of this version are here already: these were overwritten.
  unlike = fragment.told_otherwise(*arrived)
  overwritten = unlike and fragment.told == (fragment.host, fragment.crc)
  core.set_fragment(
    event.fragment,
    host=event.version,
    coming=max(event.version, fragment.coming),
    crc=event.crc,
    unlike=unlike,
    applied=fragment.applied and same,
  )
  if overwritten and core.state.connected:
    want(core, event.fragment, f'other bytes at version {event.version} came')


def on_fetch_failed(core: Core, event: learner_events.FetchFailed):
  """Asks for the full fragment, unless something newer is on its way."""
  _arrived(core, event)
  fragment = core.state.fragments[event.fragment]
  if event.version < fragment.coming or fragment.complete:
    return  # A later fetch is under way, or has been done.
  core.set_fragment(event.fragment, coming=fragment.host)
  if core.state.connected:
    want(core, event.fragment, event.reason)


def want(core: Core, p: int, reason: str):
  """Asks for the full fragment: now, or `RETRY_S` after the last request."""
  fragment = core.state.fragments[p]
  ask_at_s = fragment.asked_at_s + RETRY_S
  if core.state.now < ask_at_s:
    core.set_fragment(p, wanted=True, ask_at_s=ask_at_s)
    return
  core.set_fragment(p, wanted=True, ask_at_s=None, asked_at_s=core.state.now)
  core.send(messages.WantFragment(p, reason))


def ask_again(core: Core):
  """Asks for fragments whose request had to be delayed."""
  for p in core.state.asking:
    due = core.state.fragments[p].ask_at_s
    if core.state.connected and due <= core.state.now:
      want(core, p, 'the last attempt failed')


def apply_received(core: Core):
  """Takes in what the host has newer than θ."""
  for p, fragment in enumerate(core.state.fragments):
    if fragment.applied:
      continue
    _apply(core, p, fragment)


def _apply(core: Core, p: int, fragment: Fragment):
  """Takes in one fragment.

  With 'carry', progress made after the merged copy stays in θ and counts from
  there. If nothing made on this base was merged, Θ_p overwrites θ_p, as with
  'overwrite'; that was measured to be better than to carry all progress since
  the base (`experiments/unequal.py`). So a learner never offers the work of
  others.
  """
  state, made = core.state, fragment.merged
  carry = (
    core.config.blending.carries
    and state.began
    and made is not None
    and made.base == fragment.base
    # Else θ_p was set to other bytes of this version after that copy.
    and made.step > fragment.from_step
    and not fragment.merged_other
  )
  from_step, from_tokens = state.step, state.tokens
  if carry:
    from_step, from_tokens = made.step, made.tokens
  merged_tokens = made.c_tokens if made is not None else 0
  # Once an offer was merged, no older one can be.
  offers = () if made is not None else fragment.offers
  core.effects.append(
    learner_events.Apply(
      p,
      fragment.host,
      carry,
      handle=made.handle if made is not None else 0,
      keep=tuple(x.handle for x in offers),
      merged_tokens=merged_tokens,
      overwritten_tokens=from_tokens - fragment.from_tokens - merged_tokens,
    )
  )
  core.set_fragment(
    p,
    base=fragment.host,
    applied=True,
    from_step=from_step,
    from_tokens=from_tokens,
    offers=offers,
    merged=None,
    merged_other=False,
    pulled=False,
  )
