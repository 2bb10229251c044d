# SPDX-License-Identifier: Apache-2.0
"""Which changes to the recipe, and to its baseline, help or harm?

One change at a time to the recipe with 4 learners (`recipe.py`), and to its
data-parallel baseline. There is one seed, so that differences below a percent
mean little.

Look at: the sign of each difference.

Command: python -m diloco.lab --config=experiments/tried.py --sweep \
  --workdir=runs/tried --seeds=1
Hardware: 2 CPU cores. Wall time and result: experiments/README.md.
Variants: those of recipe.py.
"""

from experiments import recipe


def get_config(arg=None):
  config = recipe.get_config(arg)
  config.name = 'tried'
  return config


def sweep(add):
  add(recipe.LABEL, recipe.DATA_PARALLEL)
  parallel = {
    'rate 4e-3': {'inner.lr': 4e-3},
    'rate 8e-3': {'inner.lr': 8e-3},
    'rate 32e-3': {'inner.lr': 32e-3},
    'warm-up 50': {'inner.warmup_steps': 50},
    'warm-up 400': {'inner.warmup_steps': 400},
    'falls to a tenth': {'inner.final_fraction': 0.1},
    'b2 0.99': {'inner.b2': 0.99},
  }
  for label, changes in parallel.items():
    add(
      f'{recipe.LABEL}, {label}',
      recipe.DATA_PARALLEL | changes,
      against=recipe.LABEL,
    )
  tried = {
    'the recipe': {},
    'warm-up 50': {'inner.warmup_steps': 50},
    'warm-up 400': {'inner.warmup_steps': 400},
    'inner rate 5e-3': {'inner.lr': 5e-3},
    'inner rate 16e-3': {'inner.lr': 16e-3},
    'inner rate falls to 0': {'inner.final_fraction': 0.0},
    'inner rate falls to 0.3': {'inner.final_fraction': 0.3},
    'no annealing': {'outer.anneal_fraction': 0.0},
    'annealing in the last 0.04': {'outer.anneal_fraction': 0.04},
    'annealing in the last half': {'outer.anneal_fraction': 0.5},
    'outer 0.4, 0.8': _outer(0.4, 0.8),
    'outer 0.5, 0.7': _outer(0.5, 0.7),
    'outer 0.6, 0.8': _outer(0.6, 0.8),
    'outer 0.8, 0.6': _outer(0.8, 0.6),
    'outer 1, 0.5': _outer(1.0, 0.5),
    'mean, outer 1, 0': {'merge.rule': 'mean'} | _outer(1.0, 0.0),
    'embeddings apart': {'fragments.embedding': 'own'},
    'embeddings apart, RDA for them too': {
      'fragments.embedding': 'own',
      'merge.embedding': 'rda',
    },
    'overwrite': {'protocol.blend': 'overwrite'},
    'P = 24': {'protocol.fragments': 24},
    'P = 2': {'protocol.fragments': 2},
    'H = 8': {'protocol.sync_every_steps': 8},
    'b2 0.9': {'inner.b2': 0.9},
    'b2 0.99': {'inner.b2': 0.99},
  }
  for label, changes in tried.items():
    add(label, changes, against=recipe.LABEL)


def _outer(lr, momentum):
  return {'outer.lr': lr, 'outer.momentum': momentum}
