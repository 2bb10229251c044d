# SPDX-License-Identifier: Apache-2.0
"""What do failing learners cost in loss, at equal numbers of merged tokens?

Each learner dies at random (a Poisson process) and is away for 100 steps, so
that it misses a tenth, about a third, or half of its time. A death also loses
what the learner had not handed in: half of H steps of each fragment on average.
The same with the interruptions of fleets: M learners share the chips, and each
stands until its slice is repaired. The runs with failures are longer by both,
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
STEP_S = 8.0  # Of the fleets, as in `goodput.py`.


get_config = study.base('churn')


def sweep(add):
  add(TWIN, scales.steps_of(STEPS))
  for share in (0.1, 0.3, 0.5):
    place = "share of the learners' time that is lost", 'equal tokens', share
    life = AWAY * (1 - share) / share
    add(f'{share:.0%} lost', _deaths(life, AWAY), against=TWIN, at=place)
  fleet = common.simulation('goodput').failures
  for chips in CHIPS:
    rate = failures.rate_per_s(chips, fleet.mtbi_days) / LEARNERS
    deaths = _deaths(1 / rate / STEP_S, fleet.repair_s / STEP_S)
    add(f'{chips // 1000} k chips', deaths, against=TWIN)


def _deaths(life, away):
  """Changes: learners live and are away for so many steps, on average."""
  merged = life / (life + away) * (1 - LOST / life)
  return scales.steps_of(round(STEPS / merged)) | {
    'lab.away_steps': away,
    'lab.mtbf_steps': life,
  }
