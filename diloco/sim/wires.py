# SPDX-License-Identifier: Apache-2.0
"""How long bytes take from one simulated process to another."""

import dataclasses
import enum
import random
from collections.abc import Mapping, Sequence
from typing import Protocol

SYNCER = -1  # Among the ids of learners.


class Cargo(enum.Enum):
  """What is pulled."""

  OFFER = 'offer'  # A fragment, by the codec of the way up.
  UPDATE = 'update'  # A fragment, by the codec of the way down.
  FRAGMENT = 'fragment'  # A fragment, f32.
  STATE = 'state'  # All of θ and the inner optimizer's state, f32.


@dataclasses.dataclass(frozen=True)
class Link:
  """How one learner's link differs from the usual one; up is to the syncer.

  Attributes:
    up_s: added to the latency of a message.
    down_s: likewise.
    up: how many times as long bytes take.
    down: likewise.
  """

  up_s: float = 0.0
  down_s: float = 0.0
  up: float = 1.0
  down: float = 1.0


USUAL = Link()


class Wires(Protocol):
  """Carries bytes; knows what is on the way."""

  def pieces(self, cargo: Cargo) -> int:
    """In how many pulls, one after another, it comes.

    What is large comes in pieces, so that others get their turn on the link.
    """

  def offer_bytes(self, fragment: int) -> int:
    """What a learner says of the size of an offer; at least 1."""

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

  def offer_bytes(self, fragment: int) -> int:
    """See `Wires`."""
    return 1

  def arrival_s(
    self, now_s: float, source: int, target: int, cargo: Cargo, fragment: int
  ) -> float:
    """See `Wires`."""
    del source, cargo, fragment
    latency_s = self._latency_s if target == SYNCER else 0.0
    return now_s + latency_s + self._transfer_s


class UnequalWires:
  """Links of their own, fragments of several sizes, stalls, throttled links.

  Args:
    transfer_s: of a fragment of size 1 over the usual link.
    latency_s: added where the syncer pulls.
    links: by learner id; the usual one for all others.
    sizes: of the fragments, relative to the usual one.
    stall_share: of the pulls; those take up to `STALL_S` longer.
    seed: of which pulls those are.

  Attributes:
    throttled: how many times as long bytes take for now, by learner id.
  """

  STALL_S = 5.0
  LONGEST_S = 10.0  # Of a pull: a time-out would end it.
  BYTES = 1000  # Of an offer of the usual size, as far as is said.

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
    """See `Wires`."""
    return SteadyWires.STATE_FRAGMENTS if cargo is Cargo.STATE else 1

  def offer_bytes(self, fragment: int) -> int:
    """See `Wires`."""
    return max(1, round(self.BYTES * self._sizes[fragment]))

  def arrival_s(
    self, now_s: float, source: int, target: int, cargo: Cargo, fragment: int
  ) -> float:
    """See `Wires`."""
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
