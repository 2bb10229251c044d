# SPDX-License-Identifier: Apache-2.0
"""Does a small model learn a text of your own? No fault is planned.

Two learners and a syncer as processes of one machine, a byte-level decoder of
361,088 parameters, int4 both ways. Without a text it reads the source of
Python's standard library.

Command: python -m diloco train --text=book.txt, or
  python -m launch.local --config=experiments/train.py --workdir=runs/book \\
    --config.data.source=text --config.data.path=book.txt
Hardware: 2 CPU cores. Wall time and final loss: TBD, filled in from a run.
Variants: train.py:quicktest, train.py:learners=4, train.py:scale=150m
  (scales.py).
"""

from experiments import common, scales


def get_config(arg=None):
  args = common.parse_arg(arg, quicktest=False, learners=2, scale=scales.SMALL)
  config = common.base()
  config.name = 'train'
  config.model.update(
    layers=2, d_model=128, heads=2, kv_heads=1, head_dim=64, d_ff=256
  )
  # Few shards: one batch of each has to fit into a short text.
  config.data.update(seq_len=128, batch=8, shards=max(4, args.learners))
  config.inner.update(lr=4e-3, schedule='cosine', warmup_steps=80)
  config.protocol.update(
    learners=args.learners,
    fragments=8,
    sync_every_steps=24,
    overlap_steps=6,
    quorum=1,
    total_steps=800,
  )
  config.checkpoint.learner_every_steps = 100
  config.run.cpu_threads = 2  # Three processes share two cores.
  if args.scale != scales.SMALL:  # That is smaller still than the above.
    scales.apply(config, args.scale)
    config.run.cpu_threads = 0
  return common.quicktest(config) if args.quicktest else config
