# SPDX-License-Identifier: Apache-2.0
"""What do failing learners cost in loss, at equal numbers of merged tokens?

Each learner dies at random (a Poisson process) and is away for 100 steps, so
that it misses a tenth, about a third, or half of its time. A death also loses
what the learner had not handed in: half of H steps of each fragment on average.
The runs with failures are longer by both, so that about as many tokens are
merged as in the run without failures. They are longer than in other studies,
because at 600 steps the spread over seeds hides the effect.

Look at: loss against the run without failures, and the tokens merged.
"""

from experiments import scales, study

STEPS = 2000
AWAY = 100.0  # Steps.
LOST = 12.0  # Steps of a dying learner that are lost with it: H/2.
TWIN = 'no failures'


get_config = study.base('churn')


def sweep(add):
  add(TWIN, scales.steps_of(STEPS))
  for share in (0.1, 0.3, 0.5):
    life = AWAY * (1 - share) / share
    merged = (1 - share) * (1 - LOST / life)
    add(
      f'{share:.0%} lost',
      scales.steps_of(round(STEPS / merged))
      | {'lab.away_steps': AWAY, 'lab.mtbf_steps': life},
      against=TWIN,
      at=("share of the learners' time that is lost", 'equal tokens', share),
    )
