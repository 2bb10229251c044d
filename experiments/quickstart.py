# SPDX-License-Identifier: Apache-2.0
"""Does training go on, and the model improve, when a learner is killed?

A byte-level decoder on the Python standard library's own source; one syncer and
three learners as processes of one machine; int4 in both directions. A third of
the way through, learner 1 is killed with SIGKILL and started again.

Look at: the table at the end of the run, and the loss plot that it names.

Command: bash launch/quickstart.sh, or
  python -m launch.local --config=experiments/quickstart.py --workdir=runs/q
Variants: quickstart.py:quicktest (20 CPU seconds), quickstart.py:learners=4,
  quickstart.py:scale=150m (scales.py).
"""

from experiments import common, scales


@common.experiment('quickstart', learners=3, scale=scales.SMALL)
def get_config(config, args):
  scales.on_two_cores(config, args.scale, args.learners)
  config.faults = ('kill learner 1 at 0.33',)
