# SPDX-License-Identifier: Apache-2.0
"""Which learning rate and momentum should the outer optimizer have?

Five pairs with 2, 4 and 8 learners, which share the sequences of a step; and
the same pairs with three times as many steps, compared with a data-parallel run
of that length.

Look at: the best pair by number of learners and by run length.
"""

from experiments import scales, study

SETTINGS = ((1.0, 0.0), (0.4, 0.8), (0.6, 0.7), (0.6, 0.85), (0.7, 0.9))


get_config = study.base('outer')


def sweep(add):
  settings = {
    f'{lr:g}, {momentum:g}': {'outer.lr': lr, 'outer.momentum': momentum}
    for lr, momentum in SETTINGS
  }
  variants, places = {}, {}
  for number in (2, 4, 8):
    for name, outer in settings.items():
      variants[f'M = {number}, {name}'] = study.learners(number) | outer
      places[f'M = {number}, {name}'] = ('learners M', name, number)
  study.add_variants(add, variants, places)
  longer = scales.steps_of(3 * study.STEPS)
  reference = f'{study.DATA_PARALLEL}, three times the steps'
  add(reference, longer | study.PARALLEL)
  for name, outer in settings.items():
    add(f'three times the steps, {name}', longer | outer, against=reference)
