# SPDX-License-Identifier: Apache-2.0
"""What do failures cost in quality, at equal tokens?

Each learner dies at random (a Poisson process) and is away for 20 steps, so
that it lacks a tenth, about a third, or half of its time. The run is longer by
what is lost: about as many tokens are merged as by the twin without failures.
Longer than the other studies: at 600 steps the spread of seeds hides all.

Command: python -m diloco.lab --config=experiments/churn.py --sweep \\
  --workdir=runs/churn
Hardware: 2 CPU cores. Wall time and result: experiments/README.md.
Variants: churn.py:quicktest, churn.py:scale=150m; others in study.py.
"""

from experiments import study

STEPS = 2000
TWIN = 'no failures'


def get_config(arg=None):
  return study.config_of('churn', arg)


def sweep(add):
  add(TWIN, study.steps_of(STEPS))
  away = 20.0
  for share in (0.1, 0.3, 0.5):
    add(
      f'{share:.0%} lost',
      study.steps_of(round(STEPS / (1 - share)))
      | {
        'lab.away_steps': away,
        'lab.mtbf_steps': away * (1 - share) / share,
      },
      against=TWIN,
      at=("share of the learners' time that is lost", 'at equal tokens', share),
    )
