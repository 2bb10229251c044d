# SPDX-License-Identifier: Apache-2.0
"""How often should a fragment be synchronised, and how many should there be?

One variant for each H, the inner steps between two syncs of one fragment, and
for each P, the number of fragments; the others keep H = 24 and P = 8.

Look at: the loss against data-parallel by H and by P.
"""

from experiments import study

FIRST_SEED = study.FIRST_SEED
get_config = study.base('cadence')


def sweep(add):
  by_h = ('H, inner steps between two syncs', 'P = 8')
  by_p = ('P, fragments', 'H = 24')
  axes = (
    (by_h, 'H', 'protocol.sync_every_steps', (8, 48, 96)),
    (by_p, 'P', 'protocol.fragments', (1, 2, 4, 24)),
  )
  variants, places = {}, {}
  for axis, name, key, values in axes:
    for value in values:
      variants[f'{name} = {value}'] = {key: value}
      places[f'{name} = {value}'] = (*axis, value)
  study.add_variants(add, variants, places, at=[(*by_h, 24), (*by_p, 8)])
