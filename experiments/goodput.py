# SPDX-License-Identifier: Apache-2.0
"""Which share of a fleet's time goes into training when chips fail?"""

from experiments import common, simulated


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False)
  config = simulated.base('goodput')
  if args.quicktest:
    config.study.update(
      chips=(600_000, 2_400_000), learners=(2, 4), learner_hours=0.5, seeds=2
    )
  return config
