# SPDX-License-Identifier: Apache-2.0
"""Every time-out of a run: from what was measured, and from one knob.

The knob is `ProtocolConfig.patience`, 1 by default: it stretches all of them
alike. The floors stand for what a host does beside the run (a scheduler's
whim, a page fault storm), the factors for how uneven steps and links are.
"""

from diloco.protocol.grace import Ema
from diloco.protocol.transfer_time import TransferTime

SILENCE_FLOOR_S = 10.0  # With 10 ms steps, this is a thousand of them.
SILENCE_STEPS = 6.0  # With 60 s steps, six minutes.
PULL_FLOOR_S = 1.0  # A late contribution costs a round no more than that,
PULL_FACTOR = 4.0  # or this many of what those of the learner usually take.
LONGER_FACTOR = 2.0  # What was given up is given so much longer next time.
SLOW_FACTOR = 4.0  # Slower than the round's median by this much: slow.
HELD_SHARE = 0.5  # Seconds that slow bytes may hold up others, per second.
REST_FACTOR = 10.0  # Of the last wait in vain; see `rest_s`.
REST_MAX_S = 600.0
TRANSFER_FLOOR_S = 10.0
TRANSFER_FACTOR = 8.0  # Slower than usual by this much: stalled.
UNMEASURED_S_PER_BYTE = 1e-6  # 1 MB/s, until a transfer was timed.
END_WAIT_S = 300.0  # A syncer is started anew within it.
LOOK_FLOORS = 0.25  # Between two looks at the clock, in silence floors.


def silence_floor_s(patience: float) -> float:
  """No learner is given up before this much silence."""
  return patience * SILENCE_FLOOR_S


def silence_max_s(step_s: Ema, patience: float) -> float:
  """How long a live learner may say nothing: max(floor, k·ξ_step)."""
  steps_s = SILENCE_STEPS * step_s.or_zero()
  return patience * max(SILENCE_FLOOR_S, steps_s)


def pull_max_s(time: TransferTime, nbytes: int, patience: float) -> float:
  """How long a round waits for the bytes of one contribution."""
  usual_s = time.usual_s(nbytes)
  if usual_s is None:
    return unmeasured_s(nbytes, patience)
  return patience * max(PULL_FLOOR_S, PULL_FACTOR * usual_s)


def after_pull_failed(
  time: TransferTime, nbytes: int, waited_s: float, patience: float
) -> TransferTime:
  """What is known once a pull has failed: the next one has twice as long."""
  usual_s = LONGER_FACTOR * waited_s / (patience * PULL_FACTOR)
  return time.raised(nbytes, usual_s)


def transfer_max_s(time: TransferTime, nbytes: int, patience: float) -> float:
  """How long a transfer may take: max(floor, 8 times what is usual)."""
  usual_s = time.usual_s(nbytes)
  if usual_s is None:
    return unmeasured_s(nbytes, patience)
  return patience * max(TRANSFER_FLOOR_S, TRANSFER_FACTOR * usual_s)


def after_transfer_failed(
  time: TransferTime, nbytes: int, limit_s: float, patience: float
) -> TransferTime:
  """What is known once a transfer has timed out after `limit_s`."""
  usual_s = LONGER_FACTOR * limit_s / (patience * TRANSFER_FACTOR)
  return time.raised(nbytes, usual_s)


def unmeasured_s(nbytes: int, patience: float) -> float:
  """How long the first bytes of a peer may take."""
  return patience * max(TRANSFER_FLOOR_S, nbytes * UNMEASURED_S_PER_BYTE)


def rest_s(waited_s: float, patience: float) -> float:
  """How long a learner is not pulled from once its session has ended for that.

  In proportion to what the last pull cost in vain, which rises with each, so
  that where the quorum needs it the others wait for it a tenth of the time.
  """
  longest_s = patience * REST_MAX_S
  return min(max(silence_floor_s(patience), REST_FACTOR * waited_s), longest_s)


def end_wait_s(patience: float) -> float:
  """How long a learner that has made all steps looks for its syncer."""
  return patience * END_WAIT_S


def look_s(patience: float) -> float:
  """How often the syncer looks at its clock, whatever happens."""
  return LOOK_FLOORS * silence_floor_s(patience)
