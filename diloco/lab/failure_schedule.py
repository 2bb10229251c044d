# SPDX-License-Identifier: Apache-2.0
"""The presence of learners over a run: visits, deaths, planned kills."""

import math
import random

from diloco.config import lab_section
from diloco.config.lab_section import SYSTEMS, Kill
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.fleets import speeds

# From notice to end; a learner that has handed in leaves sooner.
NOTICE_STEPS = 30.0


class TransientLearners:
  """The visits of the last `lab.visitors` learners; others always stay.

  Attributes:
    from_step: t at which they start.
    until_step: t at which they are told to leave.
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


# Draws deaths and speeds of learners, the same for every system.
#
# One seed draws one set of deaths and step lengths; systems differ in what they
# make of it.


class FailureSchedule:
  """Draws them; two objects with the same configuration draw the same.

  Attributes:
    steps_s: mean length of each learner's step.
    speeds: draw the lengths of its steps, by learner.
  """

  def __init__(self, config: RunConfig):
    lab, learners = config.lab, config.protocol.learners
    rng = random.Random(config.seed)
    self.steps_s = speeds.mean_steps_s(
      learners, lab.step_s, lab.slow_learners, lab.slow_gap
    )
    self.speeds = {
      m: speeds.Speeds(step_s, lab.jitter, random.Random(rng.random()))
      for m, step_s in enumerate(self.steps_s)
    }
    self._rng = random.Random(rng.random())
    self._lab = lab

  @property
  def mortal(self) -> bool:
    """True if learners die other than by `config.faults`."""
    return self._lab.mtbf_steps > 0

  @property
  def away_s(self) -> float:
    """Seconds for which a dead learner is away."""
    return self._lab.step_s * self._lab.away_steps

  def death(self, from_s: float) -> tuple[float, float]:
    """Returns when a life that begins at `from_s` ends, and the time of return.

    Call it for each learner in the order of ids, then of each return: all
    deaths come from one stream.
    """
    lived_s = self._lab.step_s * self._rng.expovariate(1 / self._lab.mtbf_steps)
    dies_s = from_s + lived_s
    return dies_s, dies_s + self.away_s


def plan(config: RunConfig) -> tuple[Kill, ...]:
  """Returns the faults in the order in which they are due.

  Raises:
    ConfigError: names each fault that can't be read, or that is impossible in a
      run of `lab.system`.
  """
  name = config.lab.system
  system = SYSTEMS[name]
  kills = lab_section.plan(
    config.faults, system.learners(config.protocol.learners)
  )
  if not system.has_syncer and any(kill.learner is None for kill in kills):
    raise ConfigError(
      f'faults: lab.system={name!r} has no syncer that could be killed'
    )
  return kills
