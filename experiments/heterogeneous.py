# SPDX-License-Identifier: Apache-2.0
"""What do quorum, grace and admission do to speed when some learners are slow?

A simulation of the paper's Table 5: 8 learners, 4 of them 18 % slower; the
length of a step varies by 10 %. The rows are a quorum of all learners (K=M), a
quorum of one (K=1) without and with the grace window under the paper's
admission rule, and the same two with the admission rule 'latest'.

Look at: the pace against the fastest learner, and the share of rounds in which
the slow learners take part.

Command: python -m diloco.simulate --config=experiments/heterogeneous.py
Variants: heterogeneous.py:quicktest (5 s); any key, such as
  --config.fleet.slow_gap=0.4, --config.network.latency_s=0.7.
"""

from experiments import common


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False)
  config = common.simulation('heterogeneous')
  config.fleet.update(slow_learners=4, jitter=0.1)
  if args.quicktest:
    config.study.update(steps=100, seeds=1)
  return config
