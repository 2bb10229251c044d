# SPDX-License-Identifier: Apache-2.0
"""How long the pulls from one peer take: its latency, and bytes by its rate."""

import dataclasses

from diloco.protocol.grace import EMA_WEIGHT
from diloco.protocol.values import changed

# Sizes that differ by less, as a share of their mean, tell no rate.
SPREAD_MIN = 0.1
# What was given up makes an estimate at most this many times what was
# measured: a link that slows down further is found by its next session.
STRETCH_MAX = 16.0
STRETCHED_S = 15.0  # Or so long, where that is more.


@dataclasses.dataclass(frozen=True)
class TransferTime:
  """Weighted least squares of time over bytes, of the last pulls.

  Pulls of one size tell latency and rate not apart: what is larger is taken
  to need time in proportion, and what is smaller no less.

  Attributes:
    nbytes: mean of the pulls' sizes.
    took_s: mean of their times; None: nothing is known.
    variance: of the sizes, bytes².
    covariance: of sizes and times, bytes·s.
    stretch: by what the estimate was raised since the last success, ≥ 1.
    failed: whether the last pull failed, or was given up.
  """

  nbytes: float = 0.0
  took_s: float | None = None
  variance: float = 0.0
  covariance: float = 0.0
  stretch: float = 1.0
  failed: bool = False

  def usual_s(self, nbytes: int) -> float | None:
    """What a pull of so many bytes should take; None: nothing is known."""
    measured_s = self._measured_s(nbytes)
    return None if measured_s is None else self.stretch * measured_s

  def add(self, nbytes: int, took_s: float) -> 'TransferTime':
    """A pull has succeeded; after a failure its time is all that counts."""
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
    """A pull has failed: so many bytes may take as long as `usual_s`.

    Pulls that failed side by side raise it once: it says what was too short.
    """
    measured_s = self._measured_s(nbytes)
    if not measured_s:  # Of a stopped process all time has passed at once.
      return TransferTime(float(nbytes), usual_s, failed=True)
    most = max(STRETCH_MAX, STRETCHED_S / measured_s)
    stretch = min(usual_s / measured_s, most)
    return changed(self, stretch=max(self.stretch, stretch), failed=True)

  def _measured_s(self, nbytes: int) -> float | None:
    if self.took_s is None:
      return None
    mean = max(self.nbytes, 1.0)
    most = self.took_s / mean  # Else the latency would be negative.
    if self.variance < (SPREAD_MIN * mean) ** 2:
      return max(self.took_s, most * nbytes)
    s_per_byte = min(max(self.covariance / self.variance, 0.0), most)
    return self.took_s + s_per_byte * (nbytes - self.nbytes)
