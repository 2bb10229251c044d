# SPDX-License-Identifier: Apache-2.0
"""A learner's updates: announced, fetched, rebuilt on the host, taken in.

One fetch is under way at a time. What is announced meanwhile waits, by
fragment: updates to successive versions are then fetched at one go. Where more
have been announced than the syncer keeps, the full fragment is asked for
instead. The fragment that is furthest behind comes first.
"""

from diloco.protocol import messages
from diloco.protocol.config import UPDATES_KEPT
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner import leaving
from diloco.protocol.learner.offers import next_ahead
from diloco.protocol.learner.state import Core, Fragment
from diloco.protocol.values import replace_unchecked

RETRY_S = 0.5  # Between two requests for the same fragment.
# Versions announced after a full fragment that still waits to be fetched; with
# more, a newer one is asked for.
FULL_BEHIND_MAX = 1


def on_update(core: Core, update: messages.Update):
  """Notes a closed round, what it means for offers, and queues its update."""
  _note_own(core, update)
  on_closed(core, update)
  p = update.fragment
  fragment = core.state.fragments[p]
  core.set(link=core.state.link.announced(core.state.now))
  core.set_fragment(p, announced=max(fragment.announced, update.version))
  if not core.state.settled and not core.state.began:
    return  # A donor may bring it; what is then missing is requested.
  if fragment.wanted or update.version <= fragment.coming:
    return  # The full fragment that will come is at least as new.
  if update.version == fragment.coming + 1:
    kept = (*fragment.updates, update)[-UPDATES_KEPT:]
    core.set_fragment(p, coming=update.version, updates=kept)
    _expect(core, update)
  else:
    want(core, p, f'missed version {fragment.coming + 1}')


def on_full_fragment(core: Core, message: messages.FullFragment):
  """Queues a whole fragment and notes the own offer that it includes."""
  p = message.fragment
  named = message.merged_incarnation, message.merged_handle
  fragment = core.state.fragments[p]
  held = fragment.host, fragment.crc
  core.set_fragment(
    p,
    at_syncer=(message.version, message.crc),
    received=fragment.received + 1,
    # The syncer has gone on with other bytes of a version that is here: nothing
    # may begin with these, nor be offered or donated, until the others arrive.
    unlike=fragment.unlike
    or (held[0] == message.version and held[1] != message.crc),
  )
  if not core.state.settled:
    # It was not asked for: its shard is here again. A donor's whole state may
    # be older and would replace it; what is then missing is requested.
    announced = max(fragment.announced, message.version)
    core.set_fragment(p, announced=announced)
    return
  own = fragment.own_offer(*named)
  if own is not None:
    if own != fragment.merged:  # Otherwise an older version has it already.
      core.set_fragment(p, merged=own, merged_version=message.version)
    by = f'version {message.version}'
    leaving.on_merged(core, p, own.handle, own.step, by)
  core.set_fragment(
    p,
    coming=message.version,
    full=message,
    updates=(),
    wanted=False,
    postponed=False,
    ask_at_s=None,
  )
  _expect(core, message)


def fetch_next(core: Core):
  """Begins the next fetch, if one waits and none is under way."""
  while core.state.queued and core.state.under_way is None:
    if not core.state.connected or _awaits_full(core):
      return
    _begin_fetch(core, _furthest_behind(core))


def _awaits_full(core: Core) -> bool:
  """Returns True while the link is kept free for a full fragment.

  Asked for as the link becomes free, it is the newest; one that waited for
  others would be too old for offers by the time it is here.
  """
  return any(
    f.lags and f.wanted and not f.postponed for f in core.state.fragments
  )


def _furthest_behind(core: Core) -> int:
  """Returns the queued fragment that is most versions behind.

  Of several it is the one whose next version was announced first.
  """
  order = {x[:2]: i for i, x in enumerate(core.state.coming_since)}

  def key(p: int):
    fragment = core.state.fragments[p]
    first = fragment.full or fragment.updates[0]
    return fragment.host - fragment.coming, order.get((p, first.version), 0), p

  return min(core.state.queued, key=key)


