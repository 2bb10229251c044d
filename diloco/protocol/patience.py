# SPDX-License-Identifier: Apache-2.0
"""Every time-out of a run: from what was measured, and from one knob.

The knob is `ProtocolConfig.patience`, 1 by default: it stretches all of them
alike. The floors stand for what a host does beside the run (a scheduler's
whim, a page fault storm), the factors for how uneven steps and links are.
"""

from diloco.protocol.grace import Ema

SILENCE_FLOOR_S = 10.0  # With 10 ms steps, this is a thousand of them.
SILENCE_STEPS = 6.0  # With 60 s steps, six minutes.
PULL_FLOOR_S = 1.0  # A late contribution costs a round no more than that,
PULL_FACTOR = 4.0  # or this many of what pulls usually take.
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


def pull_max_s(pull_s: Ema, patience: float) -> float | None:
  """How long a round waits for its last bytes; None: nothing is measured."""
  if pull_s.value_s is None:
    return None
  return patience * max(PULL_FLOOR_S, PULL_FACTOR * pull_s.value_s)


def transfer_max_s(nbytes: int, s_per_byte: Ema, patience: float) -> float:
  """How long a pull may take: max(floor, 8 times what it usually takes)."""
  usual = s_per_byte.value_s
  if usual is None:
    return patience * max(TRANSFER_FLOOR_S, nbytes * UNMEASURED_S_PER_BYTE)
  return patience * max(TRANSFER_FLOOR_S, TRANSFER_FACTOR * nbytes * usual)


def end_wait_s(patience: float) -> float:
  """How long a learner that has made all steps looks for its syncer."""
  return patience * END_WAIT_S


def look_s(patience: float) -> float:
  """How often the syncer looks at its clock, whatever happens."""
  return LOOK_FLOORS * silence_floor_s(patience)
