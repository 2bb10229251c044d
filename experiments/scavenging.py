# SPDX-License-Identifier: Apache-2.0
"""How much time do learners save that are there for half of the work only?

A simulation of the paper's Table 4: 4 learners; after a quarter of the tokens
1, 2, 4 or 12 more join, each taking 24 GB from a peer over 100 Gbit/s, and they
are told to leave after three quarters. And of its Fig. 12: what it costs that
one more joins, by how long its copy of a state takes.

Look at: the time relative to the run without them, beside the ideal; the steps
that a copy costs, beside data-parallel, which stands meanwhile.

Command: python -m diloco.simulate --config=experiments/scavenging.py
Variants: scavenging.py:quicktest (3 s); any key, such as
  --config.network.learner_gbps=2, --config.study.end=1.0.
"""

from experiments import common


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False)
  config = common.simulation('scavenging')
  config.protocol.learners = 4
  config.fleet.jitter = 0.1
  config.network.update(params=2e9, learner_gbps=100.0)
  if args.quicktest:
    config.study.update(extra=(0, 4), copy_steps=(6,), steps=60, seeds=1)
  return config
