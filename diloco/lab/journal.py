# SPDX-License-Identifier: Apache-2.0
"""What an onlooker of a lab run is told; this one keeps nothing of it."""

from collections.abc import Mapping, Sequence

from diloco.lab.trained import Point


class Journal:
  """Times are simulated seconds; processes are 'syncer' and 'learner-N'."""

  def happened(self, at_s: float, process: str, event: str, detail: str = ''):
    """A process 'started', was 'killed', or, told to go, 'stopped'."""

  def stepped(self, learner: int, step: int, scalars: Mapping[str, float]):
    """A learner finished an inner step; names are those of `metrics.names`."""

  def decided(self, at_s: float, kind: str, fields: Mapping):
    """The syncer did what belongs on its tape."""

  def evaluated(self, point: Point):
    """The model was looked at."""

  def close(self):
    """Nothing comes after this."""


class Journals(Journal):
  """Tells each of several."""

  def __init__(self, journals: Sequence[Journal]):
    self._journals = tuple(journals)

  def happened(self, at_s: float, process: str, event: str, detail: str = ''):
    for journal in self._journals:
      journal.happened(at_s, process, event, detail)

  def stepped(self, learner: int, step: int, scalars: Mapping[str, float]):
    for journal in self._journals:
      journal.stepped(learner, step, scalars)

  def decided(self, at_s: float, kind: str, fields: Mapping):
    for journal in self._journals:
      journal.decided(at_s, kind, fields)

  def evaluated(self, point: Point):
    for journal in self._journals:
      journal.evaluated(point)

  def close(self):
    for journal in self._journals:
      journal.close()
