# SPDX-License-Identifier: Apache-2.0
"""Who dies when, and how fast learners are: the same for every system.

One seed draws one set of deaths and step lengths; systems differ in what they
make of it.
"""

import random

from diloco.config import RunConfig
from diloco.sim import speeds


class Lives:
  """Draws them; two of the same configuration draw the same.

  Attributes:
    steps_s: mean length of each learner's step.
    speeds: draw the lengths of its steps, by learner.

  Args:
    config: of the run.
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
    """Whether anybody dies but by `config.faults`."""
    return self._lab.mtbf_steps > 0

  @property
  def away_s(self) -> float:
    """For how long the dead are away."""
    return self._lab.step_s * self._lab.away_steps

  def death(self, from_s: float) -> tuple[float, float]:
    """When the next life ends that begins at `from_s`, and who died is back.

    To be asked for each learner in the order of ids, then of each return: the
    deaths of all come from one stream.
    """
    lived_s = self._lab.step_s * self._rng.expovariate(1 / self._lab.mtbf_steps)
    dies_s = from_s + lived_s
    return dies_s, dies_s + self.away_s
