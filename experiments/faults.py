# SPDX-License-Identifier: Apache-2.0
"""What do the other processes notice when one is killed, stopped or away?

A quadratic model of 1 M parameters on the seeded grammar, one syncer and three
learners. A step takes 20 ms, most of it slept, so that the measurement is not
of four processes that contend for the cores of one machine. Protocol, transport
and time-outs are the defaults.

Look at: the longest stall of the other learners' steps, goodput while the
syncer is away, and the time until the next merge.

Command: python -m launch.local --config=experiments/faults.py:chaos
  --workdir=DIR, six kills in one run, which the simulator then predicts:
  python -m diloco.simulate --replay=DIR
Variants: faults.py:quicktest, faults.py:learners=2, faults.py:steps=2000,
  faults.py:chaos.
"""

from experiments import common

CHAOS = (
  'kill learner 0 at 0.15',
  'kill learner 2 at 0.3',
  'kill learner 0 at 0.42',
  'kill syncer at 0.55',
  'kill learner 1 at 0.7',
  'kill learner 2 at 0.8',
)


@common.experiment('faults', chaos=False, learners=3, steps=1000)
def get_config(config, args):
  config.model.update(kind='bowl', layers=16, d_model=256, d_ff=256)
  config.data.update(
    source='grammar', seq_len=32, batch=4, grammar_bytes=1 << 18
  )
  config.inner.update(optimizer='sgd', lr=0.02, schedule='constant')
  config.protocol.update(learners=args.learners, total_steps=args.steps)
  config.run.update(log_every_steps=1, cpu_threads=2, step_floor_s=0.02)
  if args.chaos:
    config.protocol.total_steps = 3200
    config.faults = CHAOS
