# SPDX-License-Identifier: Apache-2.0
"""What an onlooker of a simulated cluster is told."""

from typing import Any

from diloco.protocol import syncer_io


class Watch:
  """Looks on, at every event of every machine; this one does not care.

  Arguments are those of the cluster's processes, `SimulatedSyncer` and
  `SimulatedLearner`; effects are told before they are performed.
  """

  def syncer_started(self, syncer):
    """A new process of the syncer is up."""

  def theta(self, fragment: int, version: int, crc: int):
    """The bytes of Θ_p at the syncer, whenever they or their number change."""

  def at_syncer(self, syncer, event, effects):
    """The syncer's machine has handled an event."""

  def merging(self, merge, taken: dict[int, Any]):
    """The syncer merges these contents, by learner."""

  def at_learner(self, process, event, effects):
    """A learner's machine has handled an event."""

  def stepped(self, process, spans: list[tuple[float, float]], tokens: int):
    """A learner has finished an inner step, in these spans of time."""


class Log(Watch):
  """Keeps what the syncer decided, each with its time in seconds."""

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
