# SPDX-License-Identifier: Apache-2.0
"""What do the others notice when one process is killed, stopped or away?

A quadratic bowl of 1 M parameters on the seeded grammar, 1 syncer and 3
learners; a step takes 20 ms, most of it slept, so that what is measured is not
the contention of four processes for the cores of one machine. Protocol,
transport and time-outs are the defaults.

Command: python -m launch.fault_benchmark, which starts these processes, kills
  and stops them, and prints one table.
Hardware: 2 CPU cores, which others were using too (load 6 to 15). Wall time:
  320 s for 3 repetitions, 93 s for one.
Result, median (worst) of 3, jax_transfer; ▲ where the worst misses its target:
  longest stall of a step, no fault 22 (28) ms; of the others, a learner killed
  7 (16) ms, a syncer killed 4 (4) ms, a learner stopped 6 (6) ms, and while the
  killed process starts on the same cores 49 (309) ms ▲. Goodput while the
  syncer is away: 2.7 (2.3) points higher. From "listens" to the next merge:
  1.69 (1.88) s. While a learner is stopped for 8 s, no round closes for 7.7
  (8.0) s ▲: the round waits for its pull. Versions fall: never; one close
  that fell together with a kill of the syncer is missing on the tape ▲.
Variants: faults.py:quicktest, faults.py:learners=2, faults.py:steps=2000.
"""

from experiments import common


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False, learners=3, steps=1000)
  config = common.base()
  config.name = 'faults'
  config.model.update(kind='bowl', layers=16, d_model=256, d_ff=256)
  config.data.update(
    source='grammar', seq_len=32, batch=4, grammar_bytes=1 << 18
  )
  config.inner.update(optimizer='sgd', lr=0.02, schedule='constant')
  config.protocol.update(learners=args.learners, total_steps=args.steps)
  config.run.update(log_every_steps=1, cpu_threads=2, step_floor_s=0.02)
  return common.quicktest(config) if args.quicktest else config
