# SPDX-License-Identifier: Apache-2.0
"""How much loss do failing learners cost, at equal numbers of merged tokens?

Each learner dies at random (a Poisson process) and is away for 100 steps, so
that it misses a tenth, about a third, or half of its time. A death also loses
what the learner had not handed in: half of H steps of each fragment on average.
The same with the interruptions of fleets: M learners share the chips, and each
stands until its slice is repaired; at 300 k chips with other numbers of
learners, too (the paper's Table 11). The runs with failures are longer by both,
so that about as many tokens are merged as in the run without failures. They are
longer than in other studies, because at 600 steps the spread over seeds hides
the effect.

Look at: loss against the run without failures, and the tokens merged.
"""

from diloco.fleets import failures
from experiments import common, scales, study

STEPS = 2000
AWAY = 100.0  # Steps.
LOST = 12.0  # Steps of a dying learner that are lost with it: H/2.
TWIN = 'no failures'
LEARNERS = 4
CHIPS = (150_000, 300_000)
NUMBERS = (2, 8, 16)  # Of learners, on the larger fleet.
STEP_S = 8.0  # Of the fleets, as in `goodput.py`.


FIRST_SEED = study.FIRST_SEED
get_config = study.base('churn')


def sweep(add):
  add(TWIN, scales.steps_of(STEPS))
  for share in (0.1, 0.3, 0.5):
    place = "share of the learners' time that is lost", 'equal tokens', share
    life = AWAY * (1 - share) / share
    add(f'{share:.0%} lost', _deaths(life, AWAY), against=TWIN, at=place)
  for chips in CHIPS:
    changes = _of_fleet(chips, LEARNERS)
    add(f'{chips // 1000} k chips', changes, against=TWIN)
  for number in NUMBERS:
    twin, learners = f'M = {number}, {TWIN}', study.learners(number)
    add(twin, scales.steps_of(STEPS) | learners)
    add(
      f'M = {number}, {CHIPS[-1] // 1000} k chips',
      _of_fleet(CHIPS[-1], number) | learners,
      against=twin,
    )


def _of_fleet(chips, learners):
  """Changes: each of the learners has a part of the chips, and waits for it."""
  fleet = common.simulation('goodput').failures
  rate = failures.rate_per_s(chips, fleet.mtbi_days) / learners
  return _deaths(1 / rate / STEP_S, fleet.repair_s / STEP_S)


def _deaths(life, away):
  """Changes: learners live and are away for so many steps, on average."""
  merged = life / (life + away) * (1 - LOST / life)
  return scales.steps_of(round(STEPS / merged)) | {
    'lab.away_steps': away,
    'lab.mtbf_steps': life,
  }
