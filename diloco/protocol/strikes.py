# SPDX-License-Identifier: Apache-2.0
"""Which contributions are refused, and who is quarantined for them.

A norm is compared per √step: steps add up like a walk that drifts little. A
round of three and more judges itself by its median, so that what is new for
all (a spike of the loss, a larger rate) is not taken for one learner's fault.
"""

import math
from collections.abc import Mapping

OUTLIER_FACTOR = 16.0  # Fresh AdamW moments stretch a first step about 5 times.
JUDGES_MIN = 3  # Contributions of a round that may judge each other.
STRIKES_MAX = 3  # In a row, and a learner is quarantined.
USUAL_WEIGHT = 0.2  # Of the newest round in the usual norm.
BELIEF_FACTOR = 2.0  # A refused norm raises what is usual by this much.


def per_root_step(norm: float, c_steps: int) -> float:
  """‖v_m‖ / √c_steps."""
  return norm / math.sqrt(max(c_steps, 1))


def outliers(norms: Mapping[int, float], usual: float | None) -> dict[int, str]:
  """Who must not be merged, and why.

  Args:
    norms: ‖v_m‖ / √c_steps by learner, of one round.
    usual: of this fragment in rounds before; None in the first.
  """
  if len(norms) >= JUDGES_MIN:
    # The lower of two: half of a round may be wrong, and high.
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
  """What is usual after a round.

  A persistent change is believed in the end: each refusal doubles what is
  usual, so that a run can't lock itself out by its own past.

  Args:
    usual: before.
    merged: ‖v_m‖ / √c_steps of those that were merged.
    refused: how many were outliers.
  """
  if merged:
    mean = math.fsum(merged.values()) / len(merged)
    usual = mean if usual is None else usual + USUAL_WEIGHT * (mean - usual)
  if usual is not None and refused:
    usual *= BELIEF_FACTOR**refused
  return usual
