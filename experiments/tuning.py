# SPDX-License-Identifier: Apache-2.0
"""Which rates, schedules and outer steps suit each side best?

All choices of `recipe.py` are made here: on seeds 0 to 2, which no claim uses,
and on one half of the held-out text. Data-parallel and M = 4 learners have the
same list of peak and final rates, with AdamW and with Muon; the outer step is
chosen for each M. A rate is chosen for the mean and the spread over seeds, so
that it lies below the edge from which on single runs are lost.

  python -m diloco.lab --config=experiments/tuning.py --sweep
  python -m experiments.tried

Look at: the loss of the average, and its standard deviation over seeds.
"""

from experiments import beginning, recipe, scales, study

HALF = 'first'
RATES = (4e-3, 5.6e-3, 8e-3, 11e-3, 16e-3, 22e-3, 32e-3)
# Muon's matrices bear higher ones; the list ends where it is worse again.
RATES_BY = {'adamw': RATES, 'muon': (*RATES, 45e-3, 64e-3)}
FINALS = (0.0, 0.1)
HIGHER = (11e-3, 16e-3)  # Than the rate that is best for M = 4.
# Of other numbers of learners, whose steps have more or fewer tokens.
RATES_OF = {
  1: (8e-3, 11e-3, 16e-3, 22e-3),
  2: (5.6e-3, 8e-3, 11e-3, 16e-3),
  8: (4e-3, 5.6e-3, 8e-3, 11e-3),
}
# b1 and b2; the default is 0.9, 0.95. A learner's steps have fewer tokens.
MEMORIES = ((0.8, 0.95), (0.9, 0.9), (0.9, 0.98), (0.95, 0.95), (0.95, 0.98))
# What else may suit a learner, whose gradients are noisier, less than all.
OTHERS = {'inner.weight_decay': (0.03, 0.3), 'inner.clip_norm': (0.3, 3.0)}
# The rate at which the outer steps of M learners are compared.
OUTER_AT = {1: 16e-3, 2: 11e-3, 4: 8e-3, 8: 8e-3}
OUTER = ((1.0, 0.0), (0.8, 0.5), (0.6, 0.7), (0.4, 0.8))
OFTEN = 8  # H.
OFTEN_RATES = {4: (8e-3, 11e-3, 16e-3), 8: (8e-3, 11e-3)}  # By M.
# Momentum outlasts a round that is short; the higher rate is data-parallel's.
OFTEN_PLAIN = {'outer.lr': 1.0, 'outer.momentum': 0.0}
# Of the short runs of `study.py`, without an average.
STUDY_RATES = (4e-3, 5.6e-3, 8e-3, 11e-3, 16e-3, 22e-3)


def get_config(arg=None):
  config = recipe.get_config(arg)
  config.name = 'tuning'
  return config


def sweep(add):
  sides = {recipe.LABEL: recipe.DATA_PARALLEL, 'M = 4': recipe.learners(4)}
  for optimizer, rates in RATES_BY.items():
    for side, changes in sides.items():
      for final in FINALS:
        for rate in rates:
          label = f'{side}, {optimizer}, rate {rate:g} to {final:g}'
          schedule = {
            'inner.optimizer': optimizer,
            'inner.lr': rate,
            'inner.final_fraction': final,
          }
          add(label, changes | schedule)
  for side, changes in sides.items():
    for b1, b2 in MEMORIES:
      memory = {'inner.b1': b1, 'inner.b2': b2}
      add(f'{side}, b1 {b1:g}, b2 {b2:g}', changes | memory)
    for key, values in OTHERS.items():
      for value in values:
        add(f'{side}, {key} {value:g}', changes | {key: value})
  for number, rates in RATES_OF.items():
    for rate in rates:
      add(f'M = {number}, rate {rate:g}', _at(number, rate))
  for number, rate in OUTER_AT.items():
    for outer, momentum in OUTER:
      add(
        f'M = {number}, rate {rate:g}, outer {outer:g}, {momentum:g}',
        _at(number, rate) | {'outer.lr': outer, 'outer.momentum': momentum},
      )
  for number in (4, 8):
    for name, changes in beginning.BEGINNINGS.items():
      if changes:
        add(f'M = {number}{name}', _at(number, OUTER_AT[number]) | changes)
  # Does a beginning let learners train at a rate at which they else may not?
  for rate in HIGHER:
    for name, changes in beginning.BEGINNINGS.items():
      if len(changes) == 1:
        add(f'M = 4, rate {rate:g}{name}', _at(4, rate) | changes)
  for number, rates in OFTEN_RATES.items():
    for rate in rates:
      often = _at(number, rate) | {'protocol.sync_every_steps': OFTEN}
      label = f'M = {number}, rate {rate:g}, H = {OFTEN}'
      add(label, often)
      if rate in HIGHER:
        add(f'{label}, outer 1, 0', often | OFTEN_PLAIN)
  sides = {
    study.DATA_PARALLEL: study.learners(4) | study.PARALLEL,
    'M = 4': study.learners(4),
  }
  for side, changes in sides.items():
    for rate in STUDY_RATES:
      label = f'{study.STEPS} steps of `study.py`, {side}, rate {rate:g}'
      length = scales.steps_of(study.STEPS)
      add(label, changes | length | {'inner.lr': rate})


def _at(number, rate):
  return recipe.learners(number) | {'inner.lr': rate}
