# SPDX-License-Identifier: Apache-2.0
"""Models of how long bytes take from one simulated process to another."""

import dataclasses
import enum
import math
import random
import types
from collections.abc import Mapping, Sequence

SYNCER = -1  # Among the ids of learners.
PIECES_MAX = 1000  # Pieces of a state; each is an event.


class Cargo(enum.Enum):
  """The kinds of pulled bytes."""

  OFFER = 'offer'  # A fragment in the codec to the syncer.
  UPDATE = 'update'  # A fragment in the codec from the syncer.
  FRAGMENT = 'fragment'  # A fragment, f32.
  STATE = 'state'  # All of θ and the inner optimizer's state, f32.


@dataclasses.dataclass(frozen=True)
class LinkDeviation:
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


USUAL = LinkDeviation()


class UnequalWires:
  """Pulls that do not share a link; by default one duration for all.

  Args:
    transfer_s: duration for a fragment of size 1 over the usual link.
    latency_s: added if the syncer pulls.
    links: by learner id; the usual one for all others.
    sizes: sizes of the fragments, relative to the usual one; (): all equal.
    stall_share: share of the pulls that take up to `STALL_S` longer.
    seed: seed of the stalls.
    full_updates: time of a full fragment, by that of an update.

  Attributes:
    throttled: current factor on the time that bytes take, by learner id.
  """

  STATE_FRAGMENTS = 4  # A state takes as long as this many fragments.
  STALL_S = 5.0
  LONGEST_S = 10.0  # For a pull: a time-out would end it.
  BYTES = 1000  # Announced size of an offer of the usual size.

  def __init__(
    self,
    transfer_s: float,
    latency_s: float,
    links: Mapping[int, LinkDeviation] = types.MappingProxyType({}),
    sizes: Sequence[float] = (),
    stall_share: float = 0.0,
    seed: int = 0,
    full_updates: float = 1.0,
  ):
    self.throttled: dict[int, float] = {}
    self.stall_share = stall_share
    self._transfer_s = transfer_s
    self._latency_s = latency_s
    self._links = links
    self._sizes = sizes
    self._random = random.Random(f'stalls of {seed}')
    self._full_updates = full_updates

  def pieces(self, cargo: Cargo) -> int:
    """Returns the number of sequential pulls in which it is transferred.

    Large transfers come in pieces, so that others get their turn on the link.
    """
    return self.STATE_FRAGMENTS if cargo is Cargo.STATE else 1

  def longest_state_s(self) -> float:
    """Returns the longest time of a state between two learners, once healed."""
    links = [*self._links.values(), USUAL]
    transfer_s = self._transfer_s * max(x.up for x in links)
    transfer_s *= max(x.down for x in links)
    return self.pieces(Cargo.STATE) * min(transfer_s, self.LONGEST_S)

  def _size(self, fragment: int) -> float:
    return self._sizes[fragment] if self._sizes else 1.0

  def offer_bytes(self, fragment: int) -> int:
    """Returns the announced size of a learner's offer; at least 1."""
    return max(1, round(self.BYTES * self._size(fragment)))

  def transfer_s(
    self, source: int, target: int, cargo: Cargo, fragment: int
  ) -> float:
    """Returns how long the bytes of a pull take if it does not stall."""
    size = 1.0 if cargo is Cargo.STATE else self._size(fragment)
    transfer_s = self._transfer_s * size
    if cargo is Cargo.FRAGMENT:
      transfer_s *= self._full_updates
    if source != SYNCER:
      transfer_s *= self._links.get(source, USUAL).up
    if target != SYNCER:
      transfer_s *= self._links.get(target, USUAL).down
    for learner in {source, target} & self.throttled.keys():
      transfer_s *= self.throttled[learner]
    return transfer_s

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
    transfer_s = self.transfer_s(source, target, cargo, fragment)
    if self.stall_share and self._random.random() < self.stall_share:
      transfer_s += self._random.uniform(0.0, self.STALL_S)
    latency_s = 0.0
    if target == SYNCER:
      link = self._links.get(source, USUAL)
      latency_s = self._latency_s + (link.up_s + link.down_s) / 2
    return now_s + latency_s + min(transfer_s, self.LONGEST_S)


@dataclasses.dataclass(frozen=True)
class Network:
  """Sizes and rates; tuples are by fragment, in bytes on the wire.

  Attributes:
    up_bytes: bytes of an offer.
    down_bytes: bytes of an update.
    full_bytes: bytes of a fragment in f32.
    state_bytes: bytes of a donated state.
    learner_bps: bits per second of a learner's link, each way.
    syncer_bps: bits per second of the syncer's link, each way, shared by all
      learners.
    datacentres: D. Learner m is in data centre m mod D, the syncer's shard of
      fragment p in p mod D; traffic within one data centre uses no link. With D
      = 1 the syncer is elsewhere, and every byte uses the links.
    latency_s: latency of a message, one way; a pull takes two.
    encode_s: duration of a snapshot, from boundary to offer.
    merge_s: duration of the outer step of a fragment.
    reconnect_s: from a lost stream to the next attempt.
  """

  up_bytes: tuple[float, ...]
  down_bytes: tuple[float, ...]
  full_bytes: tuple[float, ...]
  state_bytes: float
  learner_bps: float = math.inf
  syncer_bps: float = math.inf
  datacentres: int = 1
  latency_s: float = 0.0
  encode_s: float = 0.0
  merge_s: float = 0.0
  reconnect_s: float = 1.0

  def nbytes(self, cargo: Cargo, fragment: int) -> float:
    """Returns the bytes of one pull."""
    match cargo:
      case Cargo.OFFER:
        return self.up_bytes[fragment]
      case Cargo.UPDATE:
        return self.down_bytes[fragment]
      case Cargo.FRAGMENT:
        return self.full_bytes[fragment]
      case Cargo.STATE:
        return self.state_bytes


