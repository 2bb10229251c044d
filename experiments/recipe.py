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
  add('dp 8e-3', {'lab.system': 'data_parallel'})
  add('dp 4e-3', {'lab.system': 'data_parallel', 'inner.lr': 4e-3})
  add('ref 0.4 0.8', {}, 'dp 8e-3')
  carry = {'protocol.blend': 'carry', 'protocol.overlap_steps': 1}
  add('carry tau1', carry, 'dp 8e-3')
  for final in (0.5, 1.0):
    ann = {**carry, 'outer.anneal_fraction': 0.5, 'outer.final_lr': final}
    add(f'carry tau1 anneal 0.5 to {final}', ann, 'dp 8e-3')
  mean = {**carry, 'merge.rule': 'mean', 'outer.anneal_fraction': 0.5, 'outer.final_lr': 1.0}
  add('mean carry tau1 0.7 0.8 anneal to 1', {**mean, 'outer.lr': 0.7}, 'dp 8e-3')
  add('mean carry tau1 0.7 0.9 anneal to 1', {**mean, 'outer.lr': 0.7, 'outer.momentum': 0.9}, 'dp 8e-3')
  low = {**carry, 'inner.lr': 4e-3}
  add('lr4 carry tau1', low, 'dp 8e-3')
  add('lr4 carry tau1 anneal 1', {**low, 'outer.anneal_fraction': 0.5, 'outer.final_lr': 1.0}, 'dp 8e-3')
  add('wsd carry tau1', {**carry, 'inner.schedule': 'wsd'}, 'dp 8e-3')
  add('dp wsd', {'lab.system': 'data_parallel', 'inner.schedule': 'wsd'})
  add('clip carry tau1 P24', {**carry, 'protocol.fragments': 24}, 'dp 8e-3')
