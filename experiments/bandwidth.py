# SPDX-License-Identifier: Apache-2.0
"""Which bandwidth between data centres keeps the chips busy?

A model of 5 B parameters in 2 and in 8 data centres, T = 1 s: what
data-parallel, DiLoCo, streaming DiLoCo and Decoupled DiLoCo need for 50, 75,
90, 95 and 99 % utilisation, on one link (paper §6.2), the closed form beside
it; and what the real machines do at 0.1 … 3.4 Gbit/s.
"""

from experiments import common, simulated


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False)
  config = simulated.base('bandwidth')
  config.network.update(
    datacentres=2,  # Of the real machines.
    embedding_share=0.23,  # In one piece, as we read the paper (§6.2).
  )
  if args.quicktest:
    config.study.update(steps=200, gbps=(0.43,), seeds=1)
  return config