class Meter:
  """The bits of one link, one way: in all, and in its busiest window."""

  def __init__(self, window_s: float):
    self.bits = 0.0
    self._window_s = window_s
    self._windows: dict[int, float] = {}

  def add(self, begin_s: float, end_s: float, bits: float):
    """Adds bits, spread evenly over the time that they took."""
    self.bits += bits
    first, last = (int(t / self._window_s) for t in (begin_s, end_s))
    for window in range(first, last + 1):
      inside_s = min(end_s, (window + 1) * self._window_s) - max(
        begin_s, window * self._window_s
      )
      share = inside_s / (end_s - begin_s) if end_s > begin_s else 1.0
      self._windows[window] = self._windows.get(window, 0.0) + share * bits

  def bits_until(self, until_s: float) -> float:
    """Returns the bits that were through by then.

    Bits that queue are added before they are through.
    """
    last, inside_s = divmod(until_s, self._window_s)
    whole = sum(bits for at, bits in self._windows.items() if at < last)
    return whole + self._windows.get(int(last), 0.0) * inside_s / self._window_s

  @property
  def peak_bps(self) -> float:
    """Bits per second in the busiest window."""
    return max(self._windows.values(), default=0.0) / self._window_s


class _Way:
  """One direction of one link: first come, first served."""

  def __init__(self, bps: float, window_s: float):
    self.meter = Meter(window_s)
    self._bps = bps
    self._free_s = 0.0

  def through_s(self, now_s: float, bits: float) -> float:
    """Returns when the last bit is through."""
    begin_s = max(now_s, self._free_s)
    self._free_s = begin_s + bits / self._bps
    self.meter.add(begin_s, self._free_s, bits)
    return self._free_s


class Links:
  """The wires of a fleet.

  A pull uses the links at both ends; the slower one, or the one with the longer
  queue, decides. Bits stream through both at once.

  Args:
    network: sizes and rates.
    window_s: window of the peaks.
  """

  def __init__(self, network: Network, window_s: float):
    self._network = network
    self._window_s = window_s
    self._ways: dict[tuple[int, str], _Way] = {}

  def pieces(self, cargo: Cargo) -> int:
    """Returns the pieces of a state, each about an offer: both share a link."""
    if cargo is not Cargo.STATE:
      return 1
    network = self._network
    offer_bytes = sum(network.up_bytes) / len(network.up_bytes)
    if PIECES_MAX * offer_bytes <= network.state_bytes:
      return PIECES_MAX  # Also if offers have no bytes.
    return max(1, math.ceil(network.state_bytes / offer_bytes))

  def offer_bytes(self, fragment: int) -> int:
    """Returns the size of an offer; see `UnequalWires`."""
    return max(1, round(self._network.up_bytes[fragment]))

  def arrival_s(
    self, now_s: float, source: int, target: int, cargo: Cargo, fragment: int
  ) -> float:
    """Returns when a pull is over; see `UnequalWires`."""
    if cargo is Cargo.STATE:
      latency_s = 0.0  # Its pieces are requested beforehand.
    else:
      latency_s = 2 * self._network.latency_s
      if self._is_near(source, target, fragment):
        return now_s + latency_s
    nbytes = self._network.nbytes(cargo, fragment) / self.pieces(cargo)
    bits = 8.0 * nbytes
    ends_s = (
      self._way(source, 'out').through_s(now_s, bits),
      self._way(target, 'in').through_s(now_s, bits),
    )
    return max(ends_s) + latency_s

  def meters(self) -> dict[tuple[int, str], Meter]:
    """Returns the used links by process and direction, 'in' or 'out'."""
    return {key: way.meter for key, way in sorted(self._ways.items())}

  def _way(self, process: int, direction: str) -> _Way:
    key = process, direction
    if key not in self._ways:
      network = self._network
      bps = network.syncer_bps if process == SYNCER else network.learner_bps
      self._ways[key] = _Way(bps, self._window_s)
    return self._ways[key]

  def _is_near(self, source: int, target: int, fragment: int) -> bool:
    """Returns True if learner and fragment's shard share a data centre."""
    many = self._network.datacentres
    learner = target if source == SYNCER else source
    return many > 1 and learner % many == fragment % many
