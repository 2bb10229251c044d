# SPDX-License-Identifier: Apache-2.0
"""Does a small model learn a text of your own? No fault is planned.

Two learners and a syncer as processes of one machine, a byte-level decoder of
361,088 parameters, int4 both ways. Without a text it reads the source of
Python's standard library.

Command: python -m diloco train book.txt, or
  python -m launch.local --config=experiments/train.py --workdir=runs/book \\
    --config.data.source=text --config.data.path=book.txt
Hardware: 2 CPU cores. Wall time: 199 s of training beside much other
work; the loss is that of your text.
Variants: train.py:quicktest, train.py:learners=4, train.py:scale=150m
  (scales.py).
"""

from experiments import common, scales


@common.experiment('train', learners=2, scale=scales.SMALL)
def get_config(config, args):
  scales.on_two_cores(config, args.scale, args.learners)
  # Few shards: one batch of each has to fit into a short text.
  config.data.shards = max(4, args.learners)
  config.checkpoint.learner_every_steps = 100
