# SPDX-License-Identifier: Apache-2.0
"""Decides which round a learner offers for next, and gives reasons."""

import dataclasses
from collections.abc import Sequence

from diloco.protocol.config import ProtocolConfig

# A first offer merged this many own steps later was made too early. If an
# offer can be refreshed before the next is due, up to two steps more are
# allowed: being late costs more than two encodings.
EARLY_STEPS = 1.2
REFRESHED_STEPS = 2
# Unanswered offers of one fragment, each of which keeps a copy; at this number
# no more are made.
UNANSWERED_MAX = 4
HALF_STEP = 0.5  # Rounds a fractional view of t to the nearest step.
# If an offer can be refreshed, it is made a boundary early rather than late.
NEARLY_A_STEP = 0.9
# First offers at one boundary. Two, if t has advanced by more than a step
# since the last: with one, a learner that has a round at every boundary (s = 1)
# would stay a round late for as long as it gains no step on t.
FIRST_OFFERS_MAX = 2
RATE_WEIGHT = 0.2  # Weight of the newest update in the averages of `View`.
# Steps of t per own step; bounded, as a learner may have stood still.
RATE_MAX = 64.0


@dataclasses.dataclass(frozen=True)
class View:
  """The global step t as one learner sees it, at any of its own steps.

  An update says what t was when its round closed, and the last own step that
  the syncer knew of by then: these two belong together. From there t is
  extrapolated at its recent pace in own steps, so that a slow learner's view
  does not fall behind between two updates and a fast one's does not run ahead.
  An update also says how long after its due step a round closes.
  """

  step: int = 0  # t ...
  own_step: int = 0  # Own steps that the syncer knew of at that t.
  t_steps: float = 0.0  # Averages between two updates: of t,
  own_steps: float = 0.0  # and of own steps.
  late_steps: float = 0.0  # Average of t − r·s at the closes of rounds.

  def at(self, own_step: int) -> float:
    """Returns the estimate of t when the learner has made `own_step` steps."""
    return self.step + self.rate * (own_step - self.own_step)

  @property
  def rate(self) -> float:
    """Steps of t per own step."""
    if self.t_steps == 0.0:
      return 1.0
    return min(self.t_steps / max(self.own_steps, 1e-9), RATE_MAX)

  def closed(self, late_steps: int) -> 'View':
    """Returns the view after a round closed `late_steps` after it was due."""
    more = RATE_WEIGHT * (max(late_steps, 0) - self.late_steps)
    return dataclasses.replace(self, late_steps=self.late_steps + more)

  def moved(self, step: int, own_step: int) -> 'View':
    """Returns the view after an update: t was `step` at `own_step`."""
    t_steps, own_steps = step - self.step, own_step - self.own_step
    if t_steps <= 0 or own_steps < 0:
      return dataclasses.replace(self, step=step, own_step=own_step)
    if self.t_steps == 0.0:
      if own_steps == 0:
        return dataclasses.replace(self, step=step, own_step=own_step)
      return dataclasses.replace(
        self, step=step, own_step=own_step, t_steps=t_steps, own_steps=own_steps
      )
    return dataclasses.replace(
      self,
      step=step,
      own_step=own_step,
      t_steps=self.t_steps + RATE_WEIGHT * (t_steps - self.t_steps),
      own_steps=self.own_steps + RATE_WEIGHT * (own_steps - self.own_steps),
    )


@dataclasses.dataclass(frozen=True)
class OfferContext:
  """The knowledge on which a learner decides about an offer."""

  t: float  # As estimated by the learner.
  closed_known: int  # The newest round that it knows to be closed.
  last_offered: int  # The newest round that it made a new offer for.
  lead: int  # In steps of t.
  refreshes: bool = False  # An earlier round can use a newer copy now.


@dataclasses.dataclass(frozen=True)
class NextOffer:
  """The round to offer for now for the first time, if any."""

  round: int | None
  reason: str


def next_offer(standing: OfferContext, config: ProtocolConfig) -> NextOffer:
  """Chooses round r at the first boundary at which t reaches r·s − lead.

  At the in-flight limit the learner does not wait: it keeps training, and
  refreshes what it has on offer.
  """
  round_ = max(standing.closed_known, standing.last_offered) + 1
  limit = open_max(standing.lead, config)
  if round_ > standing.closed_known + limit:
    return NextOffer(None, f'{limit} rounds in flight')
  at = round_ * config.spacing_steps - standing.lead
  rare = config.spacing_steps > 1 and not standing.refreshes
  early = NEARLY_A_STEP if rare else HALF_STEP
  if standing.t < at - early:
    return NextOffer(None, f'round {round_} at {at}, now {standing.t:.1f}')
  return NextOffer(round_, f'round {standing.closed_known} closed')


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


def open_max(lead: int, config: ProtocolConfig) -> int:
  """Returns how many rounds beyond the last closed one may be on offer.

  These are the rounds that become due in the τ steps of an exchange, in the
  steps of the lead, and in the current step, after which the copy is made;
  never two of one fragment.
  """
  under_way = 1 if config.overlap_steps > 0 else 0
  steps = config.overlap_steps + lead + under_way
  return min(max(1, -(-steps // config.spacing_steps)), config.fragments)


def lead_min(config: ProtocolConfig) -> int:
  """Returns the lead that a learner begins with and keeps at least, in steps.

  A view of t counts whole steps: a learner that is most of a step behind sees
  the same t as the others, and its first offer misses a short grace window. A
  lead of one step makes the window, and the refreshed copy costs an encoding.
  Where the round before may still be open then (rounds close within about τ
  steps), the early first offer would take the place of its refresh: no lead.
  """
  sparse = config.spacing_steps > config.overlap_steps + 1
  return 1 if config.overlap_steps > 0 and sparse else 0


def lead_max(config: ProtocolConfig) -> int:
  """Returns the longest lead, in steps."""
  if config.overlap_steps == 0:
    return 0  # It would wait for a round that is not due.
  return max(config.spacing_steps - 1, config.overlap_steps - 1, 1)


def next_lead(
  lead: int, waited_steps: float | None, config: ProtocolConfig
) -> int:
  """Returns the lead after a round has closed.

  If the round closed without the learner, it must offer a step earlier. If the
  learner was merged long after its first offer for the round, it may start
  later: an offer that is not refreshed would bring more steps, and one that is
  refreshed costs an encoding each time.

  Args:
    lead: the lead before, in steps.
    waited_steps: own inner steps since the first offer for the round; None if
      the learner is not among the participants.
  """
  if waited_steps is None:
    return min(lead + 1, lead_max(config))
  early = EARLY_STEPS + min(REFRESHED_STEPS, config.spacing_steps - 1)
  return max(lead - 1, lead_min(config)) if waited_steps > early else lead
