# SPDX-License-Identifier: Apache-2.0
"""How near does Decoupled DiLoCo with int4 both ways come to data-parallel?

A byte-level decoder of 131 k parameters on the source of the standard library,
2,000 steps of M learners with 8 sequences of 64 bytes each, H = 24, P = 8,
τ = 1, K = 1, grace window on; data-parallel has the same tokens, the same
global batch and its own best inner rate. Losses are of the global model on
held-out text.

Command: python -m diloco.lab --config=experiments/recipe.py --sweep \\
  --workdir=runs/recipe --seeds=1
Hardware: 2 CPU cores, no accelerator. Wall time: see experiments/README.md.
Result (one seed): data-parallel 1.2602, Decoupled DiLoCo 1.2989 at best,
  +3.1 %; all that was tried stands in experiments/README.md. A page of it:
  python -m diloco.report --workdir=runs/recipe
Variants: recipe.py:learners=2, recipe.py:steps=6000, recipe.py:quicktest,
  recipe.py:scale=150m (scales.py).
"""

from experiments import common, scales

RATES = (4e-3, 8e-3, 16e-3)
DATA_PARALLEL_LR = 16e-3  # Its best, of those.


def get_config(arg=None):
  args = common.parse_arg(
    arg, quicktest=False, learners=4, steps=0, scale=scales.SMALL
  )
  config = common.base()
  config.name = 'recipe'
  config.protocol.update(
    learners=args.learners,
    overlap_steps=1,
    grace_cap_steps=1.0,
    blend='carry',
  )
  scales.apply(config, args.scale)
  if args.steps:  # 0: as many as the scale has.
    config.protocol.total_steps = args.steps
  return common.quicktest(config) if args.quicktest else config


def sweep(add):
  """Data-parallel, then what was tried, each against the best of it."""
  for lr in RATES:
    changes = {'lab.system': 'data_parallel', 'inner.lr': lr}
    add(f'data-parallel {lr:g}', changes)
  base = f'data-parallel {DATA_PARALLEL_LR:g}'

  def attempt(label, **changes):
    flat = {key.replace('__', '.'): value for key, value in changes.items()}
    add(label, flat, against=base)

  attempt('0.4 0.8')
  attempt(
    '0.4 0.8, overwrite, τ = 2',
    protocol__blend='overwrite',
    protocol__overlap_steps=2,
  )
  for final in (0.5, 1.0):
    attempt(
      f'0.4 0.8, annealed to {final:g}',
      outer__anneal_fraction=0.5,
      outer__final_lr=final,
    )
  attempt(
    'mean 0.7 0.8, annealed to 1',
    merge__rule='mean',
    outer__lr=0.7,
    outer__anneal_fraction=0.5,
    outer__final_lr=1.0,
  )
  attempt('mean 1 0', merge__rule='mean', outer__lr=1.0, outer__momentum=0.0)
  attempt('0.4 0.8, inner 4e-3', inner__lr=4e-3)
  attempt('0.4 0.8, inner 16e-3', inner__lr=16e-3)
  # The same gain lr / (1 - momentum) by a shorter memory, and others.
  for lr, momentum in (
    (0.6, 0.7), (0.8, 0.6), (1.0, 0.5), (0.5, 0.8), (0.3, 0.9),
  ):  # fmt: skip
    attempt(f'{lr:g} {momentum:g}', outer__lr=lr, outer__momentum=momentum)
  attempt('0.4 0.8, P = 24', protocol__fragments=24)
  attempt('0.4 0.8, H = 8', protocol__sync_every_steps=8)
