# SPDX-License-Identifier: Apache-2.0
"""Which learners are there only for a while, and for how long they were."""

import math

from diloco.config import RunConfig

NOTICE_STEPS = 30.0  # From the word to the end; who has handed in goes sooner.


class Visits:
  """Of the last `lab.visitors` learners; the others are always there.

  Attributes:
    visitors: their ids.
    from_step: t at which they start.
    until_step: t at which they are told to go.
    notice_s: that they are given.

  Args:
    config: of the run.
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
    """They may start."""
    self._began_s = now_s

  def end(self, now_s: float):
    """They are told to go, and none starts any more."""
    self._ended_s = now_s

  def expects(self, learner: int, now_s: float) -> bool:
    """Whether it should be there."""
    always = learner not in self.visitors
    return always or self._began_s <= now_s < self._ended_s

  def learner_s(self, now_s: float) -> float:
    """Time of all learners until now in which they should be there."""
    away_s = min(self._began_s, now_s) + now_s - min(self._ended_s, now_s)
    return self._learners * now_s - len(self.visitors) * away_s
