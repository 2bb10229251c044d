# SPDX-License-Identifier: Apache-2.0
"""Which round a learner offers next: leaf decisions that return a reason."""

import dataclasses

from diloco.protocol.config import ProtocolConfig

# Who was merged so many own steps after its first offer for the round, made
# that too early. Where an offer can be refreshed before the next is due, up to
# two steps more: being late costs more than two encodings.
EARLY_STEPS = 1.2
REFRESHED_STEPS = 2
# Offers of one fragment that the syncer has not answered: the copies of so
# many boundaries are kept, and no more are made.
UNANSWERED_MAX = 4
HALF_STEP = 0.5  # A view of t that is a fraction says which step is nearest.
# Where an offer can be refreshed, rather a boundary early than one late.
NEARLY_A_STEP = 0.9
# First offers at one boundary. Two, where t has gone on by more than a step
# since the last: with one, a learner whose every boundary has a round (s = 1)
# would be a round late from then on, for as long as it gains no step on t.
FIRST_OFFERS_MAX = 2
RATE_WEIGHT = 0.2  # Of the newest update, in the averages of `View`.
RATE_MAX = 64.0  # Steps of t per own step; a learner may have stood still.


@dataclasses.dataclass(frozen=True)
class View:
  """The global step t as one learner sees it, at any of its own steps.

  An update says what t was when its round closed, and the last own step that
  the syncer had been told of by then: these two belong together. From there
  on t is taken to go on at the pace that it has had, in own steps: a slow
  learner's view does not fall behind between two updates, nor does a fast
  one's run away.
  """

  step: int = 0  # t ...
  own_step: int = 0  # ... when the syncer knew of so many own steps.
  t_steps: float = 0.0  # Averages, between two updates: of t,
  own_steps: float = 0.0  # and of own steps.

  def at(self, own_step: int) -> float:
    """t when the learner has made `own_step` steps."""
    return self.step + self.rate * (own_step - self.own_step)

  @property
  def rate(self) -> float:
    """Steps of t per own step."""
    if self.t_steps == 0.0:
      return 1.0
    return min(self.t_steps / max(self.own_steps, 1e-9), RATE_MAX)

  def moved(self, step: int, own_step: int) -> 'View':
    """After an update: t was `step` at `own_step`."""
    t_steps, own_steps = step - self.step, own_step - self.own_step
    if t_steps <= 0 or own_steps < 0:
      return dataclasses.replace(self, step=step, own_step=own_step)
    if self.t_steps == 0.0:
      if own_steps == 0:
        return dataclasses.replace(self, step=step, own_step=own_step)
      return View(step, own_step, t_steps, own_steps)
    return View(
      step,
      own_step,
      self.t_steps + RATE_WEIGHT * (t_steps - self.t_steps),
      self.own_steps + RATE_WEIGHT * (own_steps - self.own_steps),
    )


@dataclasses.dataclass(frozen=True)
class Standing:
  """What a learner knows when it decides on an offer."""

  t: float  # As it sees it.
  closed_known: int  # The newest round that it knows to be closed.
  last_offered: int  # The newest round that it made a new offer for.
  lead: int  # In steps of t.
  refreshes: bool = False  # An earlier round can use a newer copy now.


@dataclasses.dataclass(frozen=True)
class NextOffer:
  """The round to offer for the first time now, if any."""

  round: int | None
  reason: str


def next_offer(standing: Standing, config: ProtocolConfig) -> NextOffer:
  """Round r, at the first boundary at which t reaches r·s − lead.

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


def open_max(lead: int, config: ProtocolConfig) -> int:
  """Rounds that may be on offer beyond the last that is known to be closed.

  Those that become due in the τ steps that an exchange takes, in the steps of
  the lead, and in the step under way, at the end of which the copy is made;
  never two of one fragment.
  """
  under_way = 1 if config.overlap_steps > 0 else 0
  steps = config.overlap_steps + lead + under_way
  return min(max(1, -(-steps // config.spacing_steps)), config.fragments)


def lead_max(config: ProtocolConfig) -> int:
  """The longest lead, in steps."""
  if config.overlap_steps == 0:
    return 0  # It would wait for a round that is not due.
  return max(config.spacing_steps - 1, config.overlap_steps - 1, 1)


def next_lead(
  lead: int, waited_steps: float | None, config: ProtocolConfig
) -> int:
  """The lead after a round closed.

  Without the learner: it must offer a step earlier. With it, long after it
  had begun to offer for the round: it may begin later, for an offer that is
  not refreshed would bring more steps, and one that is costs an encoding each
  time.

  Args:
    lead: before, in steps.
    waited_steps: how long it had been offering, in own inner steps; None: the
      learner is not among the participants.
    config: of the run.
  """
  if waited_steps is None:
    return min(lead + 1, lead_max(config))
  early = EARLY_STEPS + min(REFRESHED_STEPS, config.spacing_steps - 1)
  return max(lead - 1, 0) if waited_steps > early else lead
