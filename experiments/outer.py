# SPDX-License-Identifier: Apache-2.0
"""Which learning rate and momentum should the outer optimizer have?

Five pairs with 2, 4 and 8 learners, which share the sequences of a step; and
the same pairs with three times as many steps, compared with a data-parallel run
of that length.

Look at: the best pair by number of learners and by run length.

Command: python -m diloco.lab --config=experiments/outer.py --sweep \\
  --workdir=runs/outer
Hardware: 2 CPU cores. Wall time and result: experiments/README.md.
Variants: outer.py:quicktest, outer.py:scale=150m; others in study.py.
"""

from experiments import recipe, scales, study


def get_config(arg=None):
  return study.config_of('outer', arg)


def sweep(add):
  study.add_references(add)
  settings = ((1.0, 0.0), (0.4, 0.8), (0.6, 0.7), (0.6, 0.85), (0.7, 0.9))

  def outer(lr, momentum):
    return {'outer.lr': lr, 'outer.momentum': momentum}

  for number in (2, 4, 8):
    for lr, momentum in settings:
      add(
        f'M = {number}, {lr:g}, {momentum:g}',
        study.learners(number) | outer(lr, momentum),
        against=study.DATA_PARALLEL,
        at=('learners M', f'{lr:g}, {momentum:g}', number),
      )
  longer = scales.steps_of(3 * study.STEPS)
  reference = f'{study.DATA_PARALLEL}, three times the steps'
  add(reference, longer | recipe.DATA_PARALLEL)
  for lr, momentum in settings:
    add(
      f'three times the steps, {lr:g}, {momentum:g}',
      longer | outer(lr, momentum),
      against=reference,
    )
