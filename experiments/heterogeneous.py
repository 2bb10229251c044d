# SPDX-License-Identifier: Apache-2.0
"""What do quorum and grace do where learners differ in speed?"""

from experiments import common, simulated


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False)
  config = simulated.base('heterogeneous')
  config.fleet.update(slow_learners=4, jitter=0.1)
  if args.quicktest:
    config.study.update(steps=100, seeds=1)
  return config
