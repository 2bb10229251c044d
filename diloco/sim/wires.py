# SPDX-License-Identifier: Apache-2.0
"""How long bytes take from one simulated process to another."""

import enum
from typing import Protocol

SYNCER = -1  # Among the ids of learners.


class Cargo(enum.Enum):
  """What is pulled."""

  OFFER = 'offer'  # A fragment, by the codec of the way up.
  UPDATE = 'update'  # A fragment, by the codec of the way down.
  FRAGMENT = 'fragment'  # A fragment, f32.
  STATE = 'state'  # All of θ and the inner optimizer's state, f32.


class Wires(Protocol):
  """Carries bytes; knows what is on the way."""

  def pieces(self, cargo: Cargo) -> int:
    """In how many pulls, one after another, it comes.

    What is large comes in pieces, so that others get their turn on the link.
    """

  def arrival_s(
    self, now_s: float, source: int, target: int, cargo: Cargo, fragment: int
  ) -> float:
    """When a pull of one piece that begins now is over.

    Args:
      now_s: never less than at the call before.
      source: whose bytes they are, an id of a learner or `SYNCER`.
      target: who pulls, likewise.
      cargo: what.
      fragment: of which; without a meaning for STATE.
    """


class SteadyWires:
  """The same time for every fragment, whatever else is under way.

  Args:
    transfer_s: of a fragment.
    latency_s: added where the syncer pulls.
  """

  STATE_FRAGMENTS = 4  # A state takes as long as so many.

  def __init__(self, transfer_s: float, latency_s: float):
    self._transfer_s = transfer_s
    self._latency_s = latency_s

  def pieces(self, cargo: Cargo) -> int:
    """See `Wires`."""
    return self.STATE_FRAGMENTS if cargo is Cargo.STATE else 1

  def arrival_s(
    self, now_s: float, source: int, target: int, cargo: Cargo, fragment: int
  ) -> float:
    """See `Wires`."""
    del source, cargo, fragment
    latency_s = self._latency_s if target == SYNCER else 0.0
    return now_s + latency_s + self._transfer_s
