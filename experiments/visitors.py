# SPDX-License-Identifier: Apache-2.0
"""How much do learners help that are there for half of the run only?

Four learners are there from beginning to end. Four more, with as many sequences
each, are there for the first or for the second half: when one joins it takes
its state from a peer, and when one leaves it hands in its work. Both are
compared with the four alone, at equal steps, where the visitors add half as
many tokens again, and at equal tokens, where the run is a third shorter.

Look at: the loss against the four alone.
"""

from experiments import scales, study

STEADY = VISITORS = 4
HALVES = {'first half': (0.0, 0.5), 'second half': (0.5, 1.0)}


FIRST_SEED = study.FIRST_SEED
get_config = study.base('visitors')


def sweep(add):
  study.add_variants(add, {})
  for half, (begin, end) in HALVES.items():
    visit = {
      'protocol.learners': STEADY + VISITORS,
      'data.shards': STEADY + VISITORS,
      'lab.visitors': VISITORS,
      'lab.visit_from': begin,
      'lab.visit_until': end,
    }
    add(f'{half}, equal steps', visit, against=study.BASE)
    more = 1 + VISITORS / STEADY * (end - begin)  # Tokens of a step, mean.
    shorter = scales.steps_of(round(study.STEPS / more))
    add(f'{half}, equal tokens', visit | shorter, against=study.BASE)
