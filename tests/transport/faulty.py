# SPDX-License-Identifier: Apache-2.0
"""Wraps a data plane so that its pulls fail as a network would make them.

Faults affect the pulling side. Their random draws come from the given
`random.Random`: each fetcher gets a generator of its own when it is made, so
threads cannot change each other's draws.
"""

import dataclasses
import random
import threading
import time
from collections.abc import Callable

import numpy as np

from diloco.protocol.messages import Payload
from diloco.transport import data_plane

DUPLICATE_WAIT_S = 0.2  # Some planes answer a second pull only by a time-out.

Clock = Callable[[], float]
Wait = Callable[[threading.Event, float], bool]


@dataclasses.dataclass(frozen=True)
class Faults:
  """Probabilities and limits of faults; the default is none.

  Attributes:
    lost: probability that the peer is lost after the last byte but one.
    stalled: probability that the bytes never come, so that the pull times out.
    corrupt: probability that one bit of the bytes is flipped.
    duplicate: probability that the pull is repeated, which must fail.
    delay_s: bounds between which each pull's latency is drawn.
    bytes_per_s: rate of the link, all pulls together; None: unlimited.
    burst_bytes: what it carries at once after a rest.
  """

  lost: float = 0.0
  stalled: float = 0.0
  corrupt: float = 0.0
  duplicate: float = 0.0
  delay_s: tuple[float, float] = (0.0, 0.0)
  bytes_per_s: float | None = None
  burst_bytes: int = 1 << 20

  def __post_init__(self):
    for name in ('lost', 'stalled', 'corrupt', 'duplicate'):
      value = getattr(self, name)
      if not 0 <= value <= 1:
        raise ValueError(f'faults: {name}={value}, must be in [0, 1]')
    if not 0 <= self.delay_s[0] <= self.delay_s[1]:
      raise ValueError(f'faults: delay_s={self.delay_s}, must be (low, high)')
    if self.bytes_per_s is not None and not self.bytes_per_s > 0:
      raise ValueError(f'faults: bytes_per_s={self.bytes_per_s}, must be > 0')


class TokenBucket:
  """Computes how long a link of a given rate is busy."""

  def __init__(self, bytes_per_s: float, burst_bytes: int, clock: Clock):
    self._rate = bytes_per_s
    self._burst = burst_bytes
    self._clock = clock
    self._lock = threading.Lock()
    self._level = float(burst_bytes)  # Negative: owed by earlier calls.
    self._at = clock()

  def take(self, nbytes: int) -> float:
    """Books `nbytes`; returns the seconds until they are through."""
    with self._lock:
      now = self._clock()
      earned = (now - self._at) * self._rate
      self._level = min(self._burst, self._level + earned) - nbytes
      self._at = now
      return max(0.0, -self._level / self._rate)


class FaultyFetcher:
  """A fetcher whose pulls suffer the faults of its plane."""

  def __init__(
    self, plane: 'FaultyPlane', fetcher: data_plane.Fetcher, rng: random.Random
  ):
    self._plane = plane
    self._fetcher = fetcher
    self._rng = rng
    self._closed = threading.Event()

  def pull(self, payload: Payload, timeout_s: float) -> np.ndarray:
    deadline = self._plane.clock() + timeout_s
    faults = self._plane.faults
    lost, stalled, corrupt, duplicate = (
      self._rng.random() < chance
      for chance in (
        faults.lost,
        faults.stalled,
        faults.corrupt,
        faults.duplicate,
      )
    )
    self._sleep(self._rng.uniform(*faults.delay_s), deadline)
    self._wait_for_link(deadline)
    left_s = max(0.001, deadline - self._plane.clock())
    # A fault uses the offer up, too.
    data = self._fetcher.pull(payload, left_s)
    if duplicate:
      self._pull_again(payload)
    if lost:
      raise data_plane.PeerLost(f'fault: payload {payload.handle} was lost')
    if stalled:
      self._sleep(float('inf'), deadline)
    if self._plane.bucket is not None:
      self._sleep(self._plane.bucket.take(payload.nbytes), deadline)
    if corrupt:
      data = data.copy()
      data[self._rng.randrange(data.size)] ^= 1 << self._rng.randrange(8)
      data_plane.check_arrival(payload, data, 'a faulty link')
    return data

  def close(self) -> None:
    self._closed.set()
    self._fetcher.close()

  def _wait_for_link(self, deadline: float) -> None:
    """Waits while the link is cut, as a pull would after a lost packet."""
    while self._plane.is_cut():
      self._sleep(self._plane.poll_s, deadline)

  def _sleep(self, seconds: float, deadline: float) -> None:
    """Waits, but not beyond the deadline, which raises `TimedOut`."""
    left_s = deadline - self._plane.clock()
    if seconds > 0 and self._plane.wait(
      self._closed, max(0.0, min(seconds, left_s))
    ):
      raise data_plane.Closed('fetcher was closed during a pull')
    if seconds > left_s:
      raise data_plane.TimedOut('fault: the link was too slow, or cut')

  def _pull_again(self, payload: Payload) -> None:
    try:
      self._fetcher.pull(payload, DUPLICATE_WAIT_S)
    except data_plane.TransferFailed:
      return
    raise AssertionError(f'payload {payload.handle} came twice')


class FaultyPlane:
  """A data plane with faults on its fetchers; its publishers are sound.

  Args:
    rng: seeds the generator of each fetcher, in the order of their creation.
    wait: waits for an event for some seconds; returns True if it was set.
  """

  poll_s = 0.01  # How soon a pull notices that the link is restored.

  def __init__(
    self,
    plane: data_plane.DataPlane,
    faults: Faults,
    rng: random.Random,
    clock: Clock = time.monotonic,
    wait: Wait = threading.Event.wait,
  ):
    self.faults = faults
    self.clock = clock
    self.wait = wait
    self.bucket = None
    if faults.bytes_per_s is not None:
      self.bucket = TokenBucket(faults.bytes_per_s, faults.burst_bytes, clock)
    self._plane = plane
    self._rng = rng
    self._cut = threading.Event()

  def publisher(self, peer: str) -> data_plane.Publisher:
    return self._plane.publisher(peer)

  def fetcher(self, address: str) -> FaultyFetcher:
    rng = random.Random(self._rng.getrandbits(64))
    return FaultyFetcher(self, self._plane.fetcher(address), rng)

  def close(self) -> None:
    self._plane.close()

  def cut(self) -> None:
    """Starts a partition: no pull gets through."""
    self._cut.set()

  def heal(self) -> None:
    """Ends the partition; pulls that still wait go on."""
    self._cut.clear()

  def is_cut(self) -> bool:
    """Returns True during a partition."""
    return self._cut.is_set()


def faulty(
  plane: data_plane.DataPlane,
  faults: Faults,
  rng: random.Random,
  clock: Clock = time.monotonic,
  wait: Wait = threading.Event.wait,
) -> FaultyPlane:
  """Returns `plane` with `faults` on its fetchers; see `FaultyPlane`."""
  return FaultyPlane(plane, faults, rng, clock, wait)
