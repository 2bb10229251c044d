# SPDX-License-Identifier: Apache-2.0
"""Computes every time-out of a run from measured times and one factor.

The factor is `ProtocolConfig.patience`, 1 by default: it stretches all
time-outs alike. The floors allow for what a host does besides the run
(scheduling, page faults), the multiples for uneven steps and links.
"""

from diloco.protocol.grace import Ema
from diloco.protocol.transfer_time import TransferTime

SILENCE_FLOOR_S = 10.0  # With 10 ms steps, this is 1000 steps.
SILENCE_STEPS = 6.0  # With 60 s steps, six minutes.
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


def silence_floor_s(patience: float) -> float:
  """Returns the silence that is tolerated in every learner, in seconds."""
  return patience * SILENCE_FLOOR_S


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
