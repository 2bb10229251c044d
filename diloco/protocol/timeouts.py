# SPDX-License-Identifier: Apache-2.0
"""Every time-out of a run, from measured times and one factor.

The factor is `ProtocolConfig.patience`, 1 by default: it stretches all
time-outs alike. The floors allow for what a host does besides the run
(scheduling, page faults), the multiples for uneven steps and links.
"""

from diloco.protocol.values import EMA_WEIGHT, Ema, Value, replace_unchecked

# Sizes that differ by less than this share of their mean do not determine a
# rate.
SPREAD_MIN = 0.1
# A pull that was given up raises the estimate to at most this multiple of what
# was measured: a link that slows down further is measured by its next session.
STRETCH_MAX = 16.0
STRETCHED_S = 15.0  # Or this long, if that is more.
SILENCE_FLOOR_S = 10.0  # With 10 ms steps, this is 1000 steps.
SILENCE_STEPS = 6.0  # With 60 s steps, six minutes.
ALIVE_S = 1.0  # A learner that waits sends `Alive` at this interval.
PULL_FLOOR_S = 1.0  # The least that a round waits for a late contribution,
PULL_FACTOR = 4.0  # or this multiple of the learner's usual time.
LONGER_FACTOR = 2.0  # After a time-out the next one is longer by this.
SLOW_FACTOR = 4.0  # Above this multiple of the round's median: slow.
HELD_SHARE = 0.5  # Seconds that slow bytes may hold up others, per second.
REST_FACTOR = 10.0  # Multiple of the last wait in vain; see `rest_s`.
REST_MAX_S = 600.0
TRANSFER_FLOOR_S = 10.0
TRANSFER_FACTOR = 8.0  # Slower than usual by this factor: stalled.
UNMEASURED_S_PER_BYTE = 1e-6  # 1 MB/s, until a transfer was timed.
END_WAIT_S = 300.0  # Time for a syncer to be restarted.
LOOK_FLOORS = 0.25  # Between two looks at the clock, in silence floors.


class TransferTime(Value):
  """A weighted least-squares fit of time over bytes, for the latest pulls.

  Pulls of one size do not separate latency from rate: larger ones are assumed
  to take proportionally longer, and smaller ones no less.
  """

  nbytes: float = 0.0  # Mean size of the pulls.
  took_s: float | None = None  # Their mean duration; None: nothing is known.
  variance: float = 0.0  # Of the sizes, in bytes².
  covariance: float = 0.0  # Of size and duration, in bytes·s.
  stretch: float = 1.0  # Raises the estimate since the last success; ≥ 1.
  failed: bool = False  # The last pull failed or was given up.

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
    return replace_unchecked(
      self, stretch=max(self.stretch, stretch), failed=True
    )

  def _measured_s(self, nbytes: int) -> float | None:
    if self.took_s is None:
      return None
    mean = max(self.nbytes, 1.0)
    most = self.took_s / mean  # Otherwise the latency would be negative.
    if self.variance < (SPREAD_MIN * mean) ** 2:
      return max(self.took_s, most * nbytes)
    s_per_byte = min(max(self.covariance / self.variance, 0.0), most)
    return self.took_s + s_per_byte * (nbytes - self.nbytes)


def silence_floor_s(patience: float) -> float:
  """Returns the silence that is tolerated in every learner, in seconds."""
  return patience * SILENCE_FLOOR_S


def alive_s(patience: float) -> float:
  """The interval of `Alive`, at most half the silence that ends a session."""
  return min(ALIVE_S, silence_floor_s(patience) / 2)


def silence_max_s(step_s: Ema, patience: float) -> float:
  """Returns how long a live learner may be silent: max(floor, k·ξ_step), s."""
  steps_s = SILENCE_STEPS * step_s.or_zero()
  return patience * max(SILENCE_FLOOR_S, steps_s)


def pull_max_s(time: TransferTime, nbytes: int, patience: float) -> float:
  """Returns how many seconds a round waits for one contribution's bytes."""
  usual_s = time.usual_s(nbytes)
  if usual_s is None:
    return unmeasured_s(nbytes, patience)
  return patience * max(PULL_FLOOR_S, PULL_FACTOR * usual_s)


def after_pull_failed(
  time: TransferTime, nbytes: int, waited_s: float, patience: float
) -> TransferTime:
  """Returns the estimate after a failed pull, doubling the next limit."""
  usual_s = LONGER_FACTOR * waited_s / (patience * PULL_FACTOR)
  return time.raised(nbytes, usual_s)


def transfer_max_s(time: TransferTime, nbytes: int, patience: float) -> float:
  """Returns how many seconds a transfer may take: max(floor, 8·usual time)."""
  usual_s = time.usual_s(nbytes)
  if usual_s is None:
    return unmeasured_s(nbytes, patience)
  return patience * max(TRANSFER_FLOOR_S, TRANSFER_FACTOR * usual_s)


def after_transfer_failed(
  time: TransferTime, nbytes: int, limit_s: float, patience: float
) -> TransferTime:
  """Returns the estimate after a transfer timed out at `limit_s`."""
  usual_s = LONGER_FACTOR * limit_s / (patience * TRANSFER_FACTOR)
  return time.raised(nbytes, usual_s)


def unmeasured_s(nbytes: int, patience: float) -> float:
  """Returns how many seconds the first bytes of a peer may take."""
  return patience * max(TRANSFER_FLOOR_S, nbytes * UNMEASURED_S_PER_BYTE)


def rest_s(waited_s: float, patience: float) -> float:
  """Returns how long a learner is not pulled from after late pulls ended it.

  The time is proportional to what the last pull cost in vain, which rises with
  each failure; so if the quorum needs that learner, the others wait for it a
  tenth of the time.
  """
  longest_s = patience * REST_MAX_S
  return min(max(silence_floor_s(patience), REST_FACTOR * waited_s), longest_s)


def end_wait_s(patience: float) -> float:
  """Returns how long a learner with all steps made waits for its syncer, s."""
  return patience * END_WAIT_S


def look_s(patience: float) -> float:
  """Returns the longest time between two looks at the clock, seconds."""
  return LOOK_FLOORS * silence_floor_s(patience)
