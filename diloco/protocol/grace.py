# SPDX-License-Identifier: Apache-2.0
"""The adaptive grace window (Eq. 3) and the averages behind it."""

import dataclasses

EMA_WEIGHT = 0.2  # Weight of the newest sample; the paper gives no value.


@dataclasses.dataclass(frozen=True)
class Ema:
  """An exponential moving average of seconds; the first sample sets it."""

  value_s: float | None = None

  def add(self, sample_s: float) -> 'Ema':
    if self.value_s is None:
      return Ema(sample_s)
    return Ema(self.value_s + EMA_WEIGHT * (sample_s - self.value_s))

  def or_zero(self) -> float:
    return 0.0 if self.value_s is None else self.value_s


def grace_window_s(
  step_s: float,
  quorum_s: float,
  sync_s: float,
  overlap_steps: int,
  safety: float,
  cap_steps: float,
) -> float:
  """ξ_grace = clip(γ·(τ·ξ_step − ξ_quorum − ξ_sync), 0, cap·ξ_step), in
  seconds.

  The part of the τ overlapped steps that quorum and sync leave over may be
  spent on waiting for more learners.
  """
  slack_s = overlap_steps * step_s - quorum_s - sync_s
  return min(max(safety * slack_s, 0.0), cap_steps * step_s)
