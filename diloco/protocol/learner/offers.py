# SPDX-License-Identifier: Apache-2.0
"""Decides which round a learner offers for next, and gives reasons."""

from collections.abc import Sequence

from diloco.protocol.config import ProtocolConfig
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner import leaving
from diloco.protocol.learner.state import (
  HALF_STEP,
  OWN_OFFERS_MAX,
  Core,
  OwnOffer,
  View,
)

# A first offer merged this many own steps later was made too early. If an
# offer can be refreshed before the next is due, up to two steps more are
# allowed: being late costs more than two encodings.
EARLY_STEPS = 1.2
REFRESHED_STEPS = 2
# Unanswered offers of one fragment, each of which keeps a copy; at this number
# no more are made.
UNANSWERED_MAX = 4
# If an offer can be refreshed, it is made a boundary early rather than late.
NEARLY_A_STEP = 0.9
# First offers at one boundary. Two, if t has advanced by more than a step
# since the last: with one, a learner that has a round at every boundary (s = 1)
# would stay a round late for as long as it gains no step on t.
FIRST_OFFERS_MAX = 2


def next_offer(
  config: ProtocolConfig,
  t: float,
  closed_known: int,
  last_offered: int,
  ahead_steps: int,
  refreshes: bool = False,
) -> int | None:
  """Returns round r at the first boundary at which t reaches r·s − ahead_steps.

  At the in-flight limit the learner does not wait: it keeps training, and
  refreshes what it has on offer.

  Args:
    t: as estimated by the learner.
    closed_known: the newest round that it knows to be closed.
    last_offered: the newest round that it made a first offer for.
    ahead_steps: in steps of t.
    refreshes: True if an earlier round can use a newer copy now.
  """
  round_ = max(closed_known, last_offered) + 1
  if round_ > closed_known + open_max(ahead_steps, config):
    return None
  at = round_ * config.spacing_steps - ahead_steps
  rare = config.spacing_steps > 1 and not refreshes
  early = NEARLY_A_STEP if rare else HALF_STEP
  return round_ if t >= at - early else None


def refreshed_round(
  rounds: Sequence[int], view: View, step: int, config: ProtocolConfig
) -> int | None:
  """Returns which of some open rounds gets a newer copy at own step `step`.

  This is the first round that is not expected to have closed by then: an older
  one probably has, and its update is on its way. If every round should have
  closed, it is the first of them, which probably waits for its quorum.

  Args:
    rounds: ascending.
    view: estimate of t.
    step: of the learner.
  """
  open_due = view.at(step) - HALF_STEP - view.late_steps
  still_open = (r for r in rounds if r * config.spacing_steps > open_due)
  return next(still_open, next(iter(rounds), None))


def open_max(ahead_steps: int, config: ProtocolConfig) -> int:
  """Returns how many rounds beyond the last closed one may be on offer.

  These are the rounds that become due in the τ steps of an exchange, in the
  steps of `ahead_steps`, and in the current step, after which the copy is made;
  never two of one fragment.
  """
  under_way = 1 if config.overlap_steps > 0 else 0
  steps = config.overlap_steps + ahead_steps + under_way
  return min(max(1, -(-steps // config.spacing_steps)), config.fragments)


def min_ahead(config: ProtocolConfig) -> int:
  """Returns how many steps ahead a learner begins to offer, and offers at
  least.

  A view of t counts whole steps: a learner that is most of a step behind sees
  the same t as the others, and its first offer misses a short grace window. A
  step ahead makes the window, and the refreshed copy costs an encoding.
  Where the round before may still be open then (rounds close within about τ
  steps), the early first offer would take the place of its refresh: none.
  """
  sparse = config.spacing_steps > config.overlap_steps + 1
  return 1 if config.overlap_steps > 0 and sparse else 0


def max_ahead(config: ProtocolConfig) -> int:
  """Returns how many steps ahead a learner offers at most."""
  if config.overlap_steps == 0:
    return 0  # It would wait for a round that is not due.
  return max(config.spacing_steps - 1, config.overlap_steps - 1, 1)


def next_ahead(
  ahead_steps: int, waited_steps: float | None, config: ProtocolConfig
) -> int:
  """Returns how far ahead to offer after a round has closed.

  If the round closed without the learner, it must offer a step earlier. If the
  learner was merged long after its first offer for the round, it may start
  later: an offer that is not refreshed would bring more steps, and one that is
  refreshed costs an encoding each time.

  Args:
    ahead_steps: how far it was before.
    waited_steps: own inner steps since the first offer for the round; None if
      the learner is not among the participants.
  """
  if waited_steps is None:
    return min(ahead_steps + 1, max_ahead(config))
  early = EARLY_STEPS + min(REFRESHED_STEPS, config.spacing_steps - 1)
  return (
    max(ahead_steps - 1, min_ahead(config))
    if waited_steps > early
    else ahead_steps
  )


# Copies that become offers: due, refreshed, asked for again, last -------------


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
  if not offered and (round_ := _to_refresh(core)) is not None:
    _snapshot(core, round_)


def _offer_next(core: Core) -> bool:
  """Makes the next round's first offer, if it is time for it."""
  state = core.state
  round_ = next_offer(
    core.config,
    state.view.at(state.step),
    state.closed_known,
    state.last_offered,
    state.offer_ahead_steps,
    refreshes=_to_refresh(core) is not None,
  )
  if round_ is None or not _snapshot(core, round_):
    return False
  core.set(last_offered=round_)
  return True


def _to_refresh(core: Core) -> int | None:
  """Returns the open round whose offer gets a newer copy, if any."""
  state, step, rounds = core.state, core.state.step, []
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
  again = next((r for r in rounds if _snapshot(core, r)), None)
  core.set(again_rounds=tuple(r for r in rounds if r != again))
  return again is not None


def _snapshot(core: Core, round_: int) -> bool:
  """Offers the round's fragment, unless no step was made on it."""
  p = core.config.fragment_of(round_)
  state, fragment = core.state, core.state.fragments[p]
  stale_max = core.config.max_staleness_versions
  if not fragment.can_be_offered(state.step, stale_max):
    return False
  c_steps = state.step - fragment.from_step
  c_tokens = state.tokens - fragment.from_tokens
  handle = state.handles + 1
  session, base = state.incarnation, fragment.base
  own = OwnOffer(handle, session, base, state.step, state.tokens, c_tokens)
  offers = (*fragment.offers, own)[-OWN_OFFERS_MAX:]
  core.effects.append(
    learner_events.Snapshot(
      handle=handle,
      keep=tuple(x.handle for x in offers),
      round=round_,
      fragment=p,
      base_version=base,
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
  _cease(core, learner_events.SayLeaving())


def hand_in(core: Core):
  """Offers every fragment once more for its last round, then ceases."""
  _offer_last_rounds(core)
  _cease(core, learner_events.HandIn(core.state.last_round))


def _cease(core: Core, say: learner_events.Effect):
  """Makes the last step; a session that is not open yet is told later."""
  if core.state.connected:
    core.effects.append(say)
  core.effects.append(learner_events.Cease())
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
