# SPDX-License-Identifier: Apache-2.0
"""Keeps the offers of learners, and drops what is used up, void or unwanted.

An offer waits with its learner's session until a round pulls it. Its bytes are
pulled once; then it is merged, or gone.
"""

import typing

from diloco.protocol import messages
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.state import (
  AdmittedOffer,
  HeldOffer,
  Round,
  Straggler,
  SyncerState,
)


def on_offer(
  state: SyncerState, learner: int, offer: messages.Offer
) -> str | None:
  """Keeps an offer for its round; a newer one of the fragment replaces it."""
  broken = _broken_rule(state, offer)
  if broken or learner not in state.members.live:
    return broken or 'an offer from one that does not count'
  superseded = state.members[learner].offers.get(offer.fragment)
  _keep(state, learner, HeldOffer(offer, state.now))
  if superseded and not is_pulling(state, learner, superseded):
    state.retire(learner, superseded.offer.payload.handle)
  discard_void(state, learner, offer.fragment)
  return None


def _broken_rule(state: SyncerState, offer: messages.Offer) -> str | None:
  """Returns which protocol rule the offer breaks; None if it breaks none."""
  config = state.config
  if not 1 <= offer.round <= state.closed_round + config.fragments:
    return (
      f'an offer for round {offer.round}, round {state.closed_round} closed'
    )
  if offer.fragment != config.fragment_of(offer.round):
    return (
      f'fragment {offer.fragment} for round {offer.round}, which concerns '
      f'fragment {config.fragment_of(offer.round)}'
    )
  if not 0 <= offer.base_version <= state.versions[offer.fragment]:
    return (
      f'base version {offer.base_version} of fragment {offer.fragment}, '
      f'which is at {state.versions[offer.fragment]}'
    )
  if offer.c_steps < 0 or offer.c_tokens < 0:
    return f'c_steps={offer.c_steps}, c_tokens={offer.c_tokens}'
  return None


def _keep(state: SyncerState, learner: int, held: HeldOffer):
  """Keeps the newest offer per fragment: at most P of them."""
  offers = {**state.members[learner].offers, held.offer.fragment: held}
  state.change(learner, offers=offers)


def forget(state: SyncerState, learner: int, held: HeldOffer):
  """Forgets an offer, unless a newer one has taken its place."""
  offers, fragment = state.members[learner].offers, held.offer.fragment
  if offers.get(fragment) is held:
    offers = {p: x for p, x in offers.items() if p != fragment}
    state.change(learner, offers=offers)


def use_up(
  state: SyncerState, learner: int, admitted: AdmittedOffer, pulled=False
):
  """Drops an offer whose pull is over: it can be pulled only once."""
  forget(state, learner, admitted.held)
  state.retire(learner, admitted.handle, pulled)


# Offers that can no longer be merged -----------------------------------------


def discard_void(state: SyncerState, learner: int, fragment: int):
  """Drops an offer that can no longer be merged: used up, or too old.

  If a learner refreshed its offer while the older one was being pulled, the
  same steps would otherwise be merged twice, a whole cycle later.
  """
  held = state.members[learner].offers.get(fragment)
  if held is None or is_pulling(state, learner, held):
    return
  steps = merged_steps(state, learner, fragment)
  reason = why_void(held.offer, steps, state.versions[fragment], state.config)
  if reason is None:
    return
  forget(state, learner, held)
  state.retire(learner, held.offer.payload.handle)
  if not steps.has(held.offer):  # Otherwise nothing is lost with it.
    state.record('stale', learner, f'offer of fragment {fragment}: {reason}')


def is_pulling(state: SyncerState, learner: int, held: HeldOffer) -> bool:
  """Returns True if the bytes of this very offer are being pulled."""
  return any(
    learner in round_.pulls
    and round_.pulls[learner].held is held
    and learner not in round_.pulled
    for round_ in state.rounds.values()
  )


class MergedSteps(typing.NamedTuple):
  """The steps of a learner on a fragment that rounds have merged."""

  # Base of the last merged offer, which may be of an older session.
  base: int = -1
  # Merged up to this own step; of this session's offers.
  step: int | None = None

  def has(self, offer: messages.Offer) -> bool:
    """Returns True if steps of the offer are among them.

    The base alone does not decide it: a learner that carries its steps over to
    a newer base, because none of them was merged, may have its older offer
    merged yet.
    """
    if offer.base_version <= self.base:
      return True
    return self.step is not None and offer.step - offer.c_steps < self.step


def merged_steps(
  state: SyncerState, learner: int, fragment: int
) -> MergedSteps:
  """Returns what has been merged of a learner's steps on a fragment."""
  return MergedSteps(
    state.accounts[learner].merged_bases.get(fragment, -1),
    state.members[learner].merged_steps.get(fragment),
  )


def why_void(
  offer: messages.Offer,
  merged: MergedSteps,
  version: int,
  config: ProtocolConfig,
) -> str | None:
  """Returns why an offer can never be merged any more; None if it can.

  Args:
    merged: that learner's merged steps on the fragment.
    version: the fragment's version at the syncer.
  """
  if merged.has(offer):
    return f'merged already from base {offer.base_version}'
  if version - offer.base_version > config.max_staleness_versions:
    return f'stale, base {offer.base_version} and now {version}'
  return None


# Offers that a round pulls ---------------------------------------------------


def drop_pull(state: SyncerState, round_: Round, learner: int):
  """Takes a contribution out of a round; its bytes are no longer wanted."""
  admitted = round_.pulls.get(learner)
  if admitted is not None:
    pull = round_.number, learner, admitted.incarnation, admitted.handle
    state.emit(syncer_events.CancelPull(*pull))
  leave_out(state, round_, learner)


def leave_out(state: SyncerState, round_: Round, learner: int):
  """Goes on with a round without a learner's contribution."""
  round_.pulls.pop(learner, None)
  round_.pulled.discard(learner)
  round_.norms.pop(learner, None)
  state.touched.add(learner)


def drop_straggler(state: SyncerState, learner: int, straggler: Straggler):
  """Cancels a learner's pull that no round waits for."""
  incarnation = state.members[learner].incarnation
  pull = straggler.round, learner, incarnation, straggler.handle
  state.emit(syncer_events.CancelPull(*pull))
  forget_straggler(state, learner, straggler)


def forget_straggler(state: SyncerState, learner: int, straggler: Straggler):
  """Counts a learner's pull no longer; once none is left, others may begin."""
  left = (x for x in state.members[learner].stragglers if x != straggler)
  state.change(learner, stragglers=tuple(left))
