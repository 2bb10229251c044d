# SPDX-License-Identifier: Apache-2.0
"""Refuses outlier contributions, and quarantines learners that send several.

Norms are compared per √step, since steps add up like a random walk with little
drift. A round of three or more contributions is judged by its own median, so
that a change common to all (a loss spike, a larger rate) is not blamed on one
learner.
"""

import math
from collections.abc import Mapping

OUTLIER_FACTOR = 16.0  # Fresh AdamW moments enlarge a first step about 5 times.
JUDGES_MIN = 3  # Contributions of a round that may judge each other.
STRIKES_MAX = 3  # Consecutive refusals before a quarantine.
USUAL_WEIGHT = 0.2  # Weight of the newest round in the usual norm.
BELIEF_FACTOR = 2.0  # A refused norm raises the usual norm by this factor.


def per_root_step(norm: float, c_steps: int) -> float:
  """‖v_m‖ / √c_steps."""
  return norm / math.sqrt(max(c_steps, 1))


def outliers(norms: Mapping[int, float], usual: float | None) -> dict[int, str]:
  """Returns the learners that must not be merged, each with the reason.

  Args:
    norms: ‖v_m‖ / √c_steps by learner, of one round.
    usual: the fragment's usual norm before; None in the first round.
  """
  if len(norms) >= JUDGES_MIN:
    # The lower median: half of a round may be wrong, and high.
    reference = sorted(norms.values())[(len(norms) - 1) // 2]
    whose = "the round's median"
  elif usual is not None:
    reference, whose = usual, 'what is usual'
  else:
    return {}
  if not reference:
    return {}  # Nothing has moved yet: any norm is infinitely larger.
  most = OUTLIER_FACTOR * reference
  return {
    m: (
      f'norm per √step {norm:.3g}, {whose} is {reference:.3g}, at most '
      f'{OUTLIER_FACTOR:g} times that is merged'
    )
    for m, norm in sorted(norms.items())
    if norm > most
  }


def usual_after(
  usual: float | None, merged: Mapping[int, float], refused: int
) -> float | None:
  """Returns the usual norm after a round.

  A persistent change is accepted in the end: each refusal doubles the usual
  norm, so that a run cannot be locked out by its own past.

  Args:
    usual: the usual norm before.
    merged: ‖v_m‖ / √c_steps of the merged contributions.
    refused: the number of outliers.
  """
  if merged:
    mean = math.fsum(merged.values()) / len(merged)
    usual = mean if usual is None else usual + USUAL_WEIGHT * (mean - usual)
  if usual is not None and refused:
    usual *= BELIEF_FACTOR**refused
  return usual
