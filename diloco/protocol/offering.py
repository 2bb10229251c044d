# SPDX-License-Identifier: Apache-2.0
"""Which round a learner offers next: leaf decisions that return a reason."""

import dataclasses

from diloco.protocol.config import ProtocolConfig

# An offer that waited this many of the learner's steps was made too early.
EARLY_AGE_STEPS = 1.2


@dataclasses.dataclass(frozen=True)
class Standing:
  """What a learner knows when it decides on an offer."""

  step: int  # Own inner steps.
  closed_known: int  # The newest round that it knows to be closed.
  last_offered: int  # The newest round that it made a new offer for.
  offered_at_step: int  # When it did.
  lead: int


@dataclasses.dataclass(frozen=True)
class NextOffer:
  """The round to offer now, if any."""

  round: int | None
  refresh: bool  # The round was offered before, with fewer steps.
  reason: str


def next_offer(standing: Standing, config: ProtocolConfig) -> NextOffer:
  """max(closed_known + lead, last_offered) + 1, within spacing and limit.

  At the in-flight limit the learner does not wait: it keeps training, and
  refreshes its offer for the oldest open round (design: §3, Offer).
  """
  waited = standing.step - standing.offered_at_step
  if waited < config.spacing_steps:
    reason = f'{waited}/{config.spacing_steps} steps since the last offer'
    return NextOffer(None, False, reason)
  earliest = standing.closed_known + standing.lead
  round_ = max(earliest, standing.last_offered) + 1
  if round_ <= standing.closed_known + config.inflight_max:
    return NextOffer(round_, False, f'round {standing.closed_known} closed')
  reason = f'{config.inflight_max} rounds in flight'
  return NextOffer(standing.closed_known + 1, True, reason)


def next_lead(
  lead: int,
  merged: bool,
  age_steps: float,
  config: ProtocolConfig,
) -> int:
  """The lead after a round that the learner had offered closed.

  Late, it must offer earlier: one round further ahead. Merged, but from an
  offer that had waited long, it may offer later and bring more steps.

  Args:
    lead: before.
    merged: whether the learner was among the participants.
    age_steps: how long its offer had waited, in own inner steps; ignored
      where not merged.
    config: of the run.
  """
  if not merged:
    return min(lead + 1, config.inflight_max - 1)
  if age_steps > EARLY_AGE_STEPS:
    return max(lead - 1, 0)
  return lead
