# SPDX-License-Identifier: Apache-2.0
"""The systems that a study compares, how they recover, and closed forms.

λ is the rate of interruptions of one learner: N / (M · MTBI). The forms are our
inference: the paper gives tables (1 and 4), not these equations.
"""

import dataclasses
import math
from collections.abc import Callable

from diloco.fleets import failures

# Steps of the run that a learner's restart costs besides the pause and its
# bootstrap: the one under way, those not yet merged, and the wait for a
# boundary of the donor. Simulated: 2.5 to 2.9 at P = H = 24, τ = 2.
RESTART_STEPS = 2.75


def elastic_goodput(rate_per_s: float, pause_s: float) -> float:
  """g of an elastic learner: 1 − g = t·λ·g·(1 + g).

  An interruption costs a pause t if the learner runs, with probability g; the
  slice's return costs another one if it runs then, again with probability g.
  This is exact if the repair takes so long compared with t that the two are
  independent.

  Args:
    rate_per_s: λ.
    pause_s: t.
  """
  x = pause_s * rate_per_s
  return 2 / (1 + x + math.sqrt((1 + x) ** 2 + 4 * x))


def slices_there(
  rate_per_s: float, repair_s: float, goodput: float, slices: int
) -> float:
  """1 − λ·g·R / n: the share of a learner's slices that are there.

  An interruption while it runs, with probability g, takes one slice of n away
  for R. The fleets of the paper have hundreds of slices, so that it is left out
  there; of three it is much.

  Args:
    rate_per_s: λ.
    repair_s: R, mean time until a lost slice is back.
    goodput: g, the share of the time in which the learner runs.
    slices: n.
  """
  return max(0.0, 1 - rate_per_s * goodput * repair_s / slices)


def restart_goodput(rate_per_s: float, pause_s: float, again_s: float) -> float:
  """g = g₀·e^(−λ(1 + g₀)a) of a learner whose process dies at each pause.

  g₀ is that of an elastic learner. Between two pauses, at the rate λ(1 + g₀),
  the first `a` seconds yield nothing; a span that is shorter yields nothing.

  Args:
    rate_per_s: λ.
    pause_s: t.
    again_s: a, bootstrap and what the death took.
  """
  g = elastic_goodput(rate_per_s, pause_s)
  return g * math.exp(-rate_per_s * (1 + g) * again_s)


def waiting_goodput(rate_per_s: float, stands_s: float) -> float:
  """g = 1 / (1 + λR) of a learner without elasticity.

  Exact: it runs for 1/λ on average, and then stands for R.

  Args:
    rate_per_s: λ.
    stands_s: R, mean of a repair and the reconfiguration after it.
  """
  return 1 / (1 + rate_per_s * stands_s)


def uptime(goodput: float, learners: int) -> float:
  """1 − (1 − g)^M: the probability that not all M learners stand at once."""
  return 1 - (1 - goodput) ** learners


def scavenging_time(extra: float, begin: float, end: float) -> float:
  """Returns the time of a fixed amount of work, relative to no extra learners.

  begin + (1 − end) + (end − begin) / (1 + x); with half of the work that is 0.5
  + 0.5 / (1 + x), as in the paper's Table 4. Joining and leaving cost nothing.

  Args:
    extra: x, extra learners as a share of the permanent ones.
    begin: share of the work after which they join.
    end: share of the work after which they leave.
  """
  return begin + (1 - end) + (end - begin) / (1 + extra)


@dataclasses.dataclass(frozen=True)
class Recovery:
  """A rule for what a group of slices does when it loses one.

  Attributes:
    stops: stops of a learner, from its interruptions, the pause of a
      reconfiguration, and the end of the run; as `failures.elastic`.
    goodput: g by closed form, from λ, the mean repair, the pause, and what the
      restart of a process costs besides it.
    note: what it does, in a sentence.
    runs_on: True if it runs on without the slice.
    dies: True if a stop is a death, and the next process bootstraps.
  """

  stops: Callable[..., tuple[failures.Stall, ...]]
  goodput: Callable[[float, float, float, float], float]
  note: str
  runs_on: bool = True
  dies: bool = False


# In the order of tables.
RECOVERIES = {
  'wait': Recovery(
    failures.waiting,
    lambda rate, repair_s, pause_s, again_s: waiting_goodput(
      rate, repair_s + pause_s + again_s
    ),
    'the learner stands until the slice is back, and for a pause.',
    runs_on=False,
  ),
  'restart': Recovery(
    failures.elastic,
    lambda rate, repair_s, pause_s, again_s: restart_goodput(
      rate, pause_s, again_s
    ),
    'the learner starts again on what is left after a pause, bootstraps '
    'through a peer, and does so again when the slice is back.',
    dies=True,
  ),
  'elastic': Recovery(
    failures.elastic,
    lambda rate, repair_s, pause_s, again_s: elastic_goodput(rate, pause_s),
    'the learner pauses, runs on without the slice and with its state, and '
    'pauses again when it is back.',
  ),
}
PAPERS = 'elastic'
WHAT_A_LAUNCH_DOES = (
  'A launch does `wait` with learners of one slice: each is one rigid unit, '
  'whose processes all start again when its slice, or a spare one, is there. '
  'They also take their state from a peer, as in `restart`, which `wait` has '
  'in its pause only. To start again on fewer slices, as `restart` does, is up '
  'to who launches. A learner of several slices (`mesh.slices`) does '
  "`elastic`, as the paper's."
)


def launched(slices: int) -> str:
  """Returns how a learner of so many slices recovers, a key of RECOVERIES."""
  return PAPERS if slices > 1 else 'wait'


DECOUPLED = 'Decoupled DiLoCo'
# The systems that a study compares, with the recovery that each has; None: as
# configured. The first two are one group of slices that exchanges after each
# step, the last are the protocol's machines.
SYSTEMS = {
  'data-parallel': 'wait',
  'elastic data-parallel': 'elastic',
  DECOUPLED: None,
}
