# SPDX-License-Identifier: Apache-2.0
"""Draws deaths and speeds of learners, the same for every system.

One seed draws one set of deaths and step lengths; systems differ in what they
make of it.
"""

import random

from diloco.config import RunConfig
from diloco.sim import speeds


class Lives:
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
      m: speeds.Speeds(step_s, lab.jitter, 0.0, random.Random(rng.random()))
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
    """How long a dead learner is away, in seconds."""
    return self._lab.step_s * self._lab.away_steps

  def death(self, from_s: float) -> tuple[float, float]:
    """Returns when a life that begins at `from_s` ends, and the time of return.

    Call it for each learner in the order of ids, then of each return: all
    deaths come from one stream.
    """
    lived_s = self._lab.step_s * self._rng.expovariate(1 / self._lab.mtbf_steps)
    dies_s = from_s + lived_s
    return dies_s, dies_s + self.away_s
