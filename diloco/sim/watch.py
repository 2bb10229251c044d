# SPDX-License-Identifier: Apache-2.0
"""The interface of an observer of a simulated cluster."""

from typing import Any

from diloco.protocol import syncer_io


class Watch:
  """An observer of every event of every machine, which ignores them all.

  Arguments are those of the cluster's processes, `SimulatedSyncer` and
  `SimulatedLearner`; the methods are called before effects are performed.
  """

  def syncer_started(self, syncer):
    """Called when a new process of the syncer is up."""

  def theta(self, fragment: int, version: int, crc: int):
    """Called when the bytes of Θ_p at the syncer, or their version, change."""

  def at_syncer(self, syncer, event, effects):
    """Called when the syncer's machine has handled an event."""

  def merging(self, merge, taken: dict[int, Any]):
    """Called when the syncer merges these contents, by learner."""

  def at_learner(self, process, event, effects):
    """Called when a learner's machine has handled an event."""

  def stepped(self, process, spans: list[tuple[float, float]], tokens: int):
    """Called when a learner has finished an inner step, in these spans of
    time.
    """


class Log(Watch):
  """An observer that keeps the syncer's decisions with their times in
  seconds.
  """

  def __init__(self):
    self.merges: list[tuple[float, syncer_io.Merge]] = []
    self.records: list[tuple[float, syncer_io.Record]] = []

  def at_syncer(self, syncer, event, effects):
    for effect in effects:
      match effect:
        case syncer_io.Merge():
          self.merges.append((syncer.now, effect))
        case syncer_io.Record():
          self.records.append((syncer.now, effect))
