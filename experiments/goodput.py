# SPDX-License-Identifier: Apache-2.0
"""Which share of a large fleet's time goes into training while chips fail?

A simulation of the paper's Table 1: 150 thousand to 2.4 million chips, each
interrupted once a year; data-parallel with and without elasticity, and
Decoupled DiLoCo with 2 to 16 learners, all on the same failures, in three ways
to recover from a lost slice: `wait`, which a learner of one slice does,
`restart`, and `elastic`, the paper's, which one of several slices does. A pause
of 13.7 s and a wait of 80 s are fitted to that table as a whole; nothing is
fitted to a single cell. A step takes 8 s, so that the same work covers eight
times as many failures as with steps of 1 s: goodput hardly depends on it, but
for `restart`, which loses 2.75 steps each time.

Look at: goodput by system, recovery and fleet size, next to the paper's.

Command: python -m diloco.simulate --config=experiments/goodput.py
With --check: the elastic cells alone, and 1 if they are too far off.
Variants: goodput.py:quicktest (a few seconds), goodput.py:step_s=1.0,
  --config.failures.recovery=wait for one of the three.
"""

from experiments import common


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False, step_s=8.0)
  config = common.simulation('goodput')
  config.fleet.step_s = args.step_s
  if args.quicktest:
    config.study.update(
      chips=(600_000, 2_400_000), learners=(2, 4), learner_hours=0.5, seeds=2
    )
  return config
