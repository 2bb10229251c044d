# SPDX-License-Identifier: Apache-2.0
"""How much of the gap is the beginning, and what closes it?

While losses fall fast, learners of few tokens drift apart. A data-parallel
start gives all of them its parameters and moments; outer warm-up begins with
plain means. Each alone and both together, at 500 and at 2,000 steps, M = 4 and
8, against data-parallel of as many steps.

Look at: the difference to data-parallel, beside what the start sends.
"""

from experiments import recipe, scales

FIRST_SEED = recipe.FIRST_SEED
HALF = recipe.HALF
STEPS = (500, recipe.STEPS)
BEGINNINGS = {
  '': {},
  ', start 5 %': {'lab.start_fraction': 0.05},
  ', start 10 %': {'lab.start_fraction': 0.1},
  ', outer warm-up 30 %': {'outer.warmup_fraction': 0.3},
  ', start 10 %, outer warm-up 30 %': {
    'lab.start_fraction': 0.1,
    'outer.warmup_fraction': 0.3,
  },
}


def get_config(arg=None):
  config = recipe.get_config(arg)
  config.name = 'beginning'
  return config


def sweep(add):
  for steps in STEPS:
    length = scales.steps_of(steps)
    base = f'{recipe.LABEL}, {steps} steps'
    add(base, length | recipe.DATA_PARALLEL)
    for number in (4, 8):
      for name, changes in BEGINNINGS.items():
        add(
          f'M = {number}, {steps} steps{name}',
          length | recipe.learners(number) | changes,
          against=base,
        )
