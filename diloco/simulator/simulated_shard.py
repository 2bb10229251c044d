# SPDX-License-Identifier: Apache-2.0
"""A simulated process of a sharded syncer other than the lead."""

import dataclasses

from diloco.protocol.syncer import events as syncer_events

Bytes = tuple[int, int]  # Version, and the CRC that stands for the bytes.


def owner_of(fragment: int, shards: int) -> int:
  """Returns the owner: fragments are dealt round robin, from after the lead."""
  return (fragment + 1) % shards


class SimulatedShard:
  """A shard, over all of its processes.

  Args:
    cluster: the cluster that it is part of.
    shard: its number, not 0: that is the lead's.
  """

  def __init__(self, cluster, shard: int):
    self.alive = True
    self.process = 1  # Jobs of earlier processes are void.
    self.shard = shard
    self._cluster = cluster
    self.fragments = tuple(
      p
      for p in range(cluster.config.fragments)
      if owner_of(p, cluster.shards) == shard
    )
    self.held: dict[int, Bytes] = {
      p: (0, cluster.contents.first_crcs[p]) for p in self.fragments
    }
    self._saved = dict(self.held)
    # What was installed last, when, and what was there before.
    self._last: tuple[float, int, Bytes] | None = None

  def install(self, fragment: int, version: int, crc: int):
    """Installs what the lead has published."""
    self._last = self._cluster.sim.now, fragment, self.held[fragment]
    self.held[fragment] = version, crc

  def save(self):
    """Writes a checkpoint, unless it is dead."""
    if self.alive:
      self._saved = dict(self.held)

  def kill(self):
    """Simulates kill -9; what it had written stays."""
    assert self.alive, f'shard {self.shard} is dead'
    self.alive = False
    reason = f'shard {self.shard} is away'
    self._tell(syncer_events.Absent(self.fragments, reason))

  def start(self):
    """Starts a new process, which resumes from the checkpoint."""
    assert not self.alive, f'shard {self.shard} is alive'
    self.alive = True
    self.process += 1
    self.held = dict(self._saved)
    self._last = None
    self.greet()

  def greet(self):
    """Tells the current lead what is here."""
    process, syncer = self.process, self._cluster.syncer
    held = dict(self.held)

    def arrive():
      if self.alive and self.process == process:
        syncer.shard_is_back(self.shard, process, held)

    if self.fragments:
      self._cluster.sim.after(self._cluster.timing.latency_s, arrive)

  def lose_lead(self):
    """Undoes an order that the dying lead sent a moment ago: it did not
    arrive.
    """
    if self._last is None:
      return
    at_s, fragment, before = self._last
    if self._cluster.sim.now - at_s < self._cluster.timing.latency_s:
      self.held[fragment] = before
    self._last = None

  def _tell(self, event: syncer_events.Event):
    syncer = self._cluster.syncer
    if self.fragments:
      self._cluster.sim.after(
        self._cluster.timing.latency_s, lambda: syncer.deliver(event)
      )


class BackFrom(syncer_events.Back):
  """A `Back` with the process that sent it, which the lead talks to from now
  on.
  """

  shard: int = 0
  process: int = 0


@dataclasses.dataclass(frozen=True)
class ShardOrder:
  """An order to a process of a shard; void once that is dead."""

  shard: SimulatedShard | None  # None: the lead itself.
  process: int

  @property
  def holds(self) -> bool:
    return self.shard is None or (
      self.shard.alive and self.shard.process == self.process
    )
