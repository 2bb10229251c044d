# SPDX-License-Identifier: Apache-2.0
"""How does the gap to data-parallel move with horizon, H, batch and model size?

The recipe's settings with M = 4; every point has a data-parallel run of its own
horizon, batch and size. `diloco.report` draws the differences as charts.

Command: python -m diloco.lab --config=experiments/gap.py --sweep \
  --workdir=runs/gap
Hardware: 2 CPU cores. Wall time and result: experiments/README.md.
Variants: those of recipe.py.
"""

from experiments import recipe

STEPS = 1000  # Where it is not the horizon that varies.


def get_config(arg=None):
  config = recipe.get_config(arg)
  config.name = 'gap'
  return config


def sweep(add):
  def pair(what, changes, at):
    add(f'data-parallel, {what}', recipe.DATA_PARALLEL | changes)
    add(what, changes, against=f'data-parallel, {what}', at=at)

  for steps in (500, 1000, 2000, 4000):
    pair(
      f'{steps} steps',
      _steps(steps),
      ('inner steps of the run', 'H = 24', steps),
    )
  shorter = _steps(STEPS)
  for every in (8, 24, 48, 96):
    add(
      f'H = {every}',
      shorter | {'protocol.sync_every_steps': every},
      against=f'data-parallel, {STEPS} steps',
      at=('H, inner steps between two syncs', f'{STEPS} steps', every),
    )
  for sequences in (4, 16, 32):
    pair(
      f'{sequences} sequences per learner',
      shorter | {'data.batch': sequences},
      ('sequences per learner and step', f'{STEPS} steps', sequences),
    )
  for width, parameters in ((32, 47e3), (64, 131e3), (96, 252e3), (128, 410e3)):
    pair(
      f'width {width}',
      shorter | {'model.d_model': width, 'model.d_ff': 3 * width},
      ('parameters', f'{STEPS} steps', parameters),
    )


def _steps(number):
  return {
    'protocol.total_steps': number,
    'inner.warmup_steps': number // 10,
  }
