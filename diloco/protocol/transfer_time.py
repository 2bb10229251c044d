# SPDX-License-Identifier: Apache-2.0
"""Estimates the latency and the rate of pulls from one peer."""

import dataclasses

from diloco.protocol.grace import EMA_WEIGHT
from diloco.protocol.values import changed

# Sizes that differ by less than this share of their mean do not determine a
# rate.
SPREAD_MIN = 0.1
# A pull that was given up raises the estimate to at most this multiple of what
# was measured: a link that slows down further is measured by its next session.
STRETCH_MAX = 16.0
STRETCHED_S = 15.0  # Or this long, if that is more.


@dataclasses.dataclass(frozen=True)
class TransferTime:
  """A weighted least-squares fit of time over bytes, for the latest pulls.

  Pulls of one size do not separate latency from rate: larger ones are assumed
  to take proportionally longer, and smaller ones no less.

  Attributes:
    nbytes: mean size of the pulls.
    took_s: mean duration of the pulls; None: nothing is known.
    variance: variance of the sizes, in bytes².
    covariance: covariance of size and duration, in bytes·s.
    stretch: factor by which the estimate was raised since the last success, ≥
      1.
    failed: True if the last pull failed or was given up.
  """

  nbytes: float = 0.0
  took_s: float | None = None
  variance: float = 0.0
  covariance: float = 0.0
  stretch: float = 1.0
  failed: bool = False

  def usual_s(self, nbytes: int) -> float | None:
    """Returns the expected seconds for `nbytes`; None: nothing is known."""
    measured_s = self._measured_s(nbytes)
    return None if measured_s is None else self.stretch * measured_s

  def add(self, nbytes: int, took_s: float) -> 'TransferTime':
    """Adds a successful pull; after a failure its duration replaces the fit."""
    if self.took_s is None or self.failed:
      return TransferTime(float(nbytes), took_s)
    w = EMA_WEIGHT
    more, longer_s = nbytes - self.nbytes, took_s - self.took_s
    return TransferTime(
      self.nbytes + w * more,
      self.took_s + w * longer_s,
      (1 - w) * (self.variance + w * more**2),
      (1 - w) * (self.covariance + w * more * longer_s),
    )

  def raised(self, nbytes: int, usual_s: float) -> 'TransferTime':
    """Raises the estimate after a failed pull, to `usual_s` for `nbytes`.

    Pulls that failed concurrently raise it only once.
    """
    measured_s = self._measured_s(nbytes)
    if not measured_s:  # Time leaps past all limits while a process is stopped.
      return TransferTime(float(nbytes), usual_s, failed=True)
    most = max(STRETCH_MAX, STRETCHED_S / measured_s)
    stretch = min(usual_s / measured_s, most)
    return changed(self, stretch=max(self.stretch, stretch), failed=True)

  def _measured_s(self, nbytes: int) -> float | None:
    if self.took_s is None:
      return None
    mean = max(self.nbytes, 1.0)
    most = self.took_s / mean  # Otherwise the latency would be negative.
    if self.variance < (SPREAD_MIN * mean) ** 2:
      return max(self.took_s, most * nbytes)
    s_per_byte = min(max(self.covariance / self.variance, 0.0), most)
    return self.took_s + s_per_byte * (nbytes - self.nbytes)
