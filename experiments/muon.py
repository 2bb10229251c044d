# SPDX-License-Identifier: Apache-2.0
"""Does it come as close to data-parallel where both sides train with Muon?

The run of `recipe.py`, on both sides with Muon for the matrices of the layers
and AdamW for all else, at the same rates: `tuning.py` finds none that is better
with Muon, of data-parallel and of M = 4.

Look at: the difference to data-parallel with Muon, beside that of `recipe.py`;
and that of data-parallel with Muon to the one with AdamW.
"""

from experiments import recipe

FIRST_SEED, HALF = recipe.FIRST_SEED, recipe.HALF
MUON = {'inner.optimizer': 'muon'}
LABEL = f'{recipe.LABEL}, Muon'


def get_config(arg=None):
  config = recipe.get_config(arg)
  config.name = 'muon'
  return config


def sweep(add):
  add(recipe.LABEL, recipe.DATA_PARALLEL)
  add(LABEL, recipe.DATA_PARALLEL | MUON, against=recipe.LABEL)
  for number in recipe.LEARNERS:
    changes = recipe.learners(number) | MUON
    add(f'M = {number}, Muon', changes, against=LABEL)
