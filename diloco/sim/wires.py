# SPDX-License-Identifier: Apache-2.0
"""Models of how long bytes take from one simulated process to another."""

import dataclasses
import enum
import random
from collections.abc import Mapping, Sequence
from typing import Protocol

SYNCER = -1  # Among the ids of learners.


class Cargo(enum.Enum):
  """The kinds of pulled bytes."""

  OFFER = 'offer'  # A fragment in the codec to the syncer.
  UPDATE = 'update'  # A fragment in the codec from the syncer.
  FRAGMENT = 'fragment'  # A fragment, f32.
  STATE = 'state'  # All of θ and the inner optimizer's state, f32.


@dataclasses.dataclass(frozen=True)
class Link:
  """A learner's deviation from the usual link; up is to the syncer.

  Attributes:
    up_s: added to the latency of a message, upwards.
    down_s: added to the latency of a message, downwards.
    up: factor on the time that bytes take, upwards.
    down: factor on the time that bytes take, downwards.
  """

  up_s: float = 0.0
  down_s: float = 0.0
  up: float = 1.0
  down: float = 1.0


USUAL = Link()


class Wires(Protocol):
  """Carries bytes; knows what is in transfer."""

  def pieces(self, cargo: Cargo) -> int:
    """Returns the number of sequential pulls in which it is transferred.

    Large transfers come in pieces, so that others get their turn on the link.
    """

  def offer_bytes(self, fragment: int) -> int:
    """Returns the announced size of a learner's offer; at least 1."""

  def arrival_s(
    self, now_s: float, source: int, target: int, cargo: Cargo, fragment: int
  ) -> float:
    """Returns when a pull of one piece that begins now is over.

    Args:
      now_s: never less than at the call before.
      source: process that has the bytes, a learner id or `SYNCER`.
      target: process that pulls, a learner id or `SYNCER`.
      cargo: what is pulled.
      fragment: its fragment; ignored for STATE.
    """


class SteadyWires:
  """The same time for every fragment, whatever else is in transfer.

  Args:
    transfer_s: duration for a fragment.
    latency_s: added if the syncer pulls.
  """

  STATE_FRAGMENTS = 4  # A state takes as long as this many fragments.

  def __init__(self, transfer_s: float, latency_s: float):
    self._transfer_s = transfer_s
    self._latency_s = latency_s

  def pieces(self, cargo: Cargo) -> int:
    """Returns the number of pulls; see `Wires`."""
    return self.STATE_FRAGMENTS if cargo is Cargo.STATE else 1

  def offer_bytes(self, fragment: int) -> int:
    """Returns the size of an offer; see `Wires`."""
    return 1

  def arrival_s(
    self, now_s: float, source: int, target: int, cargo: Cargo, fragment: int
  ) -> float:
    """Returns when a pull is over; see `Wires`."""
    del source, cargo, fragment
    latency_s = self._latency_s if target == SYNCER else 0.0
    return now_s + latency_s + self._transfer_s


class UnequalWires:
  """Individual links, fragments of several sizes, stalls, throttled links.

  Args:
    transfer_s: duration for a fragment of size 1 over the usual link.
    latency_s: added if the syncer pulls.
    links: by learner id; the usual one for all others.
    sizes: sizes of the fragments, relative to the usual one.
    stall_share: share of the pulls that take up to `STALL_S` longer.
    seed: seed of the stalls.

  Attributes:
    throttled: current factor on the time that bytes take, by learner id.
  """

  STALL_S = 5.0
  LONGEST_S = 10.0  # For a pull: a time-out would end it.
  BYTES = 1000  # Announced size of an offer of the usual size.

  def __init__(
    self,
    transfer_s: float,
    latency_s: float,
    links: Mapping[int, Link],
    sizes: Sequence[float],
    stall_share: float,
    seed: int,
  ):
    self.throttled: dict[int, float] = {}
    self.stall_share = stall_share
    self._transfer_s = transfer_s
    self._latency_s = latency_s
    self._links = links
    self._sizes = sizes
    self._random = random.Random(f'stalls of {seed}')

  def pieces(self, cargo: Cargo) -> int:
    """Returns the number of pulls; see `Wires`."""
    return SteadyWires.STATE_FRAGMENTS if cargo is Cargo.STATE else 1

  def offer_bytes(self, fragment: int) -> int:
    """Returns the size of an offer; see `Wires`."""
    return max(1, round(self.BYTES * self._sizes[fragment]))

  def arrival_s(
    self, now_s: float, source: int, target: int, cargo: Cargo, fragment: int
  ) -> float:
    """Returns when a pull is over; see `Wires`."""
    size = 1.0 if cargo is Cargo.STATE else self._sizes[fragment]
    transfer_s = self._transfer_s * size
    if source != SYNCER:
      transfer_s *= self._links.get(source, USUAL).up
    if target != SYNCER:
      transfer_s *= self._links.get(target, USUAL).down
    for learner in {source, target} & self.throttled.keys():
      transfer_s *= self.throttled[learner]
    if self.stall_share and self._random.random() < self.stall_share:
      transfer_s += self._random.uniform(0.0, self.STALL_S)
    latency_s = 0.0
    if target == SYNCER:
      link = self._links.get(source, USUAL)
      latency_s = self._latency_s + (link.up_s + link.down_s) / 2
    return now_s + latency_s + min(transfer_s, self.LONGEST_S)
