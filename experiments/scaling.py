# SPDX-License-Identifier: Apache-2.0
"""Does the gap to data-parallel change with the size of the model?

Decoders of 47 k to 1.25 M parameters, each trained on 20 tokens a parameter; a
step's tokens grow as √N, and rates fall as N^-¼ on both sides (the exponents of
DeepSeek LLM, arXiv 2401.02954, are near). M = 4 learners against data-parallel.
A control of 131 k has ½, 2 and 4 times the steps: what is of the size, and what
of the length?

  python -m diloco.lab --config=experiments/scaling.py --sweep
  python -m experiments.scaling

The second command prints the power law of N through the smaller sizes'
differences, and what it says of the largest before that is trained.

Look at: the difference to data-parallel by size, and by length.
"""

import math
import sys
from collections.abc import Mapping

import numpy as np

from experiments import recipe, scales, tried

FIRST_SEED, HALF = recipe.FIRST_SEED, recipe.HALF
LEARNERS = 4
SMALL = '131 k'  # Whose rates the recipe has.
# Parameters, width, sequences in a step of all learners together.
SIZES = {
  '47 k': (47e3, 32, 20),
  SMALL: (131e3, 64, 32),
  '410 k': (410e3, 128, 56),
  '1.25 M': (1.25e6, 240, 96),
}
*SMALLER, LARGEST = SIZES
LENGTHS = (0.5, 2.0, 4.0)
AXIS = 'parameters', f'M = {LEARNERS}, 20 tokens a parameter'
LENGTH_AXIS = 'times the steps', f'M = {LEARNERS}, {SMALL} parameters'


def get_config(arg=None):
  config = recipe.get_config(arg)
  config.name = 'scaling'
  return config


def sweep(add):
  for name, (parameters, _, _) in SIZES.items():
    places = [(*AXIS, parameters)]
    if name == SMALL:
      places.append((*LENGTH_AXIS, 1.0))
    _pair(add, name, 1.0, f', {name}', places)
  for length in LENGTHS:
    places = [(*LENGTH_AXIS, length)]
    _pair(add, SMALL, length, f', {SMALL}, steps x {length:g}', places)


def _pair(add, name, length, suffix, places):
  """Adds data-parallel and M learners of a size and a number of steps."""
  parameters, width, sequences = SIZES[name]
  config = get_config()
  per_step = sequences * config.data.seq_len
  tokens = length * scales.TOKENS_PER_PARAMETER * parameters
  sides = {
    recipe.LABEL: {'inner.lr': config.inner.lr} | recipe.DATA_PARALLEL,
    f'M = {LEARNERS}': {'inner.lr': config.inner.lr},
  }
  factor = (parameters / SIZES[SMALL][0]) ** -0.25
  against = None
  for side, changes in sides.items():
    made = (
      scales.steps_of(round(tokens / per_step))
      | scales.learners(LEARNERS, sequences)
      | {'model.d_model': width, 'model.d_ff': 3 * width}
      | changes
      | {'inner.lr': float(f'{factor * changes["inner.lr"]:.2g}')}
    )
    add(side + suffix, made, against=against, at=places if against else ())
    against = side + suffix


def differences() -> dict[str, list[float]]:
  """Returns the differences of the average, in %, seed by seed.

  By size, and by size and length, as labels have them.
  """
  side = f'M = {LEARNERS}, '
  return {
    each.variant.label.removeprefix(side): [100 * x for x in each.pairs]
    for each in tried.compared(sys.modules[__name__])
    if each.variant.label.startswith(side)
  }


def predicted(found: Mapping[str, list[float]]) -> tuple[float, float]:
  """Returns the law's value at the largest size, and half its 95 % interval.

  The law is a power of N, fitted to all differences of the smaller sizes by
  least squares; the interval is of the mean there, by Student's t and to first
  order.
  """
  from scipy import optimize, special

  x, y = np.array(
    [(math.log(SIZES[name][0]), d) for name in SMALLER for d in found[name]]
  ).T
  middle = x.mean()

  def law(x, level, slope):
    return level * np.exp(slope * (x - middle))

  fitted, covariance = optimize.curve_fit(law, x, y, (y.mean(), 0.0))
  off = math.log(SIZES[LARGEST][0]) - middle
  value = float(law(middle + off, *fitted))
  gradient = np.array([value / fitted[0], value * off])
  error = math.sqrt(gradient @ covariance @ gradient)
  return value, float(special.stdtrit(len(x) - 2, 0.975)) * error


def main() -> None:
  found = differences()
  for name, each in found.items():
    print(f'{name}: {", ".join(f"{d:+.2f}" for d in each)}')
  value, half_width = predicted(found)
  print(f'the law says of {LARGEST}: {value:+.2f} ± {half_width:.2f} %')


if __name__ == '__main__':
  main()
