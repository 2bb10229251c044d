# SPDX-License-Identifier: Apache-2.0
"""Says how long each learner may be silent, when that has become another."""

from absl import logging

TELL_FACTOR = 2.0  # A limit that changed by less is not worth a line.


class SilenceLimits:
  """What the log has of them, by learner; for one thread."""

  def __init__(self):
    self._told_s: dict[int, float] = {}

  def note(self, learner: int, limit_s: float | None):
    """A learner has reported a step.

    Args:
      learner: the id.
      limit_s: of its session; None: it has none any more.
    """
    told_s = self._told_s.get(learner, 0.0)
    if limit_s is None or 1 / TELL_FACTOR <= told_s / limit_s <= TELL_FACTOR:
      return
    self._told_s[learner] = limit_s
    logging.info('time-out: learner %d may be silent %.1f s', learner, limit_s)
