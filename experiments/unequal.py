# SPDX-License-Identifier: Apache-2.0
"""What do quorum, grace, admission and weights do to the loss?

Two of four learners make 40 % fewer steps than the others. The variants train
different numbers of tokens: a run ends at the fastest learner's last step, and
the work of a slow one counts only if it is merged.

Look at: loss, participation and merged tokens together.

Command: python -m diloco.lab --config=experiments/unequal.py --sweep \\
  --workdir=runs/unequal
Hardware: 2 CPU cores. Wall time and result: experiments/README.md.
Variants: unequal.py:quicktest, unequal.py:scale=150m; others in study.py.
"""

from experiments import study


def get_config(arg=None):
  return study.config_of('unequal', arg)


def sweep(add):
  study.add_references(add)
  slow = {'lab.slow_learners': 2, 'lab.slow_gap': 0.4}
  variants = {
    'all, K = M': {'protocol.quorum': 0},
    'K = 2': {'protocol.quorum': 2},
    'K = 1, no grace, fresh': {
      'protocol.grace_cap_steps': 0.0,
      'protocol.admission': 'fresh',
    },
    'K = 1, grace, fresh': {'protocol.admission': 'fresh'},
    'K = 1, no grace, latest': {'protocol.grace_cap_steps': 0.0},
    'K = 1, grace, latest': {},
    'the same, equal weights': {'protocol.weighting': 'equal'},
  }
  for label, changes in variants.items():
    add(label, slow | changes, against=study.DATA_PARALLEL)
