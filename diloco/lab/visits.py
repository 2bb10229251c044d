# SPDX-License-Identifier: Apache-2.0
"""Learners that are there for a part of the run only, and their time."""

import math

from diloco.config import RunConfig

# From notice to end; a learner that has handed in leaves sooner.
NOTICE_STEPS = 30.0


class Visits:
  """The visits of the last `lab.visitors` learners; others always stay.

  Attributes:
    visitors: their ids.
    from_step: t at which they start.
    until_step: t at which they are told to leave.
    notice_s: their notice time.
  """

  def __init__(self, config: RunConfig):
    lab, protocol = config.lab, config.protocol
    self.visitors = range(protocol.learners - lab.visitors, protocol.learners)
    self.from_step = lab.visit_from * protocol.total_steps
    self.until_step = lab.visit_until * protocol.total_steps
    self.notice_s = NOTICE_STEPS * lab.step_s
    self._learners = protocol.learners
    self._began_s = self._ended_s = math.inf

  def begin(self, now_s: float):
    """Lets visitors start."""
    self._began_s = now_s

  def end(self, now_s: float):
    """Tells visitors to leave; none starts any more."""
    self._ended_s = now_s

  def expects(self, learner: int, now_s: float) -> bool:
    """Returns True if the learner should be there at `now_s`."""
    always = learner not in self.visitors
    return always or self._began_s <= now_s < self._ended_s

  def learner_s(self, now_s: float) -> float:
    """Returns the total time until now in which learners should be there."""
    away_s = min(self._began_s, now_s) + now_s - min(self._ended_s, now_s)
    return self._learners * now_s - len(self.visitors) * away_s
