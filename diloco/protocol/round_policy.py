# SPDX-License-Identifier: Apache-2.0
"""When a round may merge, and how: the rules by name, and their decisions.

These are quorum, admission, weights, the grace window and its early end.
`RoundPolicy` holds what the configuration says of them; its decisions are pure.
`syncer/collecting.py` gathers the facts and asks it; the drivers, simulated or
not, run these.
"""

from collections.abc import Mapping
from typing import NamedTuple

from diloco.protocol.messages import OfferTerms
from diloco.protocol.values import Value

# Quorum and admission ---------------------------------------------------------


class Standing(NamedTuple):
  """The facts of a round that a rule of quorum knows."""

  offers: int  # That it can merge.
  live: int  # Learners that are here to stay.
  quorum: int  # K, at most the learners that can be pulled from.


class Verdict(NamedTuple):
  """A decision and its reason."""

  holds: bool
  reason: str


def count_offers(standing: Standing) -> Verdict:
  """K offers suffice (the paper's Alg. 2)."""
  offers, live, quorum = standing
  return Verdict(offers >= quorum, f'{offers}/{quorum} offers, {live} live')


QUORUM_RULES = {'offers': count_offers}


class Admission(Value):
  """The rule that says which offers a round takes."""

  waits_for_clock: bool  # Its learner's pace clock must have reached the round.


# 'latest' merges the newest offer of every live learner, 'fresh' only offers of
# learners whose pace clock has reached the round (the paper's reading).
ADMISSIONS = {'latest': Admission(False), 'fresh': Admission(True)}


# The weight of a contribution: quantity times quality of its tokens -----------


def token_weight(c_tokens: int, c_steps: int) -> float:
  """w = c_tokens · (c_tokens / c_steps) (Alg. 2, line 9); 0 without a step."""
  return c_tokens * (c_tokens / c_steps) if c_steps else 0.0


def equal_weight(c_tokens: int, c_steps: int) -> float:
  """w = 1; 0 for a contribution without a step."""
  return 1.0 if c_steps else 0.0


WEIGHTS = {'tokens': token_weight, 'equal': equal_weight}


def normalised(weights: Mapping[int, float]) -> dict[int, float]:
  """Returns weights that sum to 1, in ascending id; equal if all are 0."""
  total = sum(weights[m] for m in sorted(weights))
  if total == 0.0:
    return {m: 1.0 / len(weights) for m in sorted(weights)}
  return {m: weights[m] / total for m in sorted(weights)}


# The policy -------------------------------------------------------------------


def grace_window_s(
  step_s: float,
  quorum_s: float,
  sync_s: float,
  overlap_steps: int,
  safety: float,
  cap_steps: float,
) -> float:
  """ξ_grace = clip(γ·(τ·ξ_step − ξ_quorum − ξ_sync), 0, cap·ξ_step), in s.

  The part of the τ overlapped steps that quorum and sync leave over may be
  spent on waiting for more learners.
  """
  slack_s = overlap_steps * step_s - quorum_s - sync_s
  return min(max(safety * slack_s, 0.0), cap_steps * step_s)


class RoundPolicy:
  """The rules of one run by which its rounds wait and merge.

  Args:
    config: the run's `ProtocolConfig`, which says which rules these are.
  """

  def __init__(self, config):
    self.config = config

  def quorum(self, live: int, proven: int) -> int:
    """Returns K now: at most the learners that can be pulled from, at least 1.

    Args:
      live: number of live learners.
      proven: those of them that do not rest after failed pulls.
    """
    return max(1, min(self.config.quorum, proven or live))

  def enough(self, offers: int, live: int, quorum: int) -> Verdict:
    """Says if a round may merge so many offers; see `Standing`."""
    rule = QUORUM_RULES[self.config.quorum_rule]
    return rule(Standing(offers, live, quorum))

  def waits_for_clock(self) -> bool:
    """Returns True if only clocks that have reached a round give it offers."""
    return ADMISSIONS[self.config.admission].waits_for_clock

  def admits(self, clock: int | None, due_step: int) -> bool:
    """Returns True if a learner's clock lets its offer into a round.

    Args:
      clock: its pace clock; None: it is leaving.
      due_step: at which the round is due; 0 in a run's finish.
    """
    return not self.waits_for_clock() or clock is None or clock >= due_step

  def window_s(
    self, step_s: float | None, quorum_s: float, sync_s: float
  ) -> float:
    """Returns ξ_grace in seconds; `step_s` None: no step is known yet."""
    if step_s is None:
      return 0.0
    config = self.config
    return grace_window_s(
      *(step_s, quorum_s, sync_s),
      *(config.overlap_steps, config.grace_safety, config.grace_cap_steps),
    )

  def awaits(
    self, round_: int, due_step: int, clock: int, offered: int | None
  ) -> bool:
    """Returns True if a round's window stays open for a live learner.

    It ends early once it stays open for none. Steps are reported before a
    snapshot is encoded: a clock alone would end the window on the very offers
    that it is held open for.

    Args:
      due_step: as in `admits`.
      clock: the learner's pace clock.
      offered: the round that its newest offer is for; None: it has none.
    """
    if offered is None or offered < round_:
      return True
    # If each step has a round (s = 1), the next offer is of another fragment: a
    # learner whose clock is behind has nothing newer to wait for.
    newest = self.config.spacing_steps == 1 and not self.waits_for_clock()
    return not newest and clock < due_step

  def why_over(
    self, now: float, closes_at_s: float, awaits_any: bool, counted: str
  ) -> str | None:
    """Returns why a round with its quorum waits no longer; None: it waits on.

    Args:
      closes_at_s: end of its grace window.
      awaits_any: whether the window stays open for any learner.
      counted: the reason with which its quorum was reached.
    """
    if not awaits_any:
      return 'everyone is in'
    return f'window over, {counted}' if now >= closes_at_s else None

  def why_finish_over(
    self, now: float, finish_at_s: float, all_in: bool
  ) -> str | None:
    """Returns why a last round waits no longer, even below the quorum."""
    if now >= finish_at_s:
      return 'finish, time is over'
    return 'finish, everyone handed in' if all_in else None

  def shares(self, terms: Mapping[int, OfferTerms]) -> dict[int, float]:
    """Returns the normalised weight of each learner's contribution."""
    weigh = WEIGHTS[self.config.weighting]
    return normalised(
      {m: weigh(x.c_tokens, x.c_steps) for m, x in terms.items()}
    )