def _begin_fetch(core: Core, p: int):
  """Begins to fetch what a fragment needs, or asks for all of it.

  Whether the host holds what the updates are relative to is decided before they
  are pulled.
  """
  fragment = core.state.fragments[p]
  updates = tuple(x for x in fragment.updates if x.version > fragment.host)
  full = fragment.full
  missed = fragment.coming - (full.version if full else fragment.host)
  if full is not None and missed <= FULL_BEHIND_MAX:
    core.set_fragment(p, full=None)
    effect, version = learner_events.FetchFragment(full), full.version
    updates = ()
  elif full is None and not updates:
    core.set_fragment(p, updates=())
    return
  elif full is None and updates[0].version == fragment.host + 1:
    core.set_fragment(p, updates=())
    effect = learner_events.FetchUpdates(updates)
    version = updates[-1].version
  else:
    # The syncer has withdrawn some of the updates since.
    core.set_fragment(p, full=None, updates=(), lags=True)
    want(core, p, f'{missed} versions behind')
    return
  core.set(
    under_way=(p, version, len(updates)),
    link=replace_unchecked(core.state.link, began_s=core.state.now),
  )
  core.effects.append(effect)


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


def on_closed(core: Core, message: messages.Update | messages.Skipped):
  """Updates the estimate of t from the syncer's view at a round's close.

  If that was without an update, offers remain valid.
  """
  own_step = message.reported_step or core.state.completed_step
  due_step = message.round * core.config.spacing_steps
  view = core.state.view.moved(message.step, own_step)
  core.set(
    closed_known=max(core.state.closed_known, message.round),
    view=view.closed(message.step - due_step),
  )


def _note_own(core: Core, update: messages.Update):
  """Notes which of its own offers was merged, if any, and adapts how far ahead
  it offers.

  That changes after a round that it offered for, or was about to.
  """
  p, i = update.fragment, update.index_of(core.learner)
  fragment = core.state.fragments[p]
  begun = fragment.offered_round == update.round
  if i is None:
    stale_max = core.config.max_staleness_versions
    offers = fragment.can_be_offered(core.state.step, stale_max)
    if core.state.began and offers:
      core.set(
        offer_ahead_steps=next_ahead(
          core.state.offer_ahead_steps, None, core.config
        )
      )
    return
  own = fragment.own_offer(update.incarnations[i], update.handles[i])
  core.set_fragment(p, merged_version=update.version)
  if own is None:
    core.set_fragment(p, merged_other=True)
    if not begun:
      return  # Another process of the learner made it.
    waited = update.ages_steps[i]
  else:
    core.set_fragment(p, merged=own)
    by = f'round {update.round}'
    leaving.on_merged(core, p, own.handle, own.step, by)
    waited = None  # It was made for an earlier round, which closed without it.
    if begun and own.step >= fragment.first_step:
      waited = update.ages_steps[i] + own.step - fragment.first_step
  core.set(
    offer_ahead_steps=next_ahead(
      core.state.offer_ahead_steps, waited, core.config
    )
  )


def _expect(core: Core, message: messages.Update | messages.FullFragment):
  """Notes when a version was announced, and under which handle it is fetched.

  The time until it is here goes into a report. Of updates that the syncer has
  withdrawn meanwhile it knows.
  """
  p, version = message.fragment, message.version
  oldest = version - 2 * UPDATES_KEPT
  rest = [
    x
    for x in core.state.coming_since
    if x[0] != p or (oldest < x[1] and x[1] != version)
  ]
  new = p, version, message.payload.handle, core.state.now
  core.set(coming_since=(*rest, new))


def _is_over(
  core: Core, event: learner_events.Rebuilt | learner_events.FetchFailed
):
  """Notes that the fetch under way has ended, if it is this one."""
  fetch = core.state.under_way
  if fetch is None or fetch[:2] != (event.fragment, event.version):
    return
  core.set(under_way=None)
  if fetch[2] and isinstance(event, learner_events.Rebuilt):
    core.set(link=core.state.link.fetched(core.state.now, fetch[2]))


