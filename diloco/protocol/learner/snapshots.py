# SPDX-License-Identifier: Apache-2.0
"""Snapshots that become offers: due, refreshed, asked for again, last."""

from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner import leaving
from diloco.protocol.learner.offers import (
  FIRST_OFFERS_MAX,
  UNANSWERED_MAX,
  OfferContext,
  next_offer,
  refreshed_round,
)
from diloco.protocol.learner.state import MADE_MAX, Core, Made


def offer(core: Core):
  """Repeats an offer or makes those that are due; else refreshes one."""
  state = core.state
  if not state.connected:
    return
  if _offer_again(core):
    return
  offered = 0
  while offered < FIRST_OFFERS_MAX and _offer_next(core):
    offered += 1
  if not offered:
    refresh(core)


def _offer_next(core: Core) -> bool:
  """Makes the next round's first offer, if it is time for it."""
  state = core.state
  choice = next_offer(
    OfferContext(
      t=state.view.at(state.step),
      closed_known=state.closed_known,
      last_offered=state.last_offered,
      lead=state.lead,
      refreshes=_to_refresh(core, state.step) is not None,
    ),
    core.config,
  )
  if choice.round is None or not _snapshot(core, choice.round):
    return False
  core.set(last_offered=choice.round)
  return True


def refresh(core: Core):
  """Offers a newer copy for the first open round that can use it."""
  round_ = _to_refresh(core, core.state.step)
  if round_ is not None:
    _snapshot(core, round_)


def _to_refresh(core: Core, step: int) -> int | None:
  """Returns the open round whose offer gets a newer copy, if any."""
  state, rounds = core.state, []
  for round_ in range(state.closed_known + 1, state.last_offered + 1):
    fragment = state.fragments[core.config.fragment_of(round_)]
    crowded = fragment.unanswered(state.incarnation) >= UNANSWERED_MAX
    if fragment.pulled or crowded or fragment.offered_step == step:
      continue
    if fragment.can_be_offered(step, core.config.max_staleness_versions):
      rounds.append(round_)
  return refreshed_round(rounds, state.view, step, core.config)


def _offer_again(core: Core) -> bool:
  """Repeats the oldest offer that is asked for and possible; others wait."""
  closed = core.state.closed_known
  rounds = [r for r in core.state.again_rounds if r > closed]
  made = next((r for r in rounds if _snapshot(core, r)), None)
  core.set(again_rounds=tuple(r for r in rounds if r != made))
  return made is not None


def _snapshot(core: Core, round_: int) -> bool:
  """Offers the round's fragment, unless no step was made on it."""
  p = core.config.fragment_of(round_)
  state, fragment = core.state, core.state.fragments[p]
  stale_max = core.config.max_staleness_versions
  if not fragment.can_be_offered(state.step, stale_max):
    return False
  c_steps = state.step - fragment.from_step
  handle = state.handles + 1
  c_tokens = state.tokens - fragment.from_tokens
  made = Made(
    handle,
    state.incarnation,
    fragment.base,
    state.step,
    state.tokens,
    c_tokens,
  )
  offers = (*fragment.offers, made)[-MADE_MAX:]
  core.effects.append(
    learner_events.Snapshot(
      handle=handle,
      keep=tuple(x.handle for x in offers),
      round=round_,
      fragment=p,
      base_version=fragment.base,
      c_steps=c_steps,
      c_tokens=c_tokens,
      step=state.step,
    )
  )
  core.set(handles=handle)
  again = fragment.offered_round == round_
  first_step = fragment.first_step if again else state.step
  core.set_fragment(
    p, offered_round=round_, first_step=first_step, offers=offers
  )
  return True


def leave_at_boundary(core: Core):
  """Makes the last offers, for all rounds offered for, after a stop."""
  first = core.state.closed_known + 1
  for round_ in range(first, max(first, core.state.last_offered) + 1):
    _offer_last(core, round_)
  core.effects += [learner_events.SayLeaving(), learner_events.Cease()]
  core.set(ceased=True, parked=False)


def hand_in(core: Core):
  """Offers every fragment once more for its last round, then ceases."""
  _offer_last_rounds(core)
  core.effects += [
    learner_events.HandIn(core.state.last_round),
    learner_events.Cease(),
  ]
  core.set(ceased=True, parked=False)


def hand_in_again(core: Core):
  """Hands in again after a reconnect, as offers end with their session."""
  state = core.state
  if state.ceased and state.connected and state.last_round is not None:
    _offer_last_rounds(core)
    core.effects.append(learner_events.HandIn(state.last_round))


def _offer_last_rounds(core: Core):
  """Offers for the last rounds that the syncer knows of."""
  state, fragments = core.state, core.config.fragments
  last = min(state.last_round, state.closed_known + fragments)
  first = max(state.closed_known, last - fragments) + 1
  for round_ in range(first, last + 1):
    _offer_last(core, round_)


def _offer_last(core: Core, round_: int):
  """Offers a round's fragment for the last time, unless it is on offer."""
  state = core.state
  if not state.connected:
    return
  p = core.config.fragment_of(round_)
  offers = state.fragments[p].offers_in(state.incarnation)
  is_there = bool(offers) and offers[-1].step == state.step
  if is_there or _snapshot(core, round_) or offers:
    leaving.note_last_offer(core, p)
