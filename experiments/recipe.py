# SPDX-License-Identifier: Apache-2.0
"""How near does Decoupled DiLoCo with int4 both ways come to data-parallel?

Command: python -m diloco.lab --config=experiments/recipe.py --sweep
Hardware:
Variants: recipe.py:learners=2, recipe.py:steps=6000
"""

from experiments import common


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False, learners=4, steps=2000)
  config = common.base()
  config.name = 'recipe'
  config.model.update(
    layers=2, d_model=64, heads=4, kv_heads=2, head_dim=16, d_ff=192
  )
  config.data.update(seq_len=64, batch=8)
  config.inner.update(lr=8e-3, warmup_steps=50)
  config.protocol.update(
    learners=args.learners,
    overlap_steps=2,
    total_steps=args.steps,
    grace_cap_steps=1.0,
  )
  return common.quicktest(config) if args.quicktest else config


def sweep(add):
  for lr in (4e-3, 8e-3):
    base = f'data-parallel lr {lr}'
    add(base, {'lab.system': 'data_parallel', 'inner.lr': lr})
    for outer_lr, momentum in ((0.4, 0.8), (0.7, 0.0), (1.0, 0.0), (0.3, 0.8)):
      for blend in ('overwrite', 'carry'):
        add(
          f'lr {lr} outer {outer_lr} {momentum} {blend}',
          {
            'inner.lr': lr,
            'outer.lr': outer_lr,
            'outer.momentum': momentum,
            'protocol.blend': blend,
          },
          against=base,
        )
