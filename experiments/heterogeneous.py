# SPDX-License-Identifier: Apache-2.0
"""What do quorum, grace and admission do where learners differ in speed?

A simulation: 8 learners, 4 of them 18 % slower, a step's length varies by
10 % (paper §7, Table 5; §8). Rows: K=M; K=1 without and with the grace window
under the paper's admission; the same two with admission 'latest'.

Command: python -m diloco.simulate --config=experiments/heterogeneous.py
Hardware: 1 CPU core, no accelerator. Wall time: TIME.
Result: RESULT
Variants: heterogeneous.py:quicktest (WALL), any key, such as
  --config.fleet.slow_gap=0.4 or --config.network.latency_s=0.7.
"""

from experiments import common, simulated


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False)
  config = simulated.base('heterogeneous')
  config.fleet.update(slow_learners=4, jitter=0.1)
  if args.quicktest:
    config.study.update(steps=100, seeds=1)
  return config
