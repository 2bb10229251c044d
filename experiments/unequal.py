# SPDX-License-Identifier: Apache-2.0
"""What do quorum, grace, admission and weights do, where learners are slow?

Two of four learners make 40 % fewer steps than the others. The variants train
different numbers of tokens: a run ends at the fastest learner's last step, and
the work of a slow one counts only if it is merged. With K = M that is when the
slow ones have made all steps; one variant is run again for as many tokens.

Look at: loss, participation and merged tokens together.
"""

from experiments import scales, study

GAP = 0.4  # Of the steps of the slow ones.

FIRST_SEED = study.FIRST_SEED
get_config = study.base('unequal')


def sweep(add):
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
    'K = 1, grace, latest, tokens of K = M': scales.steps_of(
      round(study.STEPS / (1 - GAP))
    ),
  }
  slow = {'lab.slow_learners': 2, 'lab.slow_gap': GAP}
  study.add_variants(add, {k: slow | v for k, v in variants.items()})
