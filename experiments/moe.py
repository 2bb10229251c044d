# SPDX-License-Identifier: Apache-2.0
"""Does Decoupled DiLoCo train a mixture of experts as data-parallel does?

A byte-level decoder with 8 experts of 96 in each of 2 layers, 2 of them for a
token: 353 k parameters, of which a token passes 131 k, as many as in the dense
decoder of `recipe.py`, which stands beside it. 2,000 steps of M = 4 learners
with 8 sequences of 64 bytes each, int4 both ways, H = 24, P = 8, τ = 1, K = 1,
grace window on, carry; the load is balanced by the auxiliary loss alone, or by
the router's bias too, which is averaged outside the outer step. Losses are the
cross-entropy of the global model on held-out text.

Command: python -m diloco.lab --config=experiments/moe.py --sweep \\
  --workdir=runs/moe --seeds=3
Hardware: 2 CPU cores, no accelerator. Wall time, result: see
  experiments/README.md. A page of it:
  python -m diloco.report --workdir=runs/moe
Variants: moe.py:learners=2, moe.py:steps=6000, moe.py:quicktest.
"""

from experiments import common

BIAS_RATE = 1e-3  # Of DeepSeek-V3.


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False, learners=4, steps=2000)
  config = common.base()
  config.name = 'moe'
  config.model.update(
    kind='moe',
    layers=2,
    d_model=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    d_ff=96,
    experts=8,
    top_k=2,
  )
  config.data.update(seq_len=64, batch=8)
  config.inner.update(lr=8e-3, warmup_steps=50)
  config.protocol.update(
    learners=args.learners,
    overlap_steps=1,
    total_steps=args.steps,
    grace_cap_steps=1.0,
    blend='carry',
  )
  config.lab.eval_every_steps = args.steps // 4
  return common.quicktest(config) if args.quicktest else config


def sweep(add):
  """Dense and mixture, data-parallel and decoupled, without and with bias."""
  biased = {'model.router_bias_rate': BIAS_RATE}
  parallel = {'lab.system': 'data_parallel'}
  dense = {'model.kind': 'decoder', 'model.d_ff': 192}
  add('dense, data-parallel', parallel | dense)
  add('dense, decoupled', dense, against='dense, data-parallel')
  add('moe, data-parallel', parallel, against='dense, data-parallel')
  add('moe, decoupled', {}, against='moe, data-parallel')
  add('moe with bias, data-parallel', parallel | biased, 'moe, data-parallel')
  add('moe with bias, decoupled', biased, 'moe with bias, data-parallel')