def _note_arrived(core: Core, p: int, version: int):
  """Reports what of a fragment has arrived, so that it can be released."""
  came = [x for x in core.state.coming_since if x[0] == p and x[1] <= version]
  if not came:
    return  # Its session has ended.
  now = core.state.now
  fetched = (
    (messages.Fetched(handle, p, v, now - since_s, held_s=0.0), now)
    for _, v, handle, since_s in came
  )
  core.set(
    coming_since=tuple(x for x in core.state.coming_since if x not in came),
    fetched=(*core.state.fetched, *fetched),
  )


def on_rebuilt(core: Core, event: learner_events.Rebuilt):
  """Notes a version on the host; it is taken in at the next boundary."""
  _is_over(core, event)
  _note_arrived(core, event.fragment, event.version)
  fragment = core.state.fragments[event.fragment]
  if event.version < fragment.host:
    return
  # A fragment that was sent twice is taken in once: progress made on it stays.
  arrived = event.version, event.crc
  same = arrived == (fragment.host, fragment.crc) and not fragment.unlike
  # Bytes that the syncer gave up while they were on their way, and its new ones
  # of this version are here already: these were overwritten.
  unlike = fragment.told_otherwise(*arrived)
  overwritten = unlike and fragment.at_syncer == (fragment.host, fragment.crc)
  core.set_fragment(
    event.fragment,
    host=event.version,
    coming=max(event.version, fragment.coming),
    crc=event.crc,
    unlike=unlike,
    applied=fragment.applied and same,
    lags=fragment.lags and (fragment.wanted or fragment.full is not None),
  )
  if overwritten and core.state.connected:
    want(core, event.fragment, f'other bytes at version {event.version} came')


def on_fetch_failed(core: Core, event: learner_events.FetchFailed):
  """Asks for the full fragment, unless what is queued leads further."""
  _is_over(core, event)
  fragment = core.state.fragments[event.fragment]
  if fragment.complete or fragment.wanted or fragment.full is not None:
    return
  if fragment.updates and fragment.updates[0].version == fragment.host + 1:
    return  # It was a fetch of an earlier session.
  core.set_fragment(event.fragment, coming=fragment.host, updates=())
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
  core.send(messages.WantFragment(p, reason, fragment.received))


def ask_again(core: Core):
  """Asks for fragments whose request had to be delayed."""
  for p in core.state.asking:
    due = core.state.fragments[p].ask_at_s
    if core.state.connected and due <= core.state.now:
      want(core, p, 'the last attempt failed')


def apply_received(core: Core):
  """Takes in what the host has newer than θ."""
  for p, fragment in enumerate(core.state.fragments):
    if fragment.applied or fragment.host < fragment.merged_version:
      continue
    _apply(core, p, fragment)


def _apply(core: Core, p: int, fragment: Fragment):
  """Takes in one fragment.

  With 'rebase', progress made after the merged copy stays in θ and counts from
  there. If nothing made on this base was merged, Θ_p overwrites θ_p, as with
  'replace'; that was measured to be better than to carry all progress since
  the base (`experiments/unequal.py`). So a learner never offers the work of
  others.
  """
  state, own = core.state, fragment.merged
  carry = (
    core.config.blending.rebases
    and state.began
    and own is not None
    and own.base == fragment.base
    # Else θ_p was set to other bytes of this version after that copy.
    and own.step > fragment.from_step
    and not fragment.merged_other
  )
  from_step, from_tokens = state.step, state.tokens
  if carry:
    from_step, from_tokens = own.step, own.tokens
  merged_tokens = own.c_tokens if own is not None else 0
  # Once an offer was merged, no older one can be.
  offers = () if own is not None else fragment.offers
  core.effects.append(
    learner_events.Apply(
      p,
      fragment.host,
      carry,
      handle=own.handle if own is not None else 0,
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
