# SPDX-License-Identifier: Apache-2.0
"""The interface of an observer of a lab run."""

from collections.abc import Mapping, Sequence

from diloco.lab.trained import Point


class Journal:
  """An observer that ignores everything.

  Times are simulated seconds; processes are 'syncer' and 'learner-N'.
  """

  def happened(self, at_s: float, process: str, event: str, detail: str = ''):
    """Called when a process 'started', was 'killed' or was told to leave.

    The event is 'stopped' in the last case.
    """

  def stepped(self, learner: int, step: int, scalars: Mapping[str, float]):
    """Called after an inner step; names are those of `metrics.names`."""

  def decided(self, at_s: float, kind: str, fields: Mapping):
    """Called for what belongs on the syncer's tape."""

  def evaluated(self, point: Point):
    """Called after an evaluation of the model."""

  def close(self):
    """Called last."""


class Journals(Journal):
  """Forwards to several observers."""

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
