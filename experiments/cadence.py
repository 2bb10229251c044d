# SPDX-License-Identifier: Apache-2.0
"""How often should a fragment be synchronised, and how many should there be?

One variant for each H, the inner steps between two syncs of one fragment, and
for each P, the number of fragments; the others keep H = 24 and P = 8.

Look at: the loss against data-parallel by H and by P.

Command: python -m diloco.lab --config=experiments/cadence.py --sweep \\
  --workdir=runs/cadence
Hardware: 2 CPU cores. Wall time and result: experiments/README.md.
Variants: cadence.py:quicktest, cadence.py:scale=150m; others in study.py.
"""

from experiments import study


def get_config(arg=None):
  return study.config_of('cadence', arg)


def sweep(add):
  by_h = ('H, inner steps between two syncs', 'P = 8')
  by_p = ('P, fragments', 'H = 24')
  study.add_references(add, at=[(*by_h, 24), (*by_p, 8)])
  for every in (8, 48, 96):
    add(
      f'H = {every}',
      {'protocol.sync_every_steps': every},
      against=study.DATA_PARALLEL,
      at=(*by_h, every),
    )
  for fragments in (1, 2, 4, 24):
    add(
      f'P = {fragments}',
      {'protocol.fragments': fragments},
      against=study.DATA_PARALLEL,
      at=(*by_p, fragments),
    )
