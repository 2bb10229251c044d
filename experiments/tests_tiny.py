# SPDX-License-Identifier: Apache-2.0
"""Do the processes of a run work together?

The smallest run of real processes: about 20 thousand parameters on the seeded
grammar, 2 learners, 60 steps. The tests start it; there is nothing to learn
from its loss.

Command:
  python -m launch.local --config=experiments/tests_tiny.py --workdir=runs/tiny
Hardware: any CPU. Wall time and final loss: TBD, filled in from a run.
Variants: tests_tiny.py:learners=3, tests_tiny.py:steps=200.
"""

from experiments import common


@common.experiment('tests-tiny', learners=2, steps=60)
def get_config(config, args):
  config.model.update(
    layers=1, d_model=32, heads=2, kv_heads=1, head_dim=16, d_ff=32
  )
  config.data.update(
    source='grammar', seq_len=32, batch=4, grammar_bytes=1 << 16
  )
  config.inner.update(warmup_steps=4)
  config.protocol.update(
    learners=args.learners,
    fragments=2,
    sync_every_steps=4,
    overlap_steps=2,
    total_steps=args.steps,
  )
  config.run.update(
    log_every_steps=1,
    eval_batches=2,
    eval_batch=4,
    eval_every_rounds=0,  # The tests of it ask for it.
    restart_delay_s=0.2,
    cpu_threads=2,
  )
  config.lab.final_eval_batches = 2
