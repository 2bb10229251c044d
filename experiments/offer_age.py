# SPDX-License-Identifier: Apache-2.0
"""How old are merged contributions, and from how many learners do they come?

A simulation of learners of the same speed whose steps vary by 5 %. H = 24 with
P = 1 to 24 fragments, a quorum of 1 and of M/2, τ = 1 and 6; and τ = 4 over a
link that takes 0.7 of a step each way.

Look at: mean age, share of contributions older than 1.5 steps, participation.

Command: python -m diloco.simulate --config=experiments/offer_age.py
Hardware: 1 CPU core, no accelerator. Wall time and result:
  experiments/README.md.
Variants: offer_age.py:quicktest (5 s); any key, such as
  --config.fleet.jitter=0.1, --config.study.learners=8,.
"""

from experiments import common


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False)
  config = common.simulation('offer_age')
  defaults = common.base().protocol
  config.protocol.grace_cap_steps = defaults.grace_cap_steps
  config.fleet.jitter = 0.05
  if args.quicktest:
    config.study.update(steps=240, seeds=1, learners=(4,), overlaps=(1,))
  return config
