# SPDX-License-Identifier: Apache-2.0
"""Logs how long each learner may be silent, when that has changed."""

from absl import logging

from diloco.protocol import messages
from diloco.protocol.syncer import Syncer

TELL_FACTOR = 2.0  # A smaller change is not worth a log line.


class SilenceLimits:
  """The limits last logged, by learner; for one thread.

  Args:
    machine: knows the limits.
  """

  def __init__(self, machine: Syncer):
    self._machine = machine
    self._told_s: dict[int, float] = {}

  def note_event(self, event):
    """Logs the limits that an event has changed; a step may change them."""
    if not isinstance(getattr(event, 'message', None), messages.Report):
      return
    learner = event.learner
    limit_s = self._machine.silence_max_s(learner)
    told_s = self._told_s.get(learner, 0.0)
    if limit_s is None or 1 / TELL_FACTOR <= told_s / limit_s <= TELL_FACTOR:
      return
    self._told_s[learner] = limit_s
    logging.info('time-out: learner %d may be silent %.1f s', learner, limit_s)
