# SPDX-License-Identifier: Apache-2.0
"""How does the gap to data-parallel depend on run length, H and model size?

The settings are those of `recipe.py`. The run length varies with M = 2, 4 and 8
learners (the shortest with M = 4 only); H, the inner steps between two syncs,
and the model size vary with M = 4 and 1,000 steps. Each point has a
data-parallel run of the same length and size beside it. The variants of 2,000
steps are the recipe's: runs found in its folder are not repeated.

Look at: `diloco report runs/recipe`, which draws the differences as charts.
"""

from experiments import recipe, scales

SHORT = 1000  # Steps, where it is not the horizon that varies.
LEARNERS = 4  # Where it is not their number.
# Steps, and numbers of learners.
HORIZONS = {500: (4,), 1000: (4,), 2000: (2, 4, 8), 4000: (2, 4, 8)}
EVERY = 'H, inner steps between two syncs'
PARAMETERS = 'parameters'
LINE = f'M = {LEARNERS}, {SHORT} steps'


def get_config(arg=None):
  config = recipe.get_config(arg)
  config.name = 'gap'
  return config


def sweep(add):
  for steps, numbers in HORIZONS.items():
    _horizon(add, steps, numbers)

  shorter = scales.steps_of(SHORT)
  unchanged = _label(recipe.LABEL, SHORT)
  for every in (8, 48, 96):
    add(
      f'{LINE}, H = {every}',
      shorter | {'protocol.sync_every_steps': every},
      against=unchanged,
      at=(EVERY, LINE, every),
    )

  for width, parameters in ((32, 47e3), (128, 410e3)):
    wide = shorter | {'model.d_model': width, 'model.d_ff': 3 * width}
    base = f'{unchanged}, width {width}'
    add(base, wide | recipe.DATA_PARALLEL)
    add(
      f'{LINE}, width {width}',
      wide,
      against=base,
      at=(PARAMETERS, LINE, parameters),
    )


def _horizon(add, steps, numbers):
  """Adds the variants of one horizon, by number of learners."""
  base = _label(recipe.LABEL, steps)
  add(base, scales.steps_of(steps) | recipe.DATA_PARALLEL)
  for number in numbers:
    places = [('inner steps of the run', f'M = {number}', steps)]
    if steps == recipe.STEPS:
      places.append(recipe.place(number))
    if (steps, number) == (SHORT, LEARNERS):  # On all the other charts too.
      places += [(EVERY, LINE, 24), (PARAMETERS, LINE, 131e3)]
    add(
      _label(f'M = {number}', steps),
      scales.steps_of(steps) | recipe.learners(number),
      against=base,
      at=places,
    )


def _label(label, steps):
  return label if steps == recipe.STEPS else f'{label}, {steps} steps'
