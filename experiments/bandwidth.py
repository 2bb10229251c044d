# SPDX-License-Identifier: Apache-2.0
"""Which bandwidth between data centres keeps the chips busy?"""

from experiments import common, simulated


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False)
  config = simulated.base('bandwidth')
  if args.quicktest:
    config.study.update(steps=200, gbps=(0.43,), seeds=1)
  return config
