# SPDX-License-Identifier: Apache-2.0
"""What do learners save that come for half of the work only?"""

from experiments import common, simulated


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False)
  config = simulated.base('scavenging')
  config.protocol.learners = 4
  config.fleet.jitter = 0.1
  config.network.update(params=2e9, learner_gbps=100.0)
  if args.quicktest:
    config.study.update(extra=(0, 4), steps=60, seeds=1)
  return config
