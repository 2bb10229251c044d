# SPDX-License-Identifier: Apache-2.0
"""Bytes, links and bandwidths of several systems, by arithmetic.

The forms are those of one first-in-first-out link over infinitely many steps,
of which a simulation checks them (`tests/fleets/test_traffic.py`). An inner
step takes T: a third of it forward, the rest backward. Units: Gbit, Gbit/s,
seconds.
"""

import dataclasses
import math

LEAST_GBPS, MOST_GBPS = 1e-9, 1e12  # Between which `Form.gbps` looks.


def all_reduce_share(datacentres: int) -> float:
  """f = 2(1 − 1/D): share of the model that an all-reduce sends per link."""
  return 2 * one_way_share(datacentres)


def one_way_share(datacentres: int) -> float:
  """f' = 1 − 1/D: the share that leaves a data centre, shards being spread."""
  return 1 - 1 / datacentres


class Form:
  """A closed form of the compute utilisation, which rises with the rate."""

  def utilisation(self, gbps: float) -> float:
    """Returns the compute utilisation at this bandwidth."""
    raise NotImplementedError

  def gbps(self, utilisation: float) -> float:
    """Returns B for this utilisation in (0, 1), to f64's digits."""
    if self.utilisation(LEAST_GBPS) >= utilisation:
      return 0.0  # Nothing has to be sent.
    low, high = LEAST_GBPS, MOST_GBPS
    while True:
      middle = math.sqrt(low * high)
      if not low < middle < high:
        return high
      if self.utilisation(middle) < utilisation:
        low = middle
      else:
        high = middle


@dataclasses.dataclass(frozen=True)
class Bursts(Form):
  """Data-parallel (H = 1) and DiLoCo: S·f in K buckets in every H-th step.

  The burst's step ends when the link has sent what began with the first bucket,
  or, if the link is faster than that, when the last bucket, which is ready at
  T, is through:

      t = max(T/3 + 2T/(3K) + G/B, T + G/(K·B)),   CU = H·T / ((H−1)·T + t)
  """

  gbit: float  # G, of one burst.
  step_s: float  # T.
  buckets: int  # K.
  every: int = 1  # H, in steps.

  def utilisation(self, gbps: float) -> float:
    first_s = self.step_s / 3 + 2 * self.step_s / (3 * self.buckets)
    burst_s = max(
      first_s + self.gbit / gbps,
      self.step_s + self.gbit / (self.buckets * gbps),
    )
    calm_s = (self.every - 1) * self.step_s
    return self.every * self.step_s / (calm_s + burst_s)


@dataclasses.dataclass(frozen=True)
class Stream(Form):
  """A fragment every s = H/P steps, due L = (τ+1)·T later.

  One fragment of g_1 and P − 1 of g each (all even: g_1 = g); d = g/B. If L >
  s·T, a fragment may still be in transfer when the next one comes, and a cycle
  of H steps is stretched by the largest excess: in all, of the large fragment,
  and of the others in a row:

      W = max(0, Σd − H·T, d_1 − L, (P−1)·(d − s·T) + s·T − L)

  Otherwise each waits for itself: W = Σ max(0, d − L). CU = H·T / (H·T + W).
  """

  first_gbit: float  # g_1.
  other_gbit: float  # g, of each other fragment.
  fragments: int  # P.
  step_s: float  # T.
  every: int  # H, in steps.
  overlap: int  # τ, in steps.

  def utilisation(self, gbps: float) -> float:
    first_s, other_s = self.first_gbit / gbps, self.other_gbit / gbps
    others = self.fragments - 1
    spacing_s = self.every // self.fragments * self.step_s
    due_s = (self.overlap + 1) * self.step_s
    cycle_s = self.every * self.step_s
    if due_s > spacing_s:  # Fragments can queue behind each other.
      stall_s = max(
        0.0,
        first_s + others * other_s - cycle_s,
        first_s - due_s,
        others * (other_s - spacing_s) + spacing_s - due_s,
      )
    else:
      stall_s = max(0.0, first_s - due_s)
      stall_s += others * max(0.0, other_s - due_s)
    return cycle_s / (cycle_s + stall_s)


def fragment_shares(
  fragments: int, embedding_share: float
) -> tuple[float, ...]:
  """Returns each fragment's share of the parameters; the embedding is first.

  Args:
    embedding_share: share of an embedding fragment; 0: all are equal.
  """
  if not embedding_share or fragments == 1:
    return (1 / fragments,) * fragments
  rest = (1 - embedding_share) / (fragments - 1)
  return (embedding_share,) + (rest,) * (fragments - 1)
