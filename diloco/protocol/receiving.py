# SPDX-License-Identifier: Apache-2.0
"""A learner's updates: announced, fetched, rebuilt on the host, taken in."""

from diloco.protocol import learner_io, messages
from diloco.protocol.learner_state import Core
from diloco.protocol.offering import next_lead

RETRY_S = 0.5  # Between two requests for the same fragment.


def on_update(core: Core, update: messages.Update):
  """A round closed: what it means for offers, and what is to be fetched."""
  _adapt_lead(core, update)
  core.set(
    closed_known=max(core.state.closed_known, update.round),
    global_step=update.step,
  )
  p = update.fragment
  fragment = core.state.fragments[p]
  core.set_fragment(p, announced=max(fragment.announced, update.version))
  if not core.state.settled and not core.state.began:
    return  # A donor may bring it; what then is missing is asked for.
  if fragment.wanted or update.version <= fragment.coming:
    return  # The full fragment that will come is at least as new.
  if update.version == fragment.coming + 1:
    core.set_fragment(p, coming=update.version)
    core.effects.append(learner_io.FetchUpdate(update))
  else:
    want(core, p, f'missed version {fragment.coming + 1}')


def on_skipped(core: Core, skipped: messages.Skipped):
  """A round closed, and no update comes: what was offered stays good."""
  core.set(
    closed_known=max(core.state.closed_known, skipped.round),
    global_step=skipped.step,
  )


def _adapt_lead(core: Core, update: messages.Update):
  fragment = core.state.fragments[update.fragment]
  if fragment.offered_round != update.round:
    return
  merged = core.learner in update.participants
  age_steps = 0.0
  if merged:
    age_steps = update.ages_steps[update.participants.index(core.learner)]
  lead = next_lead(core.state.lead, merged, age_steps, core.config)
  core.set(lead=lead)


def on_rebuilt(core: Core, event: learner_io.Rebuilt):
  """The host holds a version; it is taken in at the next boundary."""
  core.set(fetched=(*core.state.fetched, event.handle))
  fragment = core.state.fragments[event.fragment]
  if event.version < fragment.host:
    return
  core.set_fragment(
    event.fragment,
    host=event.version,
    coming=max(event.version, fragment.coming),
    crc=event.crc,
    unlike=False,
    applied=False,
  )


def on_fetch_failed(core: Core, event: learner_io.FetchFailed):
  """Asks for the full fragment, unless something newer is on its way."""
  fragment = core.state.fragments[event.fragment]
  if event.version < fragment.coming or fragment.complete:
    return  # A later fetch is under way, or has been done.
  core.set_fragment(event.fragment, coming=fragment.host)
  if core.state.connected:
    want(core, event.fragment, event.reason)


def want(core: Core, p: int, reason: str):
  """Asks for the full fragment: now, or `RETRY_S` after the last time."""
  fragment = core.state.fragments[p]
  ask_at_s = fragment.asked_at_s + RETRY_S
  if core.state.now < ask_at_s:
    core.set_fragment(p, wanted=True, ask_at_s=ask_at_s)
    return
  core.set_fragment(p, wanted=True, ask_at_s=None, asked_at_s=core.state.now)
  core.send(messages.WantFragment(p, reason))


def ask_again(core: Core):
  """Asks for what could not be asked for at once."""
  for p in core.state.asking:
    due = core.state.fragments[p].ask_at_s
    if core.state.connected and due <= core.state.now:
      want(core, p, 'the last attempt failed')


def apply_received(core: Core):
  """Takes in what the host has newer than θ."""
  for p, fragment in enumerate(core.state.fragments):
    if fragment.applied:
      continue
    carry = core.config.blend == 'carry' and fragment.offered_step is not None
    core.effects.append(learner_io.Apply(p, fragment.host, carry))
    state = core.state
    core.set_fragment(
      p,
      base=fragment.host,
      applied=True,
      from_step=fragment.offered_step if carry else state.step,
      from_tokens=fragment.offered_tokens if carry else state.tokens,
      offered_step=None,
    )
