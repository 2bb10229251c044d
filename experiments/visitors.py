# SPDX-License-Identifier: Apache-2.0
"""What do learners give that come for half of the run only?

Four learners are there from beginning to end. Four more, with as many
sequences each, come for its first or its second half: a joining one takes its
state from a peer, a leaving one hands in what it has. Against the four alone:
at equal steps, where visitors bring half as many tokens again, and at equal
tokens, where the run is by a third shorter.

Command: python -m diloco.lab --config=experiments/visitors.py --sweep \\
  --workdir=runs/visitors
Hardware: 2 CPU cores. Wall time and result: experiments/README.md.
Variants: visitors.py:quicktest, visitors.py:scale=150m; others in study.py.
"""

from experiments import study

STEADY = VISITORS = 4
HALVES = {'first half': (0.0, 0.5), 'second half': (0.5, 1.0)}


def get_config(arg=None):
  return study.config_of('visitors', arg)


def sweep(add):
  study.add_references(add)
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
    shorter = study.steps_of(round(study.STEPS / more))
    add(f'{half}, equal tokens', visit | shorter, against=study.BASE)
