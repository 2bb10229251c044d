# SPDX-License-Identifier: Apache-2.0
"""Does Decoupled DiLoCo train a mixture of experts as well as data-parallel?

The run of `study.py` with 8 experts of width 96 in each layer, 2 of them for
each token, so that a token passes as many parameters as in the dense decoder
beside it. The load is balanced by the auxiliary loss alone, or also by the
router's bias, which is averaged outside the outer step.

Look at: the cross-entropy of each system.
"""

from experiments import study

BIAS_RATE = 1e-3  # Of DeepSeek-V3.
TOP_K = 2
FIRST_SEED = study.FIRST_SEED


def get_config(arg=None):
  config = study.base('moe')(arg)
  if config.model.kind != 'moe':  # As it is at the scale of that name.
    config.model.update(
      kind='moe', d_ff=config.model.d_ff // TOP_K, experts=8, top_k=TOP_K
    )
  return config


def sweep(add):
  """Dense and mixture, data-parallel and decoupled, without and with bias."""
  biased = {'model.router_bias_rate': BIAS_RATE}
  dense = {'model.kind': 'decoder', 'model.d_ff': 192}
  parallel = study.PARALLEL
  add('dense, data-parallel', parallel | dense)
  add('dense, decoupled', dense, against='dense, data-parallel')
  add('MoE, data-parallel', parallel, against='dense, data-parallel')
  add('MoE, decoupled', {}, against='MoE, data-parallel')
  add(
    'MoE with bias, data-parallel',
    parallel | biased,
    against='MoE, data-parallel',
  )
  add(
    'MoE with bias, decoupled', biased, against='MoE with bias, data-parallel'
  )
