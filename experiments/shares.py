# SPDX-License-Identifier: Apache-2.0
"""Does the loss depend on how learners share the sequences of a step?

Four learners share the 16 sequences of a step evenly, or 8 : 4 : 2 : 2, or
13 : 1 : 1 : 1, as machines of unlike speed would. All train as many tokens.

Look at: loss; merged tokens are nearly the same.
"""

from experiments import study

FIRST_SEED = study.FIRST_SEED
get_config = study.base('shares')


def sweep(add):
  uneven = '0: data.batch=8; 2-3: data.batch=2'
  most = '0: data.batch=13; 1-3: data.batch=1'
  variants = {
    '8 : 4 : 2 : 2': {'unlike_learners': uneven},
    '13 : 1 : 1 : 1': {'unlike_learners': most},
    '13 : 1 : 1 : 1, equal weights': {
      'unlike_learners': most,
      'protocol.weighting': 'equal',
    },
  }
  study.add_variants(add, variants)
